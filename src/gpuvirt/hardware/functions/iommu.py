"""Reads VFIO's nodes under `/dev`, whether the host has iommufd, and the regions of Extended GPU memory (Grace)."""

import re
from collections.abc import Sequence

from gpuvirt.facts.ids import IommuGroup, parse_iommu_group, parse_pci_address
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import EgmRegion
from gpuvirt.facts.sysfs import IOMMUFD, members_path
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.paths import HostPath

CLASS = HostPath("/sys/class/egm")
_REGION = re.compile(r"egm[0-9]+")


def read_regions(kernel: Kernel, before: Sequence[EgmRegion] = ()) -> tuple[tuple[EgmRegion, ...], tuple[Unread, ...]]:
    """Return the regions in the order of their nodes, and the files that could not be read.

    A region that could not be read is taken from `before`. A region without a node is left out: a VM could not open it.
    """
    names = attributes.names(kernel, CLASS)
    if isinstance(names, Unread):
        return tuple(before), (names,)
    regions: list[EgmRegion] = []
    unread: list[Unread] = []
    for name in names or ():
        if not _REGION.fullmatch(name):
            continue
        path, node = HostPath(f"{CLASS}/{name}/gpu_devices"), HostPath(f"/dev/{name}")
        gpus = attributes.parsed(kernel, path, lambda text: frozenset(map(parse_pci_address, text.split())))
        has_node = exists(kernel, node)
        if isinstance(gpus, Unread) or isinstance(has_node, Unread):
            unread += (found for found in (gpus, has_node) if isinstance(found, Unread))
            regions += (region for region in before if region.node == node)
        elif gpus and not has_node:
            unread.append(Unread(node, seen="no node for this region"))
        elif gpus:
            regions.append(EgmRegion(node, gpus))
    return tuple(regions), tuple(unread)


VFIO = HostPath("/dev/vfio")
CONTAINER = HostPath("/dev/vfio/vfio")
IOMMUFD_CLASS = HostPath("/sys/class/misc/iommu")
CDEVS = HostPath("/dev/vfio/devices")


def group_node(group: IommuGroup) -> HostPath:
    """Return the path of a group's node."""
    return HostPath(f"{VFIO}/{group}")


def cdev_node(name: str) -> HostPath:
    """Return the path of a device's own node (`vfio0`)."""
    return HostPath(f"{CDEVS}/{name}")


def read_members(kernel: Kernel, group: IommuGroup) -> list[str] | Unread | None:
    """Return the names in a group's `devices/`: PCI addresses, mdev UUIDs, and names of other kinds."""
    return attributes.names(kernel, members_path(group))


def read_member_driver(kernel: Kernel, group: IommuGroup, member: str) -> str | Unread | None:
    """Return the current driver of a member of a group."""
    return attributes.link_name(kernel, HostPath(f"{members_path(group)}/{member}/driver"))


def read_group_nodes(kernel: Kernel) -> frozenset[IommuGroup] | Unread:
    """Return the groups that have a node; the folder also has `vfio`, `devices` and `noiommu-0`."""
    names = attributes.names(kernel, VFIO)
    if isinstance(names, Unread):
        return names
    return frozenset(parse_iommu_group(name) for name in names or () if name.isascii() and name.isdigit())


def read_cdev_nodes(kernel: Kernel) -> frozenset[str] | Unread:
    """Return the devices that have a node of their own."""
    names = attributes.names(kernel, CDEVS)
    return names if isinstance(names, Unread) else frozenset(names or ())


def read_cdevs(kernel: Kernel, device: HostPath) -> tuple[str, ...] | Unread:
    """Return the names of a device's own nodes, which its `vfio-dev/` lists: `vfio0`; none without that folder."""
    found = attributes.names(kernel, HostPath(f"{device}/vfio-dev"))
    return found if isinstance(found, Unread) else tuple(name for name in found or () if name.startswith("vfio"))


def exists(kernel: Kernel, path: HostPath) -> bool | Unread:
    """Return whether a node or folder exists."""
    try:
        kernel.device_number(path)
    except OSError as error:
        return False if error.errno in attributes.ABSENT else Unread(path, errno=error.errno)
    return True


def has_iommufd(kernel: Kernel) -> bool | Unread:
    """Return whether the host has iommufd.

    An unprivileged pod doesn't see the host's `/dev/iommu`, but it does see the misc device's folder in `/sys`.
    """
    node = exists(kernel, IOMMUFD)
    if isinstance(node, bool) and node:
        return True
    in_class = exists(kernel, IOMMUFD_CLASS)
    return node if isinstance(in_class, bool) and not in_class else in_class
