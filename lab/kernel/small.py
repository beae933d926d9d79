"""Small kernels for guests, with what Debian's has not: iommufd, and a node for each VFIO device (`VFIO_DEVICE_CDEV`).

They are built from Debian's source of a newer series: the nodes came with 6.6. Their driver called `nvidia` is the one
that Debian's kernel gets as a module.
"""

import inspect
import shutil
from pathlib import Path

from lab.cache import digest, once
from lab.kernel import driver
from lab.kernel.errors import LabError
from lab.kernel.packages import SourcePackage, run

SERIES = "6.12"
CONFIG = Path(__file__).parent / "small.config"
SAMPLE = "samples/vfio-mdev/mtty.c"
VARIANTS = {"cdevs": "# CONFIG_VFIO_GROUP is not set", "both": "CONFIG_VFIO_GROUP=y"}
"""With nodes of devices alone, and with those of groups as well, as distributions build it."""


def build_kernels(source: SourcePackage, folder: Path) -> Path:
    """Return a folder with a kernel of each variant's name."""

    def make(target: Path) -> None:
        tree, build = target / "source", target / "build"
        tree.mkdir()
        source.unpack(tree)
        sample = tree / SAMPLE
        sample.write_text(driver.nvidia_source(sample.read_text()))
        _make(tree, build, "tinyconfig")
        tiny = (build / ".config").read_text()
        for variant, groups in VARIANTS.items():
            # The last line about an option counts.
            (build / ".config").write_text(f"{tiny}\n{CONFIG.read_text()}\n{groups}\n")
            _make(tree, build, "olddefconfig")
            _check((build / ".config").read_text(), groups)
            _make(tree, build, "bzImage")
            shutil.copy(build / "arch/x86/boot/bzImage", target / variant)
        shutil.rmtree(tree)
        shutil.rmtree(build)

    made_from = (inspect.getsource(driver), CONFIG.read_text(), Path(__file__).read_text())
    return once(folder / f"kernels-{digest(*made_from)}", make)


def _make(tree: Path, build: Path, goal: str) -> None:
    run(["make", "-s", "-j2", "-C", str(tree), f"O={build}", goal])


def _check(config: str, groups: str) -> None:
    """Refuse a configuration from which something has silently fallen out, since what it needs has another name now."""
    lines = set(config.splitlines())
    desired = [line for line in (*CONFIG.read_text().splitlines(), groups) if line.startswith("CONFIG_")]
    if lost := [line for line in desired if line not in lines]:
        raise LabError(f"linux {SERIES} takes no {', '.join(lost)}")
