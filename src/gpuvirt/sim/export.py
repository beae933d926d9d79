"""A simulated host as plain files, so that other programs can read it: a snapshot, which does not act."""

from collections.abc import Collection
from pathlib import Path

from gpuvirt.errors import GpuvirtError
from gpuvirt.paths import HostPath
from gpuvirt.sim.kernel import SimKernel
from gpuvirt.sim.tree import DeviceNode, File, Folder, Link


class LeavesTargetError(GpuvirtError):
    """A machine has a path that would be written outside the folder that it is exported to."""


def export(kernel: SimKernel, target: Path, *, leave_out: Collection[str] = ()) -> None:
    """Write the machine's files below `target`, but for folders of its `/` that are left out.

    Device nodes become empty files: that a group can be opened shows, who has it open does not. A file that can't be
    read is empty.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path, node in kernel.tree.walk():
        if path.split("/")[1] in leave_out:
            continue
        place = _place(target, path)
        match node:
            case Folder():
                place.mkdir(exist_ok=True)
            case Link():
                place.symlink_to(node.target)
            case DeviceNode():
                place.touch()
            case File():
                place.write_bytes(_content(node))


def _place(target: Path, path: HostPath) -> Path:
    if ".." in path.split("/"):
        raise LeavesTargetError(f"{path} would be written outside {target}; expected a path without '..'")
    return target / path.lstrip("/")


def _content(file: File) -> bytes:
    content = file.read() if file.read is not None else ""
    return content if isinstance(content, bytes) else content.encode()
