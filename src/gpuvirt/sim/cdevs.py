"""Simulated nodes of VFIO devices (`/dev/vfio/devices/vfio0`): who has one open, and who has it bound to an iommufd.

Measured on kernel 6.12: a node opens many times and binds once (EINVAL); one iommufd has all devices of a group (EPERM
for another, and where a native driver has one of them); bound devices and an open group keep each other out (EBUSY);
the node goes as soon as its driver is to let go, which waits until nobody has the device open any more.
"""

import errno
from collections.abc import Callable
from dataclasses import dataclass

from gpuvirt.facts.ids import IommuGroup
from gpuvirt.sim.tree import fails


@dataclass(slots=True, eq=False)
class CdevFile:
    """A node that a process has open; one iommufd a process."""

    device: str
    group: IommuGroup
    pid: int
    bound: bool = False
    lease: bool = False
    """It is the agent's lease, which lets go by itself when the kernel wants the device."""


class Cdevs:
    """All nodes of devices that are open."""

    def __init__(self) -> None:
        self._files: list[CdevFile] = []

    def open(self, device: str, group: IommuGroup, pid: int) -> CdevFile:
        """Open a device's node, which is there."""
        file = CdevFile(device, group, pid)
        self._files.append(file)
        return file

    def bind(self, file: CdevFile, *, viable: bool) -> None:
        """Bind a device to the iommufd of the process that has it open; `viable`: no native driver has a neighbour."""
        if any(other.bound for other in self.of_device(file.device)):
            raise fails(errno.EINVAL, file.device)
        if not viable or any(other.bound and other.pid != file.pid for other in self._of_group(file.group)):
            raise fails(errno.EPERM, file.device)
        file.bound = True

    def of_device(self, device: str) -> list[CdevFile]:
        """Return the open files of a device."""
        return [file for file in self._files if file.device == device]

    def is_bound(self, group: IommuGroup) -> bool:
        """Return whether a process has a device of this group bound."""
        return any(file.bound for file in self._of_group(group))

    def close(self, closes: Callable[[CdevFile], bool]) -> list[str]:
        """Close files, and return the devices that nobody has open any more."""
        gone = [file for file in self._files if closes(file)]
        self._files = [file for file in self._files if file not in gone]
        return [file.device for file in gone if not self.of_device(file.device)]

    def _of_group(self, group: IommuGroup) -> list[CdevFile]:
        return [file for file in self._files if file.group == group]
