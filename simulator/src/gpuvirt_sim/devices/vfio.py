"""Simulated IOMMU groups and VFIO: which process has a group open, and which devices the kernel asks back from users.

Measured on kernel 6.1: a group opens once, a second open fails with EBUSY; its node appears with the first device on a
VFIO driver and disappears with the last; when a device is asked back, the user's request eventfd fires and the device
stays until the user closes it.
"""

import errno
import os
from collections.abc import Callable

import msgspec

from gpuvirt.facts.ids import IommuGroup
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.cdevs import CdevFile, Cdevs
from gpuvirt_sim.files.tree import DeviceNode, Folder, Tree, constant, fails

GROUPS = "/sys/kernel/iommu_groups"
CDEVS = "/dev/vfio/devices"
VFIO_MAJOR = 511
"""A dynamic major, as alloc_chrdev_region would return."""
CDEV_MAJOR = VFIO_MAJOR - 1
GROUP_CLASS = "/sys/class/vfio"
CDEV_CLASS = "/sys/class/vfio-dev"
VIRTUAL = "/sys/devices/virtual"
"""Where the kernel shows devices that belong to no bus."""


def group_number(group: IommuGroup) -> int:
    """Return the device number of a group's node."""
    return os.makedev(VFIO_MAJOR, group)


def group_of_node(path: str) -> IommuGroup | None:
    """Return the group whose node is at a path; None for other paths."""
    folder, _, name = path.rpartition("/")
    return IommuGroup(int(name)) if folder == "/dev/vfio" and name.isdecimal() else None


class Group(msgspec.Struct, eq=False):
    """One IOMMU group."""

    number: IommuGroup
    members: set[str] = msgspec.field(default_factory=set)
    vfio_devices: dict[str, HostPath] = msgspec.field(default_factory=dict)
    """The members on a VFIO driver, with their sysfs folders."""
    user: int | None = None
    """The process that has the group open."""
    owned: bool = False
    """Whether that process has put the group into a container, so that it owns its devices' DMA."""
    devices_in_use: set[str] = msgspec.field(default_factory=set)
    """The devices that this process also has open, as a VM has."""
    release_callbacks: dict[str, Callable[[], None]] = msgspec.field(default_factory=dict)
    """Devices that a writer waits for, with the callback for when their user closes them."""


class Vfio:
    """All groups of a simulated host."""

    def __init__(self, tree: Tree, *, iommufd: bool, group_nodes: bool, changed: Callable[[], None]) -> None:
        self.cdev_nodes = iommufd
        """Whether devices have nodes of their own (VFIO_DEVICE_CDEV)."""
        self.vfio_dev = True
        """Whether devices have a folder `vfio-dev`; kernels before 6.1 have none."""
        self.groups: dict[IommuGroup, Group] = {}
        self.requests: list[str] = []
        """Devices whose user was asked to release them. Each is a VM that loses its GPU."""
        self.hidden_nodes: set[IommuGroup] = set()
        """Groups whose node was deleted by hand."""
        self._tree = tree
        self._iommufd = iommufd
        self.group_nodes = group_nodes
        """Whether groups have nodes (VFIO_GROUP); without them, mdevs are in no group."""
        self._changed = changed
        self._indices: dict[str, int] = {}
        self._cdevs = Cdevs()
        tree.make(HostPath(GROUPS))
        if iommufd:
            tree.place(HostPath("/dev/iommu"), DeviceNode(10 << 8 | 125))
            tree.make(HostPath("/sys/class/misc/iommu"))

    def load(self) -> None:
        """Load the modules, which creates `/dev/vfio/vfio`, unless the kernel has no groups (VFIO_GROUP=n)."""
        if self.group_nodes:
            self._tree.place(HostPath("/dev/vfio/vfio"), DeviceNode(10 << 8 | 196))

    def join(self, number: IommuGroup, device: str, folder: HostPath) -> None:
        """Add a device to a group."""
        group = self.groups.setdefault(number, Group(number))
        group.members.add(device)
        if not self._is_shown(device):
            return
        self._tree.make(HostPath(f"{GROUPS}/{number}/devices"))
        self._tree.link(HostPath(f"{GROUPS}/{number}/devices/{device}"), folder)

    def leave(self, number: IommuGroup, device: str) -> None:
        """Remove a device from a group; the group disappears with its last device."""
        group = self.groups[number]
        group.members.discard(device)
        self._tree.remove(HostPath(f"{GROUPS}/{number}/devices/{device}"))
        if not group.members:
            self._tree.remove(HostPath(f"{GROUPS}/{number}"))
            del self.groups[number]

    def _is_shown(self, device: str) -> bool:
        """Return whether sysfs shows the device in a group; without VFIO_GROUP, mdevs are in none."""
        return self.group_nodes or ":" in device

    def add_vfio_device(self, number: IommuGroup, device: str, folder: HostPath) -> None:
        """Record that a VFIO driver was bound to a device, so that its group can be opened."""
        self.groups[number].vfio_devices[device] = folder
        self._show_class(number)
        if number not in self.hidden_nodes:
            self.show_node(number)
        index = self._indices.setdefault(device, max(self._indices.values(), default=-1) + 1)
        if self.vfio_dev:
            self._show_device(folder, index)
        if self.cdev_nodes:
            self._tree.place(HostPath(f"{CDEVS}/vfio{index}"), DeviceNode(os.makedev(CDEV_MAJOR, index)))

    def _show_device(self, folder: HostPath, index: int) -> None:
        """Show a VFIO device below the device that it serves, and in its class."""
        own = HostPath(f"{folder}/vfio-dev/vfio{index}")
        self._tree.place(own, Folder())
        self._tree.link(HostPath(f"{own}/device"), folder)
        self._tree.link(HostPath(f"{CDEV_CLASS}/vfio{index}"), own)
        if self.cdev_nodes:
            self._tree.place(HostPath(f"{own}/dev"), constant(f"{CDEV_MAJOR}:{index}"))

    def reserve_index(self, device: str, number: int) -> None:
        """Make a device `vfio<number>` once a VFIO driver is bound to it; raise ValueError where another device is."""
        if number in self._indices.values():
            raise ValueError(f"another device is vfio{number}")
        self._indices[device] = number

    def remove_vfio_device(self, number: IommuGroup, device: str, folder: HostPath) -> None:
        """Record that a VFIO driver was unbound from a device."""
        group = self.groups[number]
        group.vfio_devices.pop(device, None)
        group.release_callbacks.pop(device, None)
        if not group.vfio_devices:
            self._tree.remove(HostPath(f"/dev/vfio/{number}"))
            self._tree.remove(HostPath(f"{GROUP_CLASS}/{number}"))
            self._tree.remove(HostPath(f"{VIRTUAL}/vfio/{number}"))
        self._hide(device, folder)

    def _hide(self, device: str, of: HostPath) -> None:
        self._tree.remove(HostPath(f"{CDEV_CLASS}/vfio{self._indices[device]}"))
        self._tree.remove(HostPath(f"{of}/vfio-dev"))
        if self.cdev_nodes:
            self._tree.remove(HostPath(f"{CDEVS}/vfio{self._indices[device]}"))
            for folder in (HostPath(CDEVS), HostPath("/dev/vfio")):  # devtmpfs created them with the first node
                if self._tree.exists(folder) and not self._tree.folder(folder).entries:
                    self._tree.remove(folder)

    def show_node(self, number: IommuGroup) -> None:
        """Put a group's node under `/dev/vfio`."""
        if self.group_nodes:
            self._tree.place(HostPath(f"/dev/vfio/{number}"), DeviceNode(group_number(number)))

    def _show_class(self, number: IommuGroup) -> None:
        """Show a group's device number in sysfs, which stays when the node is deleted by hand."""
        if self.group_nodes:
            folder = HostPath(f"{VIRTUAL}/vfio/{number}")
            self._tree.place(HostPath(f"{folder}/dev"), constant(f"{VFIO_MAJOR}:{number}"))
            self._tree.link(HostPath(f"{GROUP_CLASS}/{number}"), folder)

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
        """Bind an open device to the iommufd of its process (VFIO_DEVICE_BIND_IOMMUFD), as a VM does."""
        group = self.groups[file.group]
        if group.user is not None:
            raise fails(errno.EBUSY, file.device)
        self._cdevs.bind(file, viable=all(is_friendly(member) for member in group.members))

    def close_devices(self, closes: Callable[[CdevFile], bool]) -> None:
        """Close nodes of devices; writers that waited for the devices continue."""
        for device in self._cdevs.close(closes):
            self._finish_waiting(device)

    def _finish_waiting(self, device: str) -> None:
        for group in list(self.groups.values()):
            if device in group.release_callbacks and not self.in_use(group.number, device):
                group.release_callbacks.pop(device)()

    def own(self, number: IommuGroup, is_friendly: Callable[[str], bool]) -> None:
        """Put an open group into a container (VFIO_GROUP_SET_CONTAINER), as a VM does."""
        group = self.groups[number]
        if not all(is_friendly(member) for member in group.members):
            raise fails(errno.EPERM, f"/dev/vfio/{number}")  # the group is not viable
        group.owned = True

    def is_owned(self, number: IommuGroup) -> bool:
        """Return whether a process owns the DMA of a group's devices, which excludes native drivers."""
        return self.groups[number].owned or self._cdevs.is_bound(number)

    def use(self, number: IommuGroup, device: str) -> None:
        """Open a device of a group that is in a container."""
        group = self.groups[number]
        if device not in group.vfio_devices:
            raise fails(errno.ENODEV, device)
        group.devices_in_use.add(device)

    def close(self, number: IommuGroup) -> None:
        """Close a group and its devices; writers that waited for the devices continue."""
        group = self.groups.get(number)
        if group is None:  # its last device was unplugged while the group was open
            return
        group.user, group.owned = None, False
        group.devices_in_use.clear()
        for device in list(group.release_callbacks):
            self._finish_waiting(device)

    def in_use(self, number: IommuGroup, device: str) -> bool:
        """Return whether a process has this device open; an open group alone blocks no writer."""
        return device in self.groups[number].devices_in_use or bool(self._cdevs.of_device(device))

    def request_release(self, number: IommuGroup, device: str, finish: Callable[[], None]) -> None:
        """Ask the users of a device to close it; call `finish` when all have. The agent's own lease closes at once."""
        group, files = self.groups[number], self._cdevs.of_device(device)
        if device in group.devices_in_use or any(file.bound and not file.lease for file in files):
            self.requests.append(device)
        group.release_callbacks[device] = finish
        if self._iommufd:  # since 6.6, a device disappears as soon as the unbinding of its driver begins
            self._hide(device, group.vfio_devices[device])
        self.close_devices(lambda file: file.lease and file.device == device)
