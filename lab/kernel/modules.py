"""The drivers that Debian does not build: samples of mediated device drivers, `nvidia`, a VFIO variant driver, and a
native driver with a device node.

`nvidia` is made from one of the samples.
"""

import inspect
import shutil
import subprocess
from pathlib import Path

from lab.cache import digest, once
from lab.kernel import driver
from lab.kernel.errors import LabError
from lab.kernel.packages import KernelPackages

VARIANT = "gpuvirt_variant_vfio_pci"
VARIANT_SOURCE = Path(__file__).parent / "variant.c"
NATIVE = "gpuvirt_native"
NATIVE_SOURCE = Path(__file__).parent / "native.c"
LOADED = ("nvidia", VARIANT)
"""The modules that a guest loads at boot."""
BUILT = (*LOADED, NATIVE, "mtty", "mdpy")


def build_modules(packages: KernelPackages, folder: Path) -> Path:
    """Return a folder with the modules, built out of tree with Debian's headers."""
    headers, samples = packages.fetch_headers(folder), packages.fetch_samples(folder)

    def make(target: Path) -> None:
        for source in samples.iterdir():
            shutil.copy(source, target)
        (target / "nvidia.c").write_text(driver.nvidia_source((samples / "mtty.c").read_text()))
        shutil.copy(VARIANT_SOURCE, target / f"{VARIANT}.c")
        shutil.copy(NATIVE_SOURCE, target / f"{NATIVE}.c")
        (target / "Makefile").write_text("obj-m := " + " ".join(f"{name}.o" for name in BUILT) + "\n")
        command = ["make", "-s", "-j2", "-C", str(headers), f"M={target}", "modules"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LabError(f"the modules can't be built: {done.stderr[-4000:]}")

    sources = (inspect.getsource(driver), VARIANT_SOURCE.read_text(), NATIVE_SOURCE.read_text())
    return once(folder / f"modules-{digest(*sources, *BUILT)}", make)
