"""The drivers that Debian does not build: samples of mediated device drivers, `nvidia`, a VFIO variant driver, and a
native driver with a device node.

`nvidia` is made from one of the samples.
"""

import inspect
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lab.cache import digest, once
from lab.kernel import driver
from lab.kernel.errors import NotAvailableError
from lab.kernel.packages import KernelPackages, run

VARIANT = "gpuvirt_variant_vfio_pci"
VARIANT_SOURCE = Path(__file__).parent / "variant.c"
NATIVE = "gpuvirt_native"
NATIVE_SOURCE = Path(__file__).parent / "native.c"
LOADED = ("nvidia", VARIANT)
"""The modules that a guest loads at boot."""
BUILT = (*LOADED, NATIVE, "mtty", "mdpy")


def build_modules(packages: KernelPackages, folder: Path, debians: Sequence[Path]) -> Path:
    """Return a folder with the modules, built out of tree with Debian's headers; `debians` are modules of the image.

    Raises LabError, and NotAvailableError where the headers are of another build of the kernel than the image.
    """
    samples = packages.fetch_samples(folder)

    def make(target: Path) -> None:
        for source in samples.iterdir():
            shutil.copy(source, target)
        (target / "nvidia.c").write_text(driver.nvidia_source((samples / "mtty.c").read_text()))
        shutil.copy(VARIANT_SOURCE, target / f"{VARIANT}.c")
        shutil.copy(NATIVE_SOURCE, target / f"{NATIVE}.c")
        (target / "Makefile").write_text("obj-m := " + " ".join(f"{name}.o" for name in BUILT) + "\n")
        # Not kept: the archive may have headers tomorrow that fit.
        with tempfile.TemporaryDirectory(dir=folder, prefix="headers-") as unpacked:
            headers = packages.fetch_headers(Path(unpacked))
            run(["make", "-s", "-j2", "-C", str(headers), f"M={target}", "modules"])
            check_fit(headers / "Module.symvers", target / f"{LOADED[0]}.ko", debians)

    sources = (inspect.getsource(driver), VARIANT_SOURCE.read_text(), NATIVE_SOURCE.read_text())
    return once(folder / f"modules-{digest(*sources, *BUILT)}", make)


def check_fit(symvers: Path, built: Path, debians: Sequence[Path]) -> None:
    """Raise NotAvailableError where a kernel that loads these modules of Debian's refuses the one that was built.

    The kernel compares the vermagic, and the checksum of each symbol that a module uses (`check_version` in
    kernel/module/version.c). The headers have the checksums of all symbols in Module.symvers, an image has those that
    its modules use: among them `module_layout`, but no symbol that only our modules use.
    """
    magic = run(["modinfo", "-F", "vermagic", str(built)]).strip()
    lines = (line.split() for line in symvers.read_text().splitlines())
    sums = {line[1]: int(line[0], 16) for line in lines}
    for module in debians:
        if (its_magic := run(["modinfo", "-F", "vermagic", str(module)]).strip()) != magic:
            raise NotAvailableError(f"the headers build modules for {magic}, and {module.name} is for {its_magic}")
        for line in run(["modprobe", "--dump-modversions", str(module)]).splitlines():
            checksum, symbol = line.split()
            if sums.get(symbol, int(checksum, 16)) != int(checksum, 16):
                found = f"{symbol} of {module.name} has the checksum {checksum}"
                raise NotAvailableError(f"{found}, and {sums[symbol]:#010x} in {symvers}")
