"""The files that a guest boots from, prepared in the cache."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lab.cache import cache_root, locked
from lab.kernel.initramfs import debians_modules, make_initramfs
from lab.kernel.modules import LOADED, build_modules
from lab.kernel.packages import KernelPackages, SourcePackage, find_kernels, find_sources, take_newest
from lab.kernel.small import SERIES, build_kernels


class Flavour(Enum):
    """The kernel of a guest, named by its nodes under `/dev/vfio`."""

    GROUPS = "groups"
    """Debian's own kernel, 6.1, with a node for each group."""
    CDEVS = "cdevs"
    """6.12, with a node for each device and none for groups."""
    BOTH = "both"
    """6.12, with both kinds of nodes, as most distributions build theirs."""


@dataclass(frozen=True, slots=True)
class Kit:
    """The files that a guest boots from."""

    kernel: Path
    initramfs: Path
    modules: Path
    """The folder of `/lib/modules`."""
    samples: Path
    """The folder of the modules that the lab has built; a guest loads those in `modules.LOADED` at boot."""


def prepare(flavour: Flavour = Flavour.GROUPS) -> Kit:
    """Return the files that a guest boots from, and fetch and build the missing ones."""
    root = cache_root() / "kernel"
    root.mkdir(exist_ok=True)
    with locked(root):
        if flavour is Flavour.GROUPS:
            return take_newest(find_kernels, lambda packages: _debians(root, packages))
        return take_newest(lambda: find_sources(SERIES), lambda source: _small(root, source, flavour))


def _debians(root: Path, packages: KernelPackages) -> Kit:
    folder = root / f"{packages.release}_{packages.version}"
    image = packages.fetch_image(folder)
    debians = debians_modules(image, packages.release)
    samples = build_modules(packages, folder, debians)
    modules = [*debians, *(samples / f"{name}.ko" for name in LOADED)]
    return Kit(
        kernel=image / "boot" / f"vmlinuz-{packages.release}",
        initramfs=make_initramfs(modules, folder),
        modules=image / "lib/modules",
        samples=samples,
    )


def _small(root: Path, source: SourcePackage, flavour: Flavour) -> Kit:
    folder = root / f"small_{source.version}"
    kernels = build_kernels(source, folder)
    nothing = folder / "modules"
    nothing.mkdir(exist_ok=True)
    return Kit(kernels / flavour.value, make_initramfs([], folder), modules=nothing, samples=nothing)
