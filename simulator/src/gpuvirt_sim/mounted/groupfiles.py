"""VFIO groups that processes have open on a mounted host.

A file can't answer ioctls. Instead, the word `use`, written to an open group, does what a VM does by ioctls: it takes
all devices of the group, until the file is closed. A read returns the devices that the kernel has asked back since the
last read (VFIO's request event), one per line.
"""

import errno

import msgspec

from gpuvirt.facts.ids import IommuGroup
from gpuvirt_sim.files.tree import fails
from gpuvirt_sim.kernel import SimKernel

USE = b"use"


class _Opened(msgspec.Struct):
    """A group that a process has open."""

    group: IommuGroup
    requests_read: int
    """The number of requests on the whole host before the last read."""


class GroupFiles:
    """All open groups, by the handles of their files."""

    def __init__(self, kernel: SimKernel) -> None:
        self._kernel = kernel
        self._opened: dict[int, _Opened] = {}

    def __contains__(self, handle: int) -> bool:
        return handle in self._opened

    def open(self, handle: int, group: IommuGroup, pid: int) -> None:
        """Open a group, which fails while another process has it open."""
        with self._kernel.blocking.condition:
            self._kernel.vfio.open(group, pid)
            self._opened[handle] = _Opened(group, len(self._kernel.vfio.requests))

    def write(self, handle: int, data: bytes) -> int:
        """Take the devices of a group."""
        opened = self._opened[handle]
        if data.strip() != USE:
            raise fails(errno.EINVAL, f"/dev/vfio/{opened.group}")
        self._kernel.use_devices(opened.group)
        return len(data)

    def read(self, handle: int) -> bytes:
        """Return the devices of a group that the kernel has asked back since the last read."""
        opened, vfio = self._opened[handle], self._kernel.vfio
        with self._kernel.blocking.condition:
            requests = vfio.requests[opened.requests_read :]
            opened.requests_read = len(vfio.requests)
            group = vfio.groups.get(opened.group)
            return "".join(f"{device}\n" for device in requests if group and device in group.members).encode()

    def close(self, handle: int) -> None:
        """Close a group; writers that wait for its devices continue."""
        opened = self._opened.pop(handle)
        with self._kernel.blocking.condition:
            self._kernel.vfio.close(opened.group)
