"""Finds the processes that use a VFIO device: they have the node of its group, or its own node, open.

The device numbers of these nodes come from the kernel (`/sys/class/vfio/12/dev`, `/sys/class/vfio-dev/vfio3/dev`). The
nodes in this process's `/dev` are not used, since they can be missing, stale or those of another container.
"""

import errno
import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping

import msgspec

from gpuvirt.facts.ids import IommuGroup
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import OpenDeviceUser
from gpuvirt.facts.sysfs import VFIO_DEVICES
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.openfiles import VFIO_DEVICE, VFIO_NODE, OpenFile
from gpuvirt.hardware.usage.processes import command_of, read_open_nodes
from gpuvirt.paths import HostPath

GROUP_CLASS = HostPath("/sys/class/vfio")
"""It has one entry for each group with a VFIO device: `12`, or `noiommu-0` without an IOMMU (vfio_create_group)."""

_GROUP = re.compile(r"(?:noiommu-)?([0-9]{1,9})")
_LOST_NODE = re.compile(r"/vfio/devices/vfio[0-9]+ \(deleted\)\Z")
"""The kernel removes a device's own node when the device is unbound, before it waits for processes that have the
device open (6.12)."""


class Users(msgspec.Struct, frozen=True):
    """The processes that have VFIO nodes open."""

    by_group: Mapping[IommuGroup, tuple[OpenDeviceUser, ...]]
    of_lost_nodes: tuple[OpenDeviceUser, ...]
    """The processes that have a device open through a node that no longer exists, so that the device is unknown."""
    watched: frozenset[IommuGroup]
    """The groups with a known node number; all their users are in `by_group`."""


def cdevs_of(functions: Iterable[PciFunction]) -> Mapping[str, IommuGroup]:
    """Return the group of each device by the name of the device's own node, `vfio3`."""
    return {
        name: function.iommu_group
        for function in functions
        if isinstance(function.iommu_group, int)
        for name in function.cdevs
    }


def read_users(kernel: Kernel, cdevs: Mapping[str, IommuGroup], *, mapped: bool = False) -> Users | Unread:
    """Return the users of each group; Unread where a process or a node's number is not visible.

    `cdevs` are the devices' own nodes with their groups. Nodes are compared by device number, because a container has
    its own nodes for the same devices. With `mapped`, processes that have only mapped a device count as well.
    """
    numbers = _numbers(kernel, cdevs, None)
    if isinstance(numbers, Unread):
        return numbers
    opened = read_open_nodes(kernel, mapped=mapped)
    return opened if isinstance(opened, Unread) else _users(kernel, opened, numbers)


def read_users_of(
    kernel: Kernel, groups: Collection[IommuGroup], cdevs: Mapping[str, IommuGroup]
) -> Mapping[IommuGroup, tuple[OpenDeviceUser, ...] | Unread]:
    """Return the users of each of `groups`, by one walk; Unread where a process or the group's number is not visible.

    `cdevs` are the own nodes of the devices in `groups`. The node numbers of other groups are not read, so processes
    that have a device open through a removed node are not found.
    """
    numbers = _numbers(kernel, cdevs, groups)
    if isinstance(numbers, Unread):
        return dict.fromkeys(groups, numbers)
    opened = read_open_nodes(kernel)
    if isinstance(opened, Unread):
        return dict.fromkeys(groups, opened)
    found = _users(kernel, (file for file in opened if file.device in numbers), numbers)
    return {
        group: found.by_group.get(group, ()) if group in found.watched else _without_number(group) for group in groups
    }


def _without_number(group: IommuGroup) -> Unread:
    """Return why a walk can't find the users of a group: the kernel shows no number of a node that they may have."""
    return Unread(HostPath(f"{GROUP_CLASS}/{group}/dev"), errno=errno.ENOENT)


def _users(kernel: Kernel, opened: Iterable[OpenFile], groups: Mapping[int, IommuGroup]) -> Users:
    found: defaultdict[IommuGroup, dict[int, OpenDeviceUser]] = defaultdict(dict)
    lost: dict[int, OpenDeviceUser] = {}
    devices: dict[int, OpenFile] = {}
    by_node: set[int] = set()
    for file in opened:
        group = groups.get(file.device)
        if group is not None and file.pid not in found[group]:
            found[group][file.pid] = OpenDeviceUser(file.pid, command_of(kernel, file.pid), file.path)
        elif group is None and _LOST_NODE.search(file.path):
            lost[file.pid] = OpenDeviceUser(file.pid, command_of(kernel, file.pid), file.path)
        elif file.path == VFIO_DEVICE:
            devices[file.pid] = file
        if group is not None or VFIO_NODE.search(file.path):
            by_node.add(file.pid)
    # A process can have received a device from another process, without its group's node.
    lost |= {
        pid: OpenDeviceUser(pid, command_of(kernel, pid), file.path)
        for pid, file in devices.items()
        if pid not in by_node
    }
    return Users(
        {group: tuple(found[group][pid] for pid in sorted(found[group])) for group in sorted(found)},
        tuple(lost[pid] for pid in sorted(lost)),
        frozenset(groups.values()),
    )


def _numbers(
    kernel: Kernel, cdevs: Mapping[str, IommuGroup], selected: Container[IommuGroup] | None
) -> dict[int, IommuGroup] | Unread:
    """Return groups by the numbers of their nodes and of their devices' own nodes; `selected` of None means all."""
    groups = _numbers_of_groups(kernel, selected)
    if isinstance(groups, Unread):
        return groups
    devices = _numbers_of_devices(kernel, cdevs)
    return devices if isinstance(devices, Unread) else groups | devices


def _numbers_of_groups(kernel: Kernel, selected: Container[IommuGroup] | None) -> dict[int, IommuGroup] | Unread:
    names = attributes.names(kernel, GROUP_CLASS)
    if isinstance(names, Unread):
        return names
    numbers: dict[int, IommuGroup] = {}
    for name in names or ():
        if (match := _GROUP.fullmatch(name)) is None:
            return Unread(HostPath(f"{GROUP_CLASS}/{name}"), seen=name)
        group = IommuGroup(int(match[1]))
        if selected is not None and group not in selected:
            continue
        number = attributes.device_number(kernel, HostPath(f"{GROUP_CLASS}/{name}/dev"))
        if isinstance(number, Unread):
            return number
        if number is not None:
            numbers[number] = group
    return numbers


def _numbers_of_devices(kernel: Kernel, cdevs: Mapping[str, IommuGroup]) -> dict[int, IommuGroup] | Unread:
    """Return groups by the numbers of their devices' own nodes; kernels without VFIO_DEVICE_CDEV have none."""
    numbers: dict[int, IommuGroup] = {}
    for name, group in cdevs.items():
        number = attributes.device_number(kernel, HostPath(f"{VFIO_DEVICES}/{name}/dev"))
        if isinstance(number, Unread):
            return number
        if number is not None:
            numbers[number] = group
    return numbers
