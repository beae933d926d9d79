"""Writes a simulated host as plain files, a snapshot that other programs can read."""

from collections.abc import Collection
from pathlib import Path

from gpuvirt.errors import GpuvirtError
from gpuvirt.paths import HostPath
from gpuvirt_sim.files.tree import DeviceNode, File, Folder, Link
from gpuvirt_sim.kernel import SimKernel


class LeavesTargetError(GpuvirtError):
    """A path of the simulated host lies outside the folder that it is exported to."""


def export(kernel: SimKernel, target: Path, *, leave_out: Collection[str] = ()) -> None:
    """Write the simulated host's files below `target`, except for top-level folders in `leave_out`.

    Device nodes become empty files, which show that a group can be opened, but not which process has it open. A file
    that can't be read becomes empty.
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
