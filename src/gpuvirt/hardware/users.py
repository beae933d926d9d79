"""Who uses a VFIO device: the processes that have its group's or its own node open."""

import errno
from collections import defaultdict
from collections.abc import Iterable, Mapping

from gpuvirt.facts.ids import IommuGroup
from gpuvirt.facts.pci import PciFunction
from gpuvirt.facts.snapshot import User
from gpuvirt.hardware import attributes, iommu
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.paths import HostPath


def read_users(
    kernel: Kernel, group_nodes: Iterable[IommuGroup], functions: Iterable[PciFunction]
) -> Mapping[IommuGroup, tuple[User, ...]] | None:
    """Return the users of each group, None when processes can't be looked into (no `/proc`, no nodes).

    Files are compared by device number: a container has its own nodes for the same devices.
    """
    nodes = _device_numbers(kernel, group_nodes, functions)
    found: defaultdict[IommuGroup, dict[int, User]] = defaultdict(dict)
    try:
        for opened in kernel.open_files():
            group = nodes.get(opened.device)
            if group is not None and opened.pid not in found[group]:
                found[group][opened.pid] = User(opened.pid, _command(kernel, opened.pid), opened.path)
    except OSError as error:
        if error.errno in {errno.EACCES, errno.EPERM, *attributes.ABSENT}:
            return None
        raise
    return {group: tuple(found[group][pid] for pid in sorted(found[group])) for group in sorted(found)}


def _device_numbers(
    kernel: Kernel, group_nodes: Iterable[IommuGroup], functions: Iterable[PciFunction]
) -> Mapping[int, IommuGroup]:
    by_node = {iommu.group_node(group): group for group in group_nodes}
    for function in functions:
        if isinstance(function.iommu_group, int):
            by_node |= {iommu.cdev_node(name): function.iommu_group for name in function.cdevs}
    numbers: dict[int, IommuGroup] = {}
    for node, group in by_node.items():
        try:
            number = kernel.device_number(node)
        except OSError:
            continue
        if number:
            numbers[number] = group
    return numbers


def _command(kernel: Kernel, pid: int) -> str:
    """Return what a process calls itself, which may be any bytes."""
    try:
        content = kernel.read(HostPath(f"/proc/{pid}/comm"))
    except OSError:
        return "unknown"
    return attributes.legible(content.decode(errors="surrogateescape").removesuffix("\n"))
