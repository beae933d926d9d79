"""The snapshot of a host: all facts of one observation, or the few that a discovery reads without privileges."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import BootId, IommuGroup, PciAddress
from gpuvirt.facts.notknown import NotKnown
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.platform import Attribute
from gpuvirt.facts.vgpu import Framework, LiveVgpu, VgpuHost
from gpuvirt.paths import HostPath


class DriverInformation(msgspec.Struct, frozen=True):
    """The information that NVIDIA's driver shows of a GPU in `/proc/driver/nvidia/gpus/ADDRESS/information`.

    A value is None where the driver does not show it, as before it has initialised the GPU.
    """

    uuid: str | None
    """`GPU-8a5c...`, in the driver's own spelling."""
    model: str | None
    """The product name: `Tesla T4`; in a VM with a vGPU the vGPU type, `GRID V100-8Q`."""
    minor: int | None = None
    """The number of the device node: 0 for `/dev/nvidia0`."""


class DeviceIds(msgspec.Struct, frozen=True):
    """The ids that the drivers of a host show. A GPU whose id could not be read is left out."""

    gpu_uuids: Mapping[str, PciAddress] = msgspec.field(default_factory=dict)
    """By NVIDIA's UUID, in lower case and without `GPU-`."""
    drm_nodes: Mapping[str, PciAddress] = msgspec.field(default_factory=dict)
    """By the name of a DRM node: `card1`, `renderD128`."""
    information: Mapping[PciAddress, DriverInformation | Unread] = msgspec.field(default_factory=dict)
    """By GPU; a GPU of which NVIDIA's driver shows nothing is left out."""
    mig: Mapping[PciAddress, bool | Unread] = msgspec.field(default_factory=dict)
    """Whether an NVIDIA GPU has GPU instances (MIG); a GPU whose driver has no list of them is left out."""

    @property
    def mig_gpus(self) -> frozenset[PciAddress] | None:
        """The GPUs that have GPU instances; None where the list of a GPU is missing or could not be read."""
        known = {gpu: has for gpu, has in self.mig.items() if not isinstance(has, Unread)}
        nvidias = self.information.keys() | self.mig.keys()
        return frozenset(gpu for gpu, has in known.items() if has) if nvidias and known.keys() == nvidias else None

    def of(self, functions: Container[PciAddress]) -> "DeviceIds":
        """Return the ids that name these functions; the same object if all do."""
        if all(gpu in functions for gpu in (*self.drm_nodes.values(), *self.information, *self.mig)):
            return self
        return DeviceIds(
            {uuid: gpu for uuid, gpu in self.gpu_uuids.items() if gpu in functions},
            {node: gpu for node, gpu in self.drm_nodes.items() if gpu in functions},
            {gpu: known for gpu, known in self.information.items() if gpu in functions},
            {gpu: has for gpu, has in self.mig.items() if gpu in functions},
        )


class OpenDeviceUser(msgspec.Struct, frozen=True):
    """A process that has a VFIO device open."""

    pid: int
    command: str
    node: HostPath


class EgmRegion(msgspec.Struct, frozen=True):
    """Memory of the host that belongs to GPUs (Grace Hopper, GB200): `/dev/egm0` and its GPUs."""

    node: HostPath
    gpus: frozenset[PciAddress]


class Platform(msgspec.Struct, frozen=True):
    """The host's interfaces for VMs besides its devices."""

    boot_id: BootId | None = None
    nvidia_version: str | None = None
    """The version of NVIDIA's loaded driver; None if the driver is not loaded."""
    vgpu_manager: bool | Unread | None = None
    """Whether NVIDIA's loaded driver is its vGPU manager's, and not the datacenter driver; None if not observed."""
    iommufd: bool = False
    """Whether `/dev/iommu` exists, so that devices can be opened by their own nodes."""
    vfio_container: bool = False
    """Whether `/dev/vfio/vfio` exists, so that devices can be opened by their group."""
    egm: tuple[EgmRegion, ...] = ()
    cgroup_v2: bool = False
    """Whether cgroup v2 is mounted where control groups are, at `/sys/fs/cgroup`."""


class MalformedEntry(msgspec.Struct, frozen=True):
    """An entry of sysfs that does not have the expected form, and that is ignored."""

    path: HostPath
    what: str


K = TypeVar("K")
V = TypeVar("V")


class Facts(msgspec.Struct, frozen=True):
    """The facts of one observation of a host."""

    platform: Platform = msgspec.field(default_factory=Platform)
    functions: Mapping[PciAddress, PciFunction] = msgspec.field(default_factory=dict)
    vgpu_hosts: Mapping[PciAddress, VgpuHost] = msgspec.field(default_factory=dict)
    """By the address of the GPU (the physical function)."""
    group_nodes: frozenset[IommuGroup] = frozenset()
    """Groups that have a node, `/dev/vfio/12`."""
    cdev_nodes: frozenset[str] = frozenset()
    """Devices that have their own node: `vfio0` for `/dev/vfio/devices/vfio0`."""
    users: Mapping[IommuGroup, tuple[OpenDeviceUser, ...]] | None = None
    """The processes that have each group open; None if they were not, or could not be, listed."""
    busy_groups: Mapping[IommuGroup, str] = msgspec.field(default_factory=dict)
    """Groups that could not be opened since a process has them open, with the kernel's error."""
    users_of_lost_nodes: tuple[OpenDeviceUser, ...] = ()
    """The processes that have a device open whose node is gone, since it is being unbound and has no driver link."""
    device_ids: DeviceIds = msgspec.field(default_factory=DeviceIds)
    """The ids of GPUs in other device plugins."""
    malformed_entries: tuple[MalformedEntry, ...] = ()
    unread: tuple[Unread, ...] = ()
    """Folders that could not be listed. Their contents are those of the previous observation."""

    def after(self, before: "Facts") -> "Facts":
        """Return these facts with the objects of earlier facts for what has not changed, which is then known by its
        identity."""
        return replace(
            self,
            functions=_after(self.functions, before.functions),
            vgpu_hosts=_after(self.vgpu_hosts, before.vgpu_hosts),
            users=before.users if self.users == before.users else self.users,
        )


def _after(now: Mapping[K, V], before: Mapping[K, V]) -> Mapping[K, V]:
    return {key: last if (last := before.get(key, value)) == value else value for key, value in now.items()}


def with_vgpu(facts: Facts, gpu: PciAddress, vgpu: LiveVgpu, cdevs: tuple[str, ...] = ()) -> Facts:
    """Return the facts with a vGPU that was just created on a GPU; the same object if they have it already.

    `cdevs` are the own nodes that its VF has got with it (`vfio0`).
    """
    facts = _with_cdevs(facts, vgpu.parent, cdevs)
    host = facts.vgpu_hosts.get(gpu)
    if host is None or any(live.id == vgpu.id for live in host.live):
        return facts
    left = {parent: dict(types) for parent, types in host.creatable.items()}
    types = left.get(vgpu.parent, {})
    if not isinstance(vgpu.type, Unread) and vgpu.type in types:
        types[vgpu.type] = max(types[vgpu.type] - 1, 0)
    hosts = {**facts.vgpu_hosts, gpu: replace(host, creatable=left, live=(*host.live, vgpu))}
    nodes = facts.group_nodes | ({vgpu.group} if isinstance(vgpu.group, int) else frozenset())
    return replace(facts, vgpu_hosts=hosts, group_nodes=nodes)


def _with_cdevs(facts: Facts, vf: PciAddress, cdevs: tuple[str, ...]) -> Facts:
    function = facts.functions.get(vf)
    if not cdevs or function is None or (function.cdevs == cdevs and facts.cdev_nodes.issuperset(cdevs)):
        return facts
    functions = {**facts.functions, vf: replace(function, cdevs=cdevs)}
    return replace(facts, functions=functions, cdev_nodes=facts.cdev_nodes.union(cdevs))


def with_vgpu_host(facts: Facts, host: VgpuHost) -> Facts:
    """Return the facts with the vGPUs of one GPU as they were observed later; the same object if nothing differs."""
    before = facts.vgpu_hosts.get(host.gpu)
    if before is None or before == host:
        return facts
    gone = _groups_of(before) - _groups_of(host)
    hosts = {**facts.vgpu_hosts, host.gpu: host}
    return replace(facts, vgpu_hosts=hosts, group_nodes=(facts.group_nodes | _groups_of(host)) - gone)


def _groups_of(host: VgpuHost) -> frozenset[IommuGroup]:
    mediated = host.framework is Framework.MDEV  # a VF keeps its group
    return frozenset(live.group for live in host.live if isinstance(live.group, int) and mediated)


@dataclass(frozen=True, slots=True)
class UsersUnknown(NotKnown):
    """It is unknown which processes have a group open. It never counts as nobody."""

    unread: Unread
    """The path that the walk through all processes could not read."""
    not_opened: str = ""
    """The error of opening the group, which would have been proof; empty if the group was not opened."""


class FreshFacts(msgspec.Struct, frozen=True):
    """The facts of a host after some devices were read again."""

    facts: Facts
    """The same object as that of the last scan where nothing has changed."""
    members: Mapping[IommuGroup, Sequence[str] | Unread | None] = msgspec.field(default_factory=dict)
    """The devices that the kernel lists in each group's `devices/`, None where the group does not exist."""
    users: Mapping[IommuGroup, tuple[OpenDeviceUser, ...] | UsersUnknown] = msgspec.field(default_factory=dict)
    """The processes that have each group of these devices open; those that are known are in `facts`, too."""


class Discovery(msgspec.Struct, frozen=True):
    """The facts that `gpuvirt discover` reads without privileges."""

    gpu: bool | None
    """Whether a PCI function is an NVIDIA GPU; None if that is unknown."""
    os_release: Attribute
    """`/etc/os-release`."""
    unread: tuple[Unread, ...] = ()
    """Files that could not be read, or that are missing although every host has them."""
