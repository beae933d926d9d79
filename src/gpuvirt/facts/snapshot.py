"""The snapshot of a host: all facts of one observation."""

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
    """Memory of the host that belongs to GPUs (Grace Hopper, GB200): `/dev/egm0` and its GPUs."""

    node: HostPath
    gpus: frozenset[PciAddress]


@dataclass(frozen=True, slots=True)
class Platform:
    """The host's interfaces for VMs besides its devices."""

    boot_id: BootId | None = None
    iommufd: bool = False
    """Whether `/dev/iommu` exists, so that devices can be opened by their own nodes."""
    vfio_container: bool = False
    """Whether `/dev/vfio/vfio` exists, so that devices can be opened by their group."""
    egm: tuple[EgmRegion, ...] = ()


@dataclass(frozen=True, slots=True)
class MalformedEntry:
    """An entry of sysfs that does not have the expected form, and that is ignored."""

    path: HostPath
    what: str


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of one observation of a host."""

    platform: Platform = field(default_factory=Platform)
    functions: Mapping[PciAddress, PciFunction] = field(default_factory=dict)
    vgpu_hosts: Mapping[PciAddress, VgpuHost] = field(default_factory=dict)
    """By the address of the GPU (the physical function)."""
    group_nodes: frozenset[IommuGroup] = frozenset()
    """Groups that have a node, `/dev/vfio/12`."""
    cdev_nodes: frozenset[str] = frozenset()
    """Devices that have their own node: `vfio0` for `/dev/vfio/devices/vfio0`."""
    users: Mapping[IommuGroup, tuple[User, ...]] | None = None
    """The processes that have each group open; None if they were not, or could not be, listed."""
    busy_groups: Mapping[IommuGroup, str] = field(default_factory=dict)
    """Groups that could not be opened since a process has them open, with the kernel's error."""
    users_of_lost_nodes: tuple[User, ...] = ()
    """The processes that have a device open whose node is gone, since it is being unbound and has no driver link."""
    device_ids: DeviceIds = field(default_factory=DeviceIds)
    """The ids of GPUs in other device plugins."""
    malformed_entries: tuple[MalformedEntry, ...] = ()
    unread: tuple[Unread, ...] = ()
    """Folders that could not be listed. Their contents are those of the previous observation."""
