"""The guest's first file system: busybox, the modules that the guest needs, and the program `init` beside this file."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lab.cache import digest, once
from lab.kernel.errors import LabError
from lab.kernel.packages import run

INIT = Path(__file__).parent / "init"

DEBIANS = (
    *("virtio_pci", "virtio_console", "9p", "9pnet_virtio", "overlay"),
    *("vfio", "vfio_iommu_type1", "vfio-pci", "mdev", "snd-hda-intel"),
)
"""The modules that the guest needs to run, those to be tested, and the driver of the GPUs' audio functions."""

FOLDERS = ("bin", "dev", "proc", "sys", "m", "newroot", "run", "tmp", "share", "ro", "rw")


def make_initramfs(modules: Sequence[Path], folder: Path) -> Path:
    """Return the initramfs; the guest loads the modules in this order."""

    def make(target: Path) -> None:
        root = target / "root"
        for name in FOLDERS:
            (root / name).mkdir(parents=True)
        shutil.copy(_busybox(), root / "bin/busybox")  # the binary selects its applet by this name
        shutil.copy(INIT, root / "init")
        (root / "init").chmod(0o755)
        for file in modules:
            shutil.copy(file, root / "m")
        (root / "load").write_text("".join(f"{file.name}\n" for file in modules))
        _pack(root, target / "initramfs")
        shutil.rmtree(root)

    parts = (Path(__file__).read_text(), INIT.read_text(), *(str(module) for module in modules))
    return once(folder / f"initramfs-{digest(*parts)}", make) / "initramfs"


def debians_modules(image: Path, release: str) -> list[Path]:
    """Return the modules of Debian's kernel that a guest needs, in the order of their dependencies."""
    found: dict[Path, None] = {}
    for module in DEBIANS:
        shown = run(["modprobe", "-d", str(image), "-S", release, "--show-depends", module])
        lines = (line.split() for line in shown.splitlines())
        found |= dict.fromkeys(Path(line[1]) for line in lines if line[0] == "insmod")
    return list(found)


def _busybox() -> str:
    found = shutil.which("busybox")
    if found is None:
        raise LabError("there is no busybox: apt-get install busybox-static")
    return found


def _pack(root: Path, archive: Path) -> None:
    names = "\n".join(sorted(str(path.relative_to(root)) for path in root.rglob("*")))
    with archive.open("wb") as out:
        subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], cwd=root, input=names.encode(), stdout=out, check=True)
