"""A simulated machine as plain files, so that other programs can read it: a snapshot, which does not act."""

from pathlib import Path

from gpuvirt.hardware.kernel import Kernel
from gpuvirt.sim.kernel import SimKernel
from gpuvirt.sim.tree import DeviceNode, File, Folder, Link


def export(kernel: SimKernel, target: Path) -> None:
    """Write the machine's `/sys`, `/dev` and `/proc` below `target`.

    Device nodes become empty files: that a group can be opened shows, who has it open does not. A file that can't be
    read is empty.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path, node in kernel.tree.walk():
        place = target / path.lstrip("/")
        match node:
            case Folder():
                place.mkdir(exist_ok=True)
            case Link():
                place.symlink_to(node.target)
            case DeviceNode():
                place.touch()
            case File():
                place.write_bytes(_content(kernel, node))


def _content(_kernel: Kernel, file: File) -> bytes:
    content = file.read() if file.read is not None else ""
    return content if isinstance(content, bytes) else content.encode()
