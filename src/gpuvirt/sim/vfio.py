"""Simulated IOMMU groups and VFIO: who has which group open, and what its devices' users are asked.

Measured on kernel 6.1: a group opens once, a second open gives EBUSY; its node comes with the first device on a VFIO
driver and goes with the last; asked to give a device back, the user's request eventfd fires and the device stays until
the user closes it.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuvirt.facts.ids import IommuGroup
from gpuvirt.paths import HostPath
from gpuvirt.sim.cdevs import CdevFile, Cdevs
from gpuvirt.sim.tree import DeviceNode, Folder, Tree, constant, fails

GROUPS = "/sys/kernel/iommu_groups"
CDEVS = "/dev/vfio/devices"
VFIO_MAJOR = 511
"""A dynamic major, as alloc_chrdev_region would give."""
CDEV_MAJOR = VFIO_MAJOR - 1
GROUP_CLASS = "/sys/class/vfio"
CDEV_CLASS = "/sys/class/vfio-dev"


def group_number(group: IommuGroup) -> int:
    """Return the device number of a group's node."""
    return os.makedev(VFIO_MAJOR, group)


def group_of_node(path: str) -> IommuGroup | None:
    """Return the group whose node is at a path, None where it is no group's."""
    folder, _, name = path.rpartition("/")
    return IommuGroup(int(name)) if folder == "/dev/vfio" and name.isdecimal() else None


@dataclass(slots=True, eq=False)
class Group:
    """One IOMMU group."""

    number: IommuGroup
    members: set[str] = field(default_factory=set)
    vfio_devices: dict[str, HostPath] = field(default_factory=dict)
    """The members that a VFIO driver has, with their folders."""
    user: int | None = None
    """The process that has the group open."""
    owned: bool = False
    """That process has the group in a container: its devices' memory accesses are its own."""
    devices_in_use: set[str] = field(default_factory=set)
    """The devices of which that process also has the device open, as a virtual machine has."""
    asked_back: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Devices that somebody waits for, with what happens when the user lets go."""


class Vfio:
    """All groups of a machine."""

    def __init__(self, tree: Tree, *, iommufd: bool, group_nodes: bool, changed: Callable[[], None]) -> None:
        self.cdev_nodes = iommufd
        """Whether devices have nodes of their own (VFIO_DEVICE_CDEV)."""
        self.vfio_dev = True
        """Whether devices have a folder `vfio-dev`; kernels before 6.1 have none."""
        self.groups: dict[IommuGroup, Group] = {}
        self.requests: list[str] = []
        """Devices whose user was asked to give them back: each is a virtual machine that loses its GPU."""
        self.hidden_nodes: set[IommuGroup] = set()
        """Groups whose node somebody has deleted by hand."""
        self._tree = tree
        self._iommufd = iommufd
        self.group_nodes = group_nodes
        """Whether groups have nodes (VFIO_GROUP); where they have none, mdevs are in no group at all."""
        self._changed = changed
        self._indices: dict[str, int] = {}
        self._cdevs = Cdevs()
        tree.make(HostPath(GROUPS))
        if iommufd:
            tree.place(HostPath("/dev/iommu"), DeviceNode(10 << 8 | 125))
            tree.make(HostPath("/sys/class/misc/iommu"))

    def load(self) -> None:
        """Load the modules: from now on there is `/dev/vfio/vfio`, unless the kernel has no groups (VFIO_GROUP=n)."""
        if self.group_nodes:
            self._tree.place(HostPath("/dev/vfio/vfio"), DeviceNode(10 << 8 | 196))

    def join(self, number: IommuGroup, device: str, folder: HostPath) -> None:
        """Put a device into a group."""
        group = self.groups.setdefault(number, Group(number))
        group.members.add(device)
        if not self._is_shown(device):
            return
        self._tree.make(HostPath(f"{GROUPS}/{number}/devices"))
        self._tree.link(HostPath(f"{GROUPS}/{number}/devices/{device}"), folder)

    def leave(self, number: IommuGroup, device: str) -> None:
        """Take a device out of a group; the last one takes the group with it."""
        group = self.groups[number]
        group.members.discard(device)
        self._tree.remove(HostPath(f"{GROUPS}/{number}/devices/{device}"))
        if not group.members:
            self._tree.remove(HostPath(f"{GROUPS}/{number}"))
            del self.groups[number]

    def _is_shown(self, device: str) -> bool:
        """Return whether a device is in a group as the kernel has it; without VFIO_GROUP mdevs are in none."""
        return self.group_nodes or ":" in device

    def enlist(self, number: IommuGroup, device: str, folder: HostPath) -> None:
        """A VFIO driver has taken a device: its group can be opened."""
        self.groups[number].vfio_devices[device] = folder
        self._show_class(number)
        if number not in self.hidden_nodes:
            self.show_node(number)
        index = self._indices.setdefault(device, max(self._indices.values(), default=-1) + 1)
        if self.vfio_dev:
            self._tree.place(HostPath(f"{folder}/vfio-dev/vfio{index}"), Folder())
        if self.cdev_nodes:
            self._tree.place(HostPath(f"{CDEVS}/vfio{index}"), DeviceNode(os.makedev(CDEV_MAJOR, index)))
            self._tree.place(HostPath(f"{CDEV_CLASS}/vfio{index}/dev"), constant(f"{CDEV_MAJOR}:{index}"))

    def call(self, device: str, number: int) -> None:
        """Let a device be `vfio<number>` when a VFIO driver has it; raise ValueError where another is."""
        if number in self._indices.values():
            raise ValueError(f"another device is vfio{number}")
        self._indices[device] = number

    def discharge(self, number: IommuGroup, device: str, folder: HostPath) -> None:
        """A VFIO driver has let a device go."""
        group = self.groups[number]
        group.vfio_devices.pop(device, None)
        group.asked_back.pop(device, None)
        if not group.vfio_devices:
            self._tree.remove(HostPath(f"/dev/vfio/{number}"))
            self._tree.remove(HostPath(f"{GROUP_CLASS}/{number}"))
        self._hide(device, folder)

    def _hide(self, device: str, of: HostPath) -> None:
        self._tree.remove(HostPath(f"{of}/vfio-dev"))
        if self.cdev_nodes:
            self._tree.remove(HostPath(f"{CDEVS}/vfio{self._indices[device]}"))
            self._tree.remove(HostPath(f"{CDEV_CLASS}/vfio{self._indices[device]}"))
            for folder in (HostPath(CDEVS), HostPath("/dev/vfio")):  # devtmpfs made them with the first node
                if self._tree.exists(folder) and not self._tree.folder(folder).entries:
                    self._tree.remove(folder)

    def show_node(self, number: IommuGroup) -> None:
        """Put a group's node under `/dev/vfio`."""
        if self.group_nodes:
            self._tree.place(HostPath(f"/dev/vfio/{number}"), DeviceNode(group_number(number)))

    def _show_class(self, number: IommuGroup) -> None:
        """Let the kernel tell a group's device number, whatever somebody does to its node."""
        if self.group_nodes:
            self._tree.place(HostPath(f"{GROUP_CLASS}/{number}/dev"), constant(f"{VFIO_MAJOR}:{number}"))

    def open(self, number: IommuGroup, pid: int) -> None:
        """Open a group for a process."""
        node = f"/dev/vfio/{number}"
        if not self._tree.exists(HostPath(node)):
            raise fails(errno.ENOENT, node)
        group = self.groups[number]
        if group.user is not None or self._cdevs.is_bound(number):
            raise fails(errno.EBUSY, node)
        group.user = pid

    def open_device(self, name: str, pid: int) -> CdevFile:
        """Open a device's own node (`vfio0`) for a process."""
        node = f"{CDEVS}/{name}"
        if not self._tree.exists(HostPath(node)):
            raise fails(errno.ENOENT, node)
        device = next(device for device, index in self._indices.items() if name == f"vfio{index}")
        group = next(group.number for group in self.groups.values() if device in group.vfio_devices)
        return self._cdevs.open(device, group, pid)

    def bind_device(self, file: CdevFile, is_friendly: Callable[[str], bool]) -> None:
        """Bind a device that is open to its process's iommufd (VFIO_DEVICE_BIND_IOMMUFD), as a virtual machine does."""
        group = self.groups[file.group]
        if group.user is not None:
            raise fails(errno.EBUSY, file.device)
        self._cdevs.bind(file, viable=all(is_friendly(member) for member in group.members))

    def close_devices(self, closes: Callable[[CdevFile], bool]) -> None:
        """Close nodes of devices; those who waited for them go on."""
        for device in self._cdevs.close(closes):
            self._finish_waiting(device)

    def _finish_waiting(self, device: str) -> None:
        for group in list(self.groups.values()):
            if device in group.asked_back and not self.in_use(group.number, device):
                group.asked_back.pop(device)()

    def own(self, number: IommuGroup, is_friendly: Callable[[str], bool]) -> None:
        """Put a group that is open into a container (VFIO_GROUP_SET_CONTAINER), as a virtual machine does."""
        group = self.groups[number]
        if not all(is_friendly(member) for member in group.members):
            raise fails(errno.EPERM, f"/dev/vfio/{number}")  # it is not viable
        group.owned = True

    def is_owned(self, number: IommuGroup) -> bool:
        """Return whether a group's devices do what a process says: no native driver gets one of them then."""
        return self.groups[number].owned or self._cdevs.is_bound(number)

    def use(self, number: IommuGroup, device: str) -> None:
        """Open a device of a group that is in a container."""
        group = self.groups[number]
        if device not in group.vfio_devices:
            raise fails(errno.ENODEV, device)
        group.devices_in_use.add(device)

    def close(self, number: IommuGroup) -> None:
        """Close a group and its devices; those who waited for them go on."""
        group = self.groups.get(number)
        if group is None:  # its last device went while it was open
            return
        group.user, group.owned = None, False
        group.devices_in_use.clear()
        for device in list(group.asked_back):
            self._finish_waiting(device)

    def in_use(self, number: IommuGroup, device: str) -> bool:
        """Return whether a process has this device open; a group that is merely open stops nobody."""
        return device in self.groups[number].devices_in_use or bool(self._cdevs.of_device(device))

    def ask_back(self, number: IommuGroup, device: str, finish: Callable[[], None]) -> None:
        """Ask the users of a device to let go; `finish` runs when all have. Our own lease does at once."""
        group, files = self.groups[number], self._cdevs.of_device(device)
        if device in group.devices_in_use or any(file.bound and not file.lease for file in files):
            self.requests.append(device)
        group.asked_back[device] = finish
        if self._iommufd:  # from 6.6 on, a device can't be found any more once its driver is to let go
            self._hide(device, group.vfio_devices[device])
        self.close_devices(lambda file: file.lease and file.device == device)
