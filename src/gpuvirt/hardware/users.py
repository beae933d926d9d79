"""Who uses a VFIO device: the processes that have its group's or its own node open."""

import errno
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuvirt.facts.ids import IommuGroup
from gpuvirt.facts.pci import PciFunction
from gpuvirt.facts.snapshot import User
from gpuvirt.hardware import attributes, iommu
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.paths import HostPath

_LOST_NODE = re.compile(r"/vfio/devices/vfio[0-9]+ \(deleted\)\Z")
"""A device's own node goes as soon as its driver is to let go, which then waits for whoever has it open (6.12)."""


@dataclass(frozen=True, slots=True)
class Users:
    """The processes that have VFIO nodes open."""

    by_group: Mapping[IommuGroup, tuple[User, ...]]
    of_lost_nodes: tuple[User, ...]
    """Those that have a device's own node open which is no longer there; nothing tells which device that was."""


def cdevs_of(functions: Iterable[PciFunction]) -> Mapping[str, IommuGroup]:
    """Return the devices' own nodes, `vfio3`, with the groups that the devices are in."""
    return {
        name: function.iommu_group
        for function in functions
        if isinstance(function.iommu_group, int)
        for name in function.cdevs
    }


def read_users(kernel: Kernel, group_nodes: Iterable[IommuGroup], cdevs: Mapping[str, IommuGroup]) -> Users | None:
    """Return who has which group open, None when processes can't be looked into (no `/proc`, no nodes).

    Files are compared by device number: a container has its own nodes for the same devices.
    """
    nodes = _device_numbers(kernel, group_nodes, cdevs)
    found: defaultdict[IommuGroup | None, dict[int, User]] = defaultdict(dict)
    try:
        for opened in kernel.open_files():
            group = nodes.get(opened.device)
            if (group is not None or _LOST_NODE.search(opened.path)) and opened.pid not in found[group]:
                found[group][opened.pid] = User(opened.pid, command_of(kernel, opened.pid), opened.path)
    except OSError as error:
        if error.errno in {errno.EACCES, errno.EPERM, *attributes.ABSENT}:
            return None
        raise
    lost = found.pop(None, {})
    return Users(
        {
            group: tuple(found[group][pid] for pid in sorted(found[group]))
            for group in sorted(group for group in found if group is not None)
        },
        tuple(lost[pid] for pid in sorted(lost)),
    )


def _device_numbers(
    kernel: Kernel, group_nodes: Iterable[IommuGroup], cdevs: Mapping[str, IommuGroup]
) -> Mapping[int, IommuGroup]:
    by_node = {iommu.group_node(group): group for group in group_nodes}
    by_node |= {iommu.cdev_node(name): group for name, group in cdevs.items()}
    numbers: dict[int, IommuGroup] = {}
    for node, group in by_node.items():
        try:
            number = kernel.device_number(node)
        except OSError:
            continue
        if number:
            numbers[number] = group
    return numbers


def command_of(kernel: Kernel, pid: int) -> str:
    """Return what a process calls itself, which may be any bytes."""
    try:
        content = kernel.read(HostPath(f"/proc/{pid}/comm"))
    except OSError:
        return "unknown"
    return attributes.legible(content.decode(errors="surrogateescape").removesuffix("\n"))
