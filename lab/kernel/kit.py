"""All that a guest is booted from, made ready in the cache."""

from dataclasses import dataclass
from pathlib import Path

from lab.cache import cache_root, locked
from lab.kernel.initramfs import make_initramfs
from lab.kernel.modules import build_modules
from lab.kernel.packages import find_kernel


@dataclass(frozen=True, slots=True)
class Kit:
    """What a guest is booted from."""

    release: str
    """The kernel's: `6.1.0-56-amd64`."""
    kernel: Path
    initramfs: Path
    modules: Path
    """Debian's, as `/lib/modules`."""
    samples: Path
    """The folder of the modules that were built, of which the guest has `nvidia` loaded."""


def prepare() -> Kit:
    """Return what a guest is booted from; what is missing of it is fetched and built."""
    packages = find_kernel()
    root = cache_root() / "kernel"
    root.mkdir(exist_ok=True)
    folder = root / f"{packages.release}_{packages.version}"
    with locked(root):
        image = packages.fetch_image(folder)
        samples = build_modules(packages, folder)
        initramfs = make_initramfs(image, packages.release, [samples / "nvidia.ko"], folder)
    return Kit(
        release=packages.release,
        kernel=image / "boot" / f"vmlinuz-{packages.release}",
        initramfs=initramfs,
        modules=image / "lib/modules",
        samples=samples,
    )
