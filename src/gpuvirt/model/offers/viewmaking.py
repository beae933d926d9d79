"""Draws the view of a node from its inventory, its offers, and what is known of allocations and desired state."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from gpuvirt.facts.ids import PciAddress, ResourceName, VgpuId
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import DriverInformation
from gpuvirt.facts.vgpu import Scheduler, host_of_vfs
from gpuvirt.model.allocation.attachment import vm_nodes
from gpuvirt.model.desired.invalid import InvalidDesired
from gpuvirt.model.desired.workload import Workload
from gpuvirt.model.devices.selectors import selectors_of
from gpuvirt.model.inventory.inventory import Gpu, Inventory, Mode, Vgpu, malformed_entries, mode_of
from gpuvirt.model.inventory.naming import Naming
from gpuvirt.model.offers.deviceusers import DeviceUsers
from gpuvirt.model.offers.offers import Offer, OfferedDevice, Offers
from gpuvirt.model.offers.ondemand import ondemandviews
from gpuvirt.model.offers.ondemand.offer import OnDemandOffer
from gpuvirt.model.offers.sharing import SharedOffer
from gpuvirt.model.offers.validation import Condition
from gpuvirt.model.offers.view import (
    AgentView,
    DeviceView,
    GpuView,
    NodeView,
    PlanningView,
    Registration,
    ResourceView,
    SchedulerView,
    VgpuView,
)
from gpuvirt.model.offers.withholding import Withholding
from gpuvirt.model.reasons import Reason
from gpuvirt.model.shares.placement import GpuId


@dataclass(frozen=True, slots=True)
class ViewInputs:
    """The inputs of a NodeView."""

    inventory: Inventory
    offers: Offers
    users: DeviceUsers
    """The pods, VMs and processes that use its devices."""
    naming: Naming
    registrations: Mapping[ResourceName, Registration] = field(default_factory=dict)
    problems: tuple[Reason, ...] = ()
    agent: AgentView | None = None
    desired_by_gpu: Mapping[PciAddress, str] = field(default_factory=dict)
    """The desired modes of the GPUs that the agent manages."""
    vgpu_configs: Mapping[PciAddress, str] = field(default_factory=dict)
    """The desired vGPU configs."""
    schedulers: Mapping[PciAddress, Scheduler | Unread] = field(default_factory=dict)
    """The schedulers of the GPUs for which they were read."""
    workload: Workload = Workload.PASSTHROUGH
    conditions: tuple[Condition, ...] = ()
    withholdings: Mapping[ResourceName, Withholding] = field(default_factory=dict)
    """The withheld resources."""
    invalid: tuple[InvalidDesired, ...] = ()
    sharing: SharedOffer = field(default_factory=SharedOffer)
    pods_with_shares: Mapping[GpuId, tuple[str, ...]] = field(default_factory=dict)
    """The pods with shares of each GPU, as texts: `pod default/a`."""
    on_demand: OnDemandOffer = field(default_factory=OnDemandOffer)
    given: Mapping[VgpuId, ResourceName] = field(default_factory=dict)
    """The resources under which on-demand vGPUs were given to pods."""


Offered = Mapping[str, tuple[ResourceName, OfferedDevice]]
"""The offered devices with their resources, by device id."""


def make_view(inputs: ViewInputs, at: datetime) -> NodeView:
    """Return the view of a node."""
    facts, gpus = inputs.inventory.facts, inputs.inventory.gpus
    offered: Offered = {device.id: (resource, device) for resource, device in inputs.offers.devices()}
    vgpus: defaultdict[PciAddress, list[Vgpu]] = defaultdict(list)
    for vgpu in inputs.inventory.vgpus.values():
        vgpus[vgpu.gpu].append(vgpu)
    return NodeView(
        at=at,
        gpus=tuple(_function(inputs, offered, gpu.function, gpu, vgpus[address]) for address, gpu in gpus.items()),
        functions=tuple(
            _function(inputs, offered, function, None, ())
            for address, function in sorted(facts.functions.items())
            if address not in gpus and VgpuId(address) not in inputs.inventory.vgpus
            if address in offered or (function.physfn is None and inputs.inventory.matters(function))
        ),
        resources=tuple(_resource(inputs, name) for name in sorted(inputs.offers.names | inputs.on_demand.names)),
        problems=(*inputs.problems, *malformed_entries(facts)),
        boot_id=facts.platform.boot_id,
        agent=inputs.agent,
        workload=inputs.workload,
        conditions=inputs.conditions,
        invalid=inputs.invalid,
        shared=inputs.sharing.gpus,
        vgpu_type=inputs.sharing.vgpu_type,
    )


def _function(
    inputs: ViewInputs, offered: Offered, function: PciFunction, gpu: Gpu | None, vgpus: Sequence[Vgpu]
) -> GpuView:
    resource, device = offered.get(function.address, (None, None))
    on_demand = inputs.on_demand.gpus.get(function.address) if gpu is not None else None
    shared = inputs.sharing.gpus.by_address.get(function.address) if gpu is not None else None
    withheld = shared.withheld if shared is not None else inputs.offers.withheld.get(function.address)
    withheld = on_demand.withheld if on_demand is not None else withheld
    mode = mode_of(function, gpu.vgpu_host if gpu is not None else None)
    group, scheduler = function.iommu_group, inputs.schedulers.get(function.address)
    sharers = _sharers(inputs, function.address)
    return GpuView(
        address=function.address,
        pci_id=str(function.id),
        kind=function.kind,
        name=inputs.naming.ids.text(function.id),
        mode=Mode.SHARED if (shared is not None or sharers) and mode is Mode.CONTAINER else mode,
        driver=function.driver if isinstance(function.driver, str) else None,
        group=None if isinstance(group, Unread) else group,
        numa_node=function.numa_node,
        offered_as=resource,
        healthy=device.health.healthy if device is not None else None,
        desired=inputs.desired_by_gpu.get(function.address),
        vgpu_config=inputs.vgpu_configs.get(function.address),
        scheduler=SchedulerView(scheduler.policy, scheduler.timeslice_ms) if isinstance(scheduler, Scheduler) else None,
        siblings=gpu.siblings if gpu is not None else (),
        users=(*sharers, *inputs.users.of(function.address, group)),
        vgpus=tuple(_vgpu(inputs, offered, vgpu) for vgpu in vgpus),
        units=shared.offered if shared is not None else None,
        vfs=len(function.virtfns),
        reasons=device.health.against if device is not None else ((withheld,) if withheld is not None else ()),
        vms=inputs.users.vms(function.address),
        planning=_planning(gpu) if gpu is not None else None,
    )


def _planning(gpu: Gpu) -> PlanningView:
    function, host = gpu.function, gpu.vgpu_host or host_of_vfs(gpu.function)
    subsystem = str(function.subsystem) if function.subsystem else None
    if host is None:
        return PlanningView(function.class_code, subsystem, function.sriov_total_vfs)
    parents = {*host.creatable, *(vgpu.parent for vgpu in host.live)} - host.quarantined.keys()
    types = dict.fromkeys(host.type_names.values(), 0)
    for left in host.creatable.values():
        for vgpu_type, number in left.items():
            types[vgpu_type] = types.get(vgpu_type, 0) + number
    return PlanningView(
        function.class_code,
        subsystem,
        function.sriov_total_vfs,
        framework=host.framework,
        parents=None if function.address in parents else len(parents),
        types=dict(sorted(types.items())),
    )


def _sharers(inputs: ViewInputs, address: PciAddress) -> tuple[str, ...]:
    """Return the pods that have shares of a GPU, also while its desired mode is another one."""
    found = inputs.inventory.facts.device_ids.information.get(address)
    if not isinstance(found, DriverInformation) or found.uuid is None:
        return ()
    return inputs.pods_with_shares.get(GpuId(found.uuid), ())


def _vgpu(inputs: ViewInputs, offered: Offered, vgpu: Vgpu) -> VgpuView:
    live = vgpu.live
    resource, device = offered.get(live.id, (None, None))
    withheld = inputs.offers.withheld.get(live.id) if device is None else None
    if (given := inputs.given.get(live.id)) is not None:
        resource, withheld = given, None
    return VgpuView(
        id=live.id,
        type=live.type if isinstance(live.type, str) else "unknown",
        parent=live.parent,
        offered_as=resource,
        users=inputs.users.of(live.id, live.group),
        reasons=device.health.against if device is not None else ((withheld,) if withheld is not None else ()),
        vms=inputs.users.vms(live.id),
    )


def _resource(inputs: ViewInputs, name: ResourceName) -> ResourceView:
    offer = inputs.offers.by_resource.get(name, Offer(name))
    withheld = inputs.offers.of_withheld_resources.get(name, ())
    allocated_to = inputs.users.allocations(name)
    withholding = inputs.withholdings.get(name)
    registration = inputs.registrations.get(name, Registration(registered=False))
    if withholding is not None:
        registration = Registration(registered=False, because=withholding.reason)
    devices = (device.candidate for device in offer.devices.values())
    selectors = selectors_of(inputs.inventory, (*devices, *withheld))
    if (vgpu_type := inputs.on_demand.type_of(name)) is not None:
        selectors = ondemandviews.selectors(inputs.inventory, inputs.on_demand, name, vgpu_type)
    return ResourceView(
        name=name,
        devices=(
            *ondemandviews.devices(inputs.inventory, inputs.on_demand, name),
            *(_device(inputs.inventory, device, allocated_to.get(id_)) for id_, device in offer.devices.items()),
        ),
        also_called=tuple(sorted(inputs.offers.other_names.get(name, ()))),
        registered=registration.registered,
        not_registered_because=registration.because,
        kind=selectors.kind,
        pci_vendor_selectors=selectors.pci,
        mdev_name_selectors=selectors.mdev,
        withheld=withholding is not None,
        on_demand=vgpu_type,
        silent=withholding is not None and withholding.silent,
    )


def _device(inventory: Inventory, device: OfferedDevice, pod: str | None) -> DeviceView:
    candidate, against = device.candidate, device.health.against
    return DeviceView(
        id=candidate.id,
        healthy=device.health.healthy,
        numa_node=candidate.numa_node,
        group=candidate.group,
        gpu=candidate.target.gpu,
        nodes=vm_nodes(inventory, candidate),
        reasons=against,
        allocated_to=pod,
    )
