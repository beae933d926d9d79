"""The simulated kernel's files, `/sys`, `/dev` and `/proc`, as file system calls."""

import errno
import itertools
import os
import stat
import time
from collections.abc import Sequence

from gpuvirt.hardware.access.kernel import ATTRIBUTE_BYTES
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.vfio import group_of_node
from gpuvirt_sim.files.tree import DeviceNode, File, Folder, Link, Node, fails
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.mounted.groupfiles import GroupFiles
from gpuvirt_sim.mounted.nodes import Nodes
from gpuvirt_sim.mounted.record import Record

NULL = os.makedev(1, 3)
"""`/dev/null`, which every process can open on any host."""


class KernelFiles:
    """Passes file system calls to the simulated kernel. Every call raises OSError with the errno of a real kernel."""

    def __init__(self, kernel: SimKernel, nodes: Nodes, record: Record) -> None:
        self._kernel = kernel
        self._nodes = nodes
        self._record = record
        self._since_ns = time.time_ns()
        self._handles = itertools.count(1)
        self._groups = GroupFiles(kernel)

    def getattr(self, path: str) -> dict[str, int]:
        """Return the `stat` of a path."""
        mode, size = self._mode_and_size(self._find(path))
        links = 2 if stat.S_ISDIR(mode) else 1
        times = dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), self._since_ns)
        return {"st_mode": mode, "st_size": size, "st_nlink": links, "st_rdev": NULL, **times}

    def readdir(self, path: str) -> Sequence[str]:
        """Return the names in a folder."""
        return self._kernel.listdir(HostPath(path))

    def readlink(self, path: str) -> str:
        """Return where a link points."""
        return self._kernel.readlink(HostPath(path))

    def open(self, path: str, flags: int, pid: int) -> int:
        """Open a file. Opening an unreadable or unwritable file fails here, also for root (kernfs_fop_open)."""
        node, access, handle = self._find(path), flags & os.O_ACCMODE, next(self._handles)
        if isinstance(node, File):
            unreadable = access != os.O_WRONLY and node.read is None
            if unreadable or (access != os.O_RDONLY and node.write is None):
                raise fails(errno.EACCES, path)
        if isinstance(node, DeviceNode) and (group := group_of_node(path)) is not None:
            self._groups.open(handle, group, pid)
        return handle

    def read(self, path: str, size: int, offset: int, handle: int) -> bytes:
        """Read from a file."""
        if handle in self._groups:
            return self._groups.read(handle)
        if isinstance(self._find(path), DeviceNode):
            return b""
        return self._kernel.read(HostPath(path), limit=max(ATTRIBUTE_BYTES, offset + size))[offset : offset + size]

    def write(self, path: str, data: bytes, handle: int, pid: int) -> int:
        """Write to a file. The effect is complete when this returns; a blocked write may never return."""
        if handle in self._groups:
            return self._groups.write(handle, data)
        with self._record.of(pid, path, data.decode(errors="replace")):
            self._kernel.write(HostPath(path), data)
        return len(data)

    def release(self, handle: int) -> int:
        """Close a file for the last time."""
        if handle in self._groups:
            self._groups.close(handle)
        return 0

    def unlink(self, path: str) -> int:
        """Delete the node of a group, as an administrator might; no other file can be deleted."""
        group = group_of_node(path)
        if group is None or not isinstance(self._find(path), DeviceNode):
            raise fails(errno.EPERM, path)
        self._kernel.delete_node(group)
        return 0

    def _find(self, path: str) -> Node:
        with self._kernel.blocking.condition:
            return self._kernel.tree.find(HostPath(path), follow=False)

    def _mode_and_size(self, node: Node) -> tuple[int, int]:
        match node:
            case Folder():
                return stat.S_IFDIR | 0o755, 0
            case Link(target=target):
                return stat.S_IFLNK | 0o777, len(target)
            case DeviceNode():
                kind = stat.S_IFCHR if self._nodes is Nodes.NULL else stat.S_IFREG
                return kind | 0o600, 0
            case File(read=read, write=write):
                return stat.S_IFREG | (0o444 if read else 0) | (0o200 if write else 0), ATTRIBUTE_BYTES
