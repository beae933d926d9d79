"""The one picture of a node that everything else shows: lists, tables, metrics, files.

It is written to `/run/gpuvirt/node.json` as it stands here, so its fields are a contract (docs/reference.md): they are
added to, and not renamed. `version` counts changes that a reader must know of.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from gpuvirt.facts.ids import BootId, DeviceId, IommuGroup, PciAddress, ResourceName, VgpuId
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.vgpu import Scheduler, SchedulerPolicy
from gpuvirt.model.allocation.attachment import vm_nodes
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.desired.invalid import InvalidDesired
from gpuvirt.model.desired.workload import Workload
from gpuvirt.model.devices.selectors import ResourceKind, selectors_of
from gpuvirt.model.inventory.inventory import Gpu, Inventory, Mode, Vgpu, mode_of
from gpuvirt.model.inventory.malformed import malformed_entries
from gpuvirt.model.inventory.naming import Naming
from gpuvirt.model.offers.offers import Offer, OfferedDevice, Offers
from gpuvirt.model.offers.validation import Condition
from gpuvirt.model.offers.withholding import Withholding
from gpuvirt.model.reasons import Reason
from gpuvirt.paths import HostPath

VERSION = 1


@dataclass(frozen=True, slots=True)
class AgentView:
    """The agent that wrote the picture."""

    version: str
    pid: int
    started: datetime
    plugin_only: bool


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device as the kubelet is told of it."""

    id: DeviceId
    healthy: bool
    numa_node: int | None
    group: IommuGroup | None
    gpu: PciAddress
    nodes: tuple[HostPath, ...] = ()
    """What a virtual machine opens to have it."""
    reasons: tuple[Reason, ...] = ()
    allocated_to: str | None = None


@dataclass(frozen=True, slots=True)
class ResourceView:
    """One resource."""

    name: ResourceName
    devices: tuple[DeviceView, ...]
    also_called: tuple[str, ...] = ()
    """What the PCI ID database calls it today, where it was first offered under another name."""
    registered: bool = False
    not_registered_because: Reason | None = None
    kind: ResourceKind = ResourceKind.WHOLE
    pci_vendor_selectors: tuple[str, ...] = ()
    """By what KubeVirt selects its devices: `10DE:2236`; none for mdevs, and where it has no devices now."""
    mdev_name_selectors: tuple[str, ...] = ()
    """The same for mdevs: `NVIDIA A10-24Q`."""
    withheld: bool = False
    """It is not to be offered; `not_registered_because` says why."""
    silent: bool = False
    """The kubelet is told nothing of it, whatever changes: another plugin registers the same name."""


@dataclass(frozen=True, slots=True)
class VgpuView:
    """One vGPU."""

    id: VgpuId
    type: str
    slot: PciAddress
    offered_as: ResourceName | None
    users: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    vms: tuple[str, ...] = ()
    """KubeVirt's VMs among the users: `namespace/name`."""


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """How the vGPUs of one GPU share its time."""

    policy: SchedulerPolicy
    timeslice_ms: int | None
    """None under best effort, and where it is less than a millisecond."""


@dataclass(frozen=True, slots=True)
class GpuView:
    """One GPU, or another function that is offered, with all that an admin asks of it."""

    address: PciAddress
    pci_id: str
    kind: str
    name: str | None
    mode: Mode
    driver: str | None
    group: IommuGroup | None
    numa_node: int | None
    offered_as: ResourceName | None
    healthy: bool | None
    """Whether a virtual machine could use it as it is offered; None where it is not offered."""
    desired: str | None = None
    """The mode that the agent keeps it in: `vgpu`; None where it is left alone."""
    vgpu_config: str | None = None
    """The vGPU config that the agent keeps applied; None where it does not."""
    scheduler: SchedulerView | None = None
    """None where that is not known: the agent asks of GPUs that it keeps in mode vgpu, and nobody else does."""
    siblings: tuple[PciAddress, ...] = ()
    users: tuple[str, ...] = ()
    vgpus: tuple[VgpuView, ...] = ()
    vfs: int | None = None
    """How many VFs it has; None where the agent is older than this field."""
    reasons: tuple[Reason, ...] = ()
    """Why it is unhealthy, or not offered."""
    vms: tuple[str, ...] = ()
    """KubeVirt's VMs among the users: `namespace/name`."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """The picture."""

    at: datetime
    gpus: tuple[GpuView, ...] = ()
    functions: tuple[GpuView, ...] = ()
    """Functions beside GPUs that are offered or could be: audio, USB, NVSwitches."""
    resources: tuple[ResourceView, ...] = ()
    notes: tuple[Reason, ...] = ()
    """What is wrong with the node or the agent and not with one device."""
    boot_id: BootId | None = None
    agent: AgentView | None = None
    """None in a picture that somebody took by hand, beside any agent."""
    workload: Workload = Workload.PASSTHROUGH
    """What the node is for."""
    conditions: tuple[Condition, ...] = ()
    """Whether it is ready for that."""
    invalid: tuple[InvalidDesired, ...] = ()
    """Desired state that is invalid, and changes nothing; its reasons are among the notes, too."""
    looked: bool = True
    """Whether the host was looked at; before, an empty picture says nothing of it."""
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Registration:
    """Where the kubelet stands with a resource."""

    registered: bool
    because: Reason | None = None


@dataclass(frozen=True, slots=True)
class Sitter:
    """A node as it is when the picture is taken."""

    inventory: Inventory
    offers: Offers
    entries: tuple[Entry, ...]
    naming: Naming
    registrations: Mapping[ResourceName, Registration] = field(default_factory=dict)
    notes: tuple[Reason, ...] = ()
    agent: AgentView | None = None
    desired_by_gpu: Mapping[PciAddress, str] = field(default_factory=dict)
    """The modes that GPUs are kept in, where they are not left alone."""
    vgpu_configs: Mapping[PciAddress, str] = field(default_factory=dict)
    """The vGPU configs that are kept applied."""
    schedulers: Mapping[PciAddress, Scheduler | Unread] = field(default_factory=dict)
    """How the vGPUs of GPUs share their time, where that was asked."""
    workload: Workload = Workload.PASSTHROUGH
    conditions: tuple[Condition, ...] = ()
    withholdings: Mapping[ResourceName, Withholding] = field(default_factory=dict)
    """Resources that are not to be offered."""
    invalid: tuple[InvalidDesired, ...] = ()


Offered = Mapping[str, tuple[ResourceName, OfferedDevice]]
"""By device id: the resource that it is part of."""


def draw(sitter: Sitter, at: datetime) -> NodeView:
    """Return the picture of a node."""
    facts, gpus = sitter.inventory.facts, sitter.inventory.gpus
    offered: Offered = {device.id: (resource, device) for resource, device in sitter.offers.devices()}
    return NodeView(
        at=at,
        gpus=tuple(_function(sitter, offered, gpu.function, gpu) for gpu in gpus.values()),
        functions=tuple(
            _function(sitter, offered, function, None)
            for address, function in sorted(facts.functions.items())
            if address not in gpus and VgpuId(address) not in sitter.inventory.vgpus
            if address in offered or (function.physfn is None and sitter.inventory.matters(function))
        ),
        resources=tuple(_resource(sitter, name) for name in sorted(sitter.offers.names)),
        notes=(*sitter.notes, *malformed_entries(facts)),
        boot_id=facts.platform.boot_id,
        agent=sitter.agent,
        workload=sitter.workload,
        conditions=sitter.conditions,
        invalid=sitter.invalid,
    )


def _function(sitter: Sitter, offered: Offered, function: PciFunction, gpu: Gpu | None) -> GpuView:
    resource, device = offered.get(function.address, (None, None))
    withheld = sitter.offers.withheld.get(function.address)
    group = function.iommu_group
    vgpus = [vgpu for vgpu in sitter.inventory.vgpus.values() if gpu is not None and vgpu.gpu == function.address]
    return GpuView(
        address=function.address,
        pci_id=str(function.id),
        kind=function.kind,
        name=sitter.naming.ids.text(function.id),
        mode=mode_of(function, gpu.vgpu_host if gpu is not None else None),
        driver=function.driver if isinstance(function.driver, str) else None,
        group=None if isinstance(group, Unread) else group,
        numa_node=function.numa_node,
        offered_as=resource,
        healthy=device.health.healthy if device is not None else None,
        desired=sitter.desired_by_gpu.get(function.address),
        vgpu_config=sitter.vgpu_configs.get(function.address),
        scheduler=_scheduler(sitter.schedulers.get(function.address)),
        siblings=gpu.siblings if gpu is not None else (),
        users=_users(sitter, function.address, group),
        vgpus=tuple(_vgpu(sitter, offered, vgpu) for vgpu in vgpus),
        vfs=len(function.virtfns),
        reasons=device.health.against if device is not None else ((withheld,) if withheld is not None else ()),
        vms=_vms(sitter, function.address),
    )


def _scheduler(told: Scheduler | Unread | None) -> SchedulerView | None:
    return SchedulerView(told.policy, told.timeslice_ms) if isinstance(told, Scheduler) else None


def _vgpu(sitter: Sitter, offered: Offered, vgpu: Vgpu) -> VgpuView:
    resource, device = offered.get(vgpu.live.id, (None, None))
    withheld = sitter.offers.withheld.get(vgpu.live.id)
    return VgpuView(
        id=vgpu.live.id,
        type=vgpu.live.type if isinstance(vgpu.live.type, str) else "unknown",
        slot=vgpu.live.slot,
        offered_as=resource,
        users=_users(sitter, vgpu.live.id, vgpu.live.group),
        reasons=device.health.against if device is not None else ((withheld,) if withheld is not None else ()),
        vms=_vms(sitter, vgpu.live.id),
    )


def _vms(sitter: Sitter, device: str) -> tuple[str, ...]:
    """Return KubeVirt's VMs among the pods that hold a device."""
    consumers = (entry.consumer for entry in sitter.entries if entry.device == device)
    return tuple(dict.fromkeys(one.vm for one in consumers if one is not None and one.vm is not None))


def _users(sitter: Sitter, device: str, group: IommuGroup | Unread | None) -> tuple[str, ...]:
    """Return who uses a device: the pods that hold it, and processes of which no pod is known."""
    pods = [entry.allocated_to for entry in sitter.entries if entry.device == device]
    if pods or not isinstance(group, int):
        return tuple(dict.fromkeys(pods))
    using = (sitter.inventory.facts.users or {}).get(group, ())
    return tuple(f"{user.command} (pid {user.pid})" for user in using)


def _resource(sitter: Sitter, name: ResourceName) -> ResourceView:
    offer, held_back = sitter.offers.by_resource.get(name, Offer(name)), sitter.offers.held_back.get(name, ())
    account = {entry.device: entry.allocated_to for entry in sitter.entries if entry.resource == name}
    withholding = sitter.withholdings.get(name)
    registration = sitter.registrations.get(name, Registration(registered=False))
    if withholding is not None:
        registration = Registration(registered=False, because=withholding.reason)
    devices = (device.candidate for device in offer.devices.values())
    selectors = selectors_of(sitter.inventory, (*devices, *held_back))
    return ResourceView(
        name=name,
        devices=tuple(
            DeviceView(
                id=device.id,
                healthy=device.health.healthy,
                numa_node=device.candidate.numa_node,
                group=device.candidate.group,
                gpu=device.candidate.target.gpu,
                nodes=vm_nodes(sitter.inventory, device.candidate),
                reasons=device.health.against,
                allocated_to=account.get(device.id),
            )
            for device in offer.devices.values()
        ),
        also_called=tuple(sorted(sitter.offers.other_names.get(name, ()))),
        registered=registration.registered,
        not_registered_because=registration.because,
        kind=selectors.kind,
        pci_vendor_selectors=selectors.pci,
        mdev_name_selectors=selectors.mdev,
        withheld=withholding is not None,
        silent=withholding is not None and withholding.silent,
    )
