"""Who uses a VFIO device: the processes that have its group's or its own node open.

The kernel tells the device numbers of those nodes (`/sys/class/vfio/12/dev`, `/sys/class/vfio-dev/vfio3/dev`). A node
in this process's `/dev` can be missing, stale or another container's, so none is asked.
"""

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from gpuvirt.facts.ids import IommuGroup
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import User
from gpuvirt.hardware import attributes
from gpuvirt.hardware.kernel import VFIO_DEVICE, VFIO_NODE, Kernel, OpenFile
from gpuvirt.hardware.processes import command_of, read_open_nodes
from gpuvirt.paths import HostPath

GROUP_CLASS = HostPath("/sys/class/vfio")
"""One entry for each group that has a VFIO device: `12`, or `noiommu-0` where there is no IOMMU (vfio_create_group)."""
CDEV_CLASS = HostPath("/sys/class/vfio-dev")

_GROUP = re.compile(r"(?:noiommu-)?([0-9]{1,9})")
_LOST_NODE = re.compile(r"/vfio/devices/vfio[0-9]+ \(deleted\)\Z")
"""A device's own node goes as soon as its driver is to let go, which then waits for whoever has it open (6.12)."""


@dataclass(frozen=True, slots=True)
class Users:
    """The processes that have VFIO nodes open."""

    by_group: Mapping[IommuGroup, tuple[User, ...]]
    of_lost_nodes: tuple[User, ...]
    """Those that have a device open by a node that is no longer there; nothing tells which device that is."""
    watched: frozenset[IommuGroup]
    """The groups of which a node's number is known, so that their users are all in `by_group`."""


def cdevs_of(functions: Iterable[PciFunction]) -> Mapping[str, IommuGroup]:
    """Return the devices' own nodes, `vfio3`, with the groups that the devices are in."""
    return {
        name: function.iommu_group
        for function in functions
        if isinstance(function.iommu_group, int)
        for name in function.cdevs
    }


def read_users(kernel: Kernel, cdevs: Mapping[str, IommuGroup]) -> Users | Unread:
    """Return who has which group open; Unread where a process or a node's number can't be seen.

    `cdevs` are the devices' own nodes with their groups. Files are compared by device number: a container has its own
    nodes for the same devices.
    """
    numbers = _numbers(kernel, cdevs, None)
    if isinstance(numbers, Unread):
        return numbers
    opened = read_open_nodes(kernel)
    return opened if isinstance(opened, Unread) else _users(kernel, opened, numbers)


def read_users_of(
    kernel: Kernel, groups: Container[IommuGroup], cdevs: Mapping[str, IommuGroup]
) -> Mapping[IommuGroup, tuple[User, ...]] | Unread:
    """Return who has one of `groups` open, by one walk; Unread where a process or the number of such a node is unseen.

    `cdevs` are the own nodes of the devices in `groups`. The numbers of other groups' nodes are not read, so this can't
    tell which processes have a device open by a node that is gone.
    """
    numbers = _numbers(kernel, cdevs, groups)
    if isinstance(numbers, Unread):
        return numbers
    opened = read_open_nodes(kernel)
    if isinstance(opened, Unread):
        return opened
    return _users(kernel, (file for file in opened if file.device in numbers), numbers).by_group


def _users(kernel: Kernel, opened: Iterable[OpenFile], groups: Mapping[int, IommuGroup]) -> Users:
    found: defaultdict[IommuGroup, dict[int, User]] = defaultdict(dict)
    lost: dict[int, User] = {}
    devices: dict[int, OpenFile] = {}
    by_node: set[int] = set()
    for file in opened:
        group = groups.get(file.device)
        if group is not None and file.pid not in found[group]:
            found[group][file.pid] = User(file.pid, command_of(kernel, file.pid), file.path)
        elif group is None and _LOST_NODE.search(file.path):
            lost[file.pid] = User(file.pid, command_of(kernel, file.pid), file.path)
        elif file.path == VFIO_DEVICE:
            devices[file.pid] = file
        if group is not None or VFIO_NODE.search(file.path):
            by_node.add(file.pid)
    # A process can have been given a device without its group's node.
    lost |= {pid: User(pid, command_of(kernel, pid), file.path) for pid, file in devices.items() if pid not in by_node}
    return Users(
        {group: tuple(found[group][pid] for pid in sorted(found[group])) for group in sorted(found)},
        tuple(lost[pid] for pid in sorted(lost)),
        frozenset(groups.values()),
    )


def _numbers(
    kernel: Kernel, cdevs: Mapping[str, IommuGroup], asked: Container[IommuGroup] | None
) -> dict[int, IommuGroup] | Unread:
    """Return the groups by the numbers of their nodes and of their devices' own; `asked` of None means all groups."""
    groups = _numbers_of_groups(kernel, asked)
    if isinstance(groups, Unread):
        return groups
    devices = _numbers_of_devices(kernel, cdevs)
    return devices if isinstance(devices, Unread) else groups | devices


def _numbers_of_groups(kernel: Kernel, asked: Container[IommuGroup] | None) -> dict[int, IommuGroup] | Unread:
    names = attributes.names(kernel, GROUP_CLASS)
    if isinstance(names, Unread):
        return names
    numbers: dict[int, IommuGroup] = {}
    for name in names or ():
        if (match := _GROUP.fullmatch(name)) is None:
            return Unread(HostPath(f"{GROUP_CLASS}/{name}"), seen=name)
        group = IommuGroup(int(match[1]))
        if asked is not None and group not in asked:
            continue
        number = attributes.device_number(kernel, HostPath(f"{GROUP_CLASS}/{name}/dev"))
        if isinstance(number, Unread):
            return number
        if number is not None:
            numbers[number] = group
    return numbers


def _numbers_of_devices(kernel: Kernel, cdevs: Mapping[str, IommuGroup]) -> dict[int, IommuGroup] | Unread:
    """Return the numbers of the devices' own nodes; kernels without VFIO_DEVICE_CDEV have none."""
    numbers: dict[int, IommuGroup] = {}
    for name, group in cdevs.items():
        number = attributes.device_number(kernel, HostPath(f"{CDEV_CLASS}/{name}/dev"))
        if isinstance(number, Unread):
            return number
        if number is not None:
            numbers[number] = group
    return numbers
