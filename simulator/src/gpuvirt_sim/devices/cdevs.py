"""Simulated nodes of VFIO devices (`/dev/vfio/devices/vfio0`): which processes have them open, or bound to an iommufd.

Measured on kernel 6.12: a node opens many times and binds once (EINVAL); one iommufd gets all devices of a group (EPERM
for another, and where a native driver has one of them); bound devices and an open group exclude each other (EBUSY); the
node disappears as soon as its driver begins to unbind, which waits until no process has the device open.
"""

import errno
from collections.abc import Callable

import msgspec

from gpuvirt.facts.ids import IommuGroup
from gpuvirt_sim.files.tree import fails


class CdevFile(msgspec.Struct, eq=False):
    """A node that a process has open. Each process has one iommufd."""

    device: str
    group: IommuGroup
    pid: int
    bound: bool = False
    lease: bool = False
    """The agent's lease, which is closed by itself when the kernel asks for the device."""


class Cdevs:
    """All open nodes of VFIO devices."""

    def __init__(self) -> None:
        self._files: list[CdevFile] = []

    def open(self, device: str, group: IommuGroup, pid: int) -> CdevFile:
        """Open the node of a device, which must exist."""
        file = CdevFile(device, group, pid)
        self._files.append(file)
        return file

    def bind(self, file: CdevFile, *, viable: bool) -> None:
        """Bind a device to the iommufd of its process; `viable`: no device of the group is on a native driver."""
        if any(other.bound for other in self.of_device(file.device)):
            raise fails(errno.EINVAL, file.device)
        if not viable or any(other.bound and other.pid != file.pid for other in self._of_group(file.group)):
            raise fails(errno.EPERM, file.device)
        file.bound = True

    def of_device(self, device: str) -> list[CdevFile]:
        """Return the open files of a device's node."""
        return [file for file in self._files if file.device == device]

    def is_bound(self, group: IommuGroup) -> bool:
        """Return whether a process has bound a device of this group."""
        return any(file.bound for file in self._of_group(group))

    def close(self, closes: Callable[[CdevFile], bool]) -> list[str]:
        """Close files, and return the devices that no process has open any more."""
        closed = [file for file in self._files if closes(file)]
        self._files = [file for file in self._files if file not in closed]
        return [file.device for file in closed if not self.of_device(file.device)]

    def _of_group(self, group: IommuGroup) -> list[CdevFile]:
        return [file for file in self._files if file.group == group]
