"""VFIO's nodes under `/dev`: which groups and devices can be opened, and whether iommufd is there."""

from gpuvirt.facts.ids import IommuGroup, parse_iommu_group
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.sysfs import device_path, members_path
from gpuvirt.hardware import attributes
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.paths import HostPath

VFIO = HostPath("/dev/vfio")
CONTAINER = HostPath("/dev/vfio/vfio")
IOMMUFD = HostPath("/dev/iommu")
IOMMUFD_CLASS = HostPath("/sys/class/misc/iommu")
CDEVS = HostPath("/dev/vfio/devices")


def group_node(group: IommuGroup) -> HostPath:
    """Return the node by which a group is opened."""
    return HostPath(f"{VFIO}/{group}")


def cdev_node(name: str) -> HostPath:
    """Return the node by which one device is opened (`vfio0`)."""
    return HostPath(f"{CDEVS}/{name}")


def read_members(kernel: Kernel, group: IommuGroup) -> list[str] | Unread | None:
    """Return the devices of a group by the group's own account, understood or not: PCI addresses, mdev UUIDs."""
    return attributes.names(kernel, members_path(group))


def read_member_driver(kernel: Kernel, group: IommuGroup, member: str) -> str | Unread | None:
    """Return the driver that has a member of a group now."""
    return attributes.link_name(kernel, HostPath(f"{members_path(group)}/{member}/driver"))


def read_group_nodes(kernel: Kernel) -> frozenset[IommuGroup] | Unread:
    """Return the groups that have a node; the folder also holds `vfio`, `devices` and `noiommu-0`."""
    names = attributes.names(kernel, VFIO)
    if isinstance(names, Unread):
        return names
    return frozenset(parse_iommu_group(name) for name in names or () if name.isascii() and name.isdigit())


def read_cdev_nodes(kernel: Kernel) -> frozenset[str] | Unread:
    """Return the devices that have a node of their own."""
    names = attributes.names(kernel, CDEVS)
    return names if isinstance(names, Unread) else frozenset(names or ())


def read_cdevs(kernel: Kernel, device: HostPath) -> tuple[str, ...] | Unread:
    """Return the own nodes of a device now, as under its `vfio-dev/`: `vfio0`; none where it has no such folder."""
    found = attributes.names(kernel, HostPath(f"{device}/vfio-dev"))
    return found if isinstance(found, Unread) else tuple(name for name in found or () if name.startswith("vfio"))


def has_vfio_device(kernel: Kernel, member: str) -> bool:
    """Return whether a PCI function is known to be a VFIO device now (kernel 6.1 and later)."""
    found = read_cdevs(kernel, device_path(member))
    return bool(found) and not isinstance(found, Unread)


def exists(kernel: Kernel, path: HostPath) -> bool | Unread:
    """Return whether a node or folder is there."""
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
    return node if node is True else exists(kernel, IOMMUFD_CLASS) or node
