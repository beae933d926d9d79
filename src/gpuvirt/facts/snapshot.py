"""Everything that one look at a host has shown."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuvirt.facts.deviceids import DeviceIds
from gpuvirt.facts.ids import BootId, IommuGroup, PciAddress
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.vgpu import VgpuHost
from gpuvirt.paths import HostPath


@dataclass(frozen=True, slots=True)
class User:
    """A process that has a VFIO device open."""

    pid: int
    command: str
    node: HostPath


@dataclass(frozen=True, slots=True)
class EgmRegion:
    """Memory of the host that belongs to GPUs (Grace Hopper, GB200): `/dev/egm0` and the GPUs it goes with."""

    node: HostPath
    gpus: frozenset[PciAddress]


@dataclass(frozen=True, slots=True)
class Platform:
    """What the host offers to virtual machines besides its devices."""

    boot_id: BootId | None = None
    iommufd: bool = False
    """`/dev/iommu` exists: devices can be opened by their own nodes."""
    vfio_container: bool = False
    """`/dev/vfio/vfio` exists: devices can be opened by their group."""
    egm: tuple[EgmRegion, ...] = ()


@dataclass(frozen=True, slots=True)
class MalformedEntry:
    """An entry that is not what its place promises, and that was passed over."""

    path: HostPath
    what: str


@dataclass(frozen=True, slots=True)
class Facts:
    """One look at a host."""

    platform: Platform = field(default_factory=Platform)
    functions: Mapping[PciAddress, PciFunction] = field(default_factory=dict)
    vgpu_hosts: Mapping[PciAddress, VgpuHost] = field(default_factory=dict)
    """By the address of the GPU (the physical function)."""
    group_nodes: frozenset[IommuGroup] = frozenset()
    """Groups that have a node, `/dev/vfio/12`."""
    cdev_nodes: frozenset[str] = frozenset()
    """Devices that have a node of their own: `vfio0` for `/dev/vfio/devices/vfio0`."""
    users: Mapping[IommuGroup, tuple[User, ...]] | None = None
    """Who has which group open; None where it was not looked, or could not be."""
    busy_groups: Mapping[IommuGroup, str] = field(default_factory=dict)
    """Groups that could not be opened since a process has them open, with what the kernel said of that."""
    users_of_lost_nodes: tuple[User, ...] = ()
    """Who has a device open whose own node is gone, since its driver is to let go; it has no driver link any more."""
    device_ids: DeviceIds = field(default_factory=DeviceIds)
    """What other programs call the GPUs."""
    malformed_entries: tuple[MalformedEntry, ...] = ()
    unread: tuple[Unread, ...] = ()
    """Folders that could not be listed; what they hold is as the look before saw it."""
