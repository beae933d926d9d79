"""Builds the view of a node from its inventory, its offers, the allocations and the desired state."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName, VgpuId
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import DriverInformation
from gpuvirt.facts.vgpu import Scheduler, host_of_vfs
from gpuvirt.model.allocation.attachment import vm_nodes
from gpuvirt.model.desired.invalid import InvalidDesired
from gpuvirt.model.desired.settings import VfioNodes
from gpuvirt.model.desired.workload import Workload
from gpuvirt.model.devices.candidates import Candidate, selectors_of
from gpuvirt.model.inventory.inventory import Gpu, Inventory, Mode, Vgpu, malformed_entries, mode_of
from gpuvirt.model.inventory.naming import Naming
from gpuvirt.model.offers.deviceusers import DeviceUsers
from gpuvirt.model.offers.namereview import Withholding
from gpuvirt.model.offers.offers import Offer, OfferedDevice, Offers
from gpuvirt.model.offers.ondemand import ondemandviews
from gpuvirt.model.offers.ondemand.offer import OnDemandOffer
from gpuvirt.model.offers.sharing import SharedOffer
from gpuvirt.model.offers.validation import ValidatorCondition
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
from gpuvirt.model.reasons import Reason, ReasonCode, refusals
from gpuvirt.model.shares.placement import GpuId

# Objects of the inventory and of the offers are compared by identity, since observations and offers keep the objects
# that have not changed; small values are compared by value.
K = TypeVar("K")
V = TypeVar("V")


class ViewInputs(msgspec.Struct, frozen=True):
    """The inputs of a NodeView."""

    inventory: Inventory
    offers: Offers
    users: DeviceUsers
    """The pods, VMs and processes that use its devices."""
    naming: Naming
    registrations: Mapping[ResourceName, Registration] = msgspec.field(default_factory=dict)
    problems: tuple[Reason, ...] = ()
    agent: AgentView | None = None
    desired_by_gpu: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The desired modes of the GPUs that the agent manages."""
    vgpu_configs: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The desired vGPU configs."""
    schedulers: Mapping[PciAddress, Scheduler | Unread] = msgspec.field(default_factory=dict)
    """The schedulers of the GPUs for which they were read."""
    workload: Workload = Workload.PASSTHROUGH
    conditions: tuple[ValidatorCondition, ...] = ()
    withholdings: Mapping[ResourceName, Withholding] = msgspec.field(default_factory=dict)
    """The withheld resources."""
    invalid: tuple[InvalidDesired, ...] = ()
    sharing: SharedOffer = msgspec.field(default_factory=SharedOffer)
    pods_with_shares: Mapping[GpuId, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """The pods with shares of each GPU, as texts: `pod default/a`."""
    on_demand: OnDemandOffer = msgspec.field(default_factory=OnDemandOffer)
    given: Mapping[VgpuId, ResourceName] = msgspec.field(default_factory=dict)
    """The resources under which on-demand vGPUs were given to pods."""
    vfio_nodes: VfioNodes = VfioNodes.BOTH
    """The setting, which an agent reads only when it starts."""


class ChangedNodes(msgspec.Struct, frozen=True):
    """The devices and groups whose nodes in `/dev/vfio`, by which VMs open devices, may have changed."""

    devices: AbstractSet[str] = frozenset()
    """Functions and vGPUs."""
    groups: AbstractSet[IommuGroup] = frozenset()

    def concern(self, candidate: Candidate) -> bool:
        """Return whether the nodes of a device may be others."""
        devices = (candidate.carrier, candidate.target.vgpu)
        return candidate.group in self.groups or not self.devices.isdisjoint(devices)


def changed_nodes(now: Inventory, last: Inventory) -> ChangedNodes | None:
    """Return what has changed of the nodes by which VMs open devices; None: all of them may be others."""
    if now is last:
        return ChangedNodes()
    facts, before = now.facts, last.facts
    if facts.platform.iommufd is not before.platform.iommufd:
        return None
    cdevs = facts.cdev_nodes ^ before.cdev_nodes
    functions = _others(facts.functions, before.functions) | {
        address for address, function in facts.functions.items() if cdevs and not cdevs.isdisjoint(function.cdevs)
    }
    devices = {*functions, *(now.vgpus.keys() ^ last.vgpus.keys())}
    return ChangedNodes(devices, facts.group_nodes ^ before.group_nodes)


def changed_gpus(now: ViewInputs, last: ViewInputs) -> AbstractSet[PciAddress]:
    """Return the GPUs whose part of the view may differ, with their vGPUs."""
    gpus, vgpus = now.inventory.gpus, now.inventory.vgpus
    # which GPU a pod has a share of is read from what the driver shows, which is compared nowhere
    if now.naming.ids is not last.naming.ids or now.pods_with_shares or last.pods_with_shares:
        return gpus.keys()
    changed = set(_gpus_of_inventory(now.inventory, last.inventory))
    for device in _changed_devices(now, last):
        vgpu = vgpus.get(VgpuId(device))
        changed.add(vgpu.gpu if vgpu is not None else PciAddress(device))
    changed.update(_gpus_of_groups(now.inventory, _differing(now.users.processes, last.users.processes)))
    changed |= _differing(now.desired_by_gpu, last.desired_by_gpu)
    changed |= _differing(now.vgpu_configs, last.vgpu_configs)
    changed |= _differing(now.schedulers, last.schedulers)
    changed |= _differing(now.on_demand.gpus, last.on_demand.gpus)
    return changed | _differing(now.sharing.gpus.by_address, last.sharing.gpus.by_address)


def _gpus_of_inventory(now: Inventory, last: Inventory) -> Iterator[PciAddress]:
    """Yield the GPUs that are not as before, and those of vGPUs that are not."""
    if now is last:
        return
    for address, gpu in now.gpus.items():
        before = last.gpus.get(address)
        if before is None or not _is_same_gpu(gpu, before):
            yield address
    for id_ in now.vgpus.keys() | last.vgpus.keys():
        found = [inventory.vgpus[id_] for inventory in (now, last) if id_ in inventory.vgpus]
        if len(found) == 1 or not _is_same_vgpu(*found):
            yield from (vgpu.gpu for vgpu in found)


def _is_same_gpu(gpu: Gpu, other: Gpu) -> bool:
    is_same = gpu.function is other.function and gpu.vgpu_host is other.vgpu_host
    return is_same and gpu.siblings == other.siblings


def _is_same_vgpu(vgpu: Vgpu, other: Vgpu) -> bool:
    return vgpu.live is other.live and vgpu.gpu == other.gpu


def _changed_devices(now: ViewInputs, last: ViewInputs) -> Iterator[str]:
    """Yield the ids of the devices that are offered, withheld or used otherwise than before."""
    for name in now.offers.by_resource.keys() | last.offers.by_resource.keys():
        offers = (inputs.offers.by_resource.get(name, Offer(name)) for inputs in (now, last))
        yield from _others(*(offer.devices for offer in offers))
    yield from _differing(now.offers.withheld, last.offers.withheld)
    yield from _differing(now.users.pods, last.users.pods)
    yield from _differing(now.users.virtual_machines, last.users.virtual_machines)
    yield from _differing(now.given, last.given)


def _gpus_of_groups(inventory: Inventory, groups: AbstractSet[IommuGroup]) -> Iterator[PciAddress]:
    """Yield the GPUs that are in groups, or have a vGPU in them."""
    if groups:
        yield from (address for address, gpu in inventory.gpus.items() if gpu.function.iommu_group in groups)
        yield from (vgpu.gpu for vgpu in inventory.vgpus.values() if vgpu.live.group in groups)


def _others(now: Mapping[K, V], last: Mapping[K, V]) -> set[K]:
    """Return the keys whose values are other objects, or that only one of two mappings has."""
    if now is last:
        return set()
    return {key for key, value in now.items() if last.get(key) is not value} | (last.keys() - now.keys())


def _differing(now: Mapping[K, V], last: Mapping[K, V]) -> set[K]:
    """Return the keys whose values are not equal, or that only one of two mappings has."""
    if now is last:
        return set()
    return {key for key, value in now.items() if key not in last or last[key] != value} | (last.keys() - now.keys())


Offered = Mapping[str, tuple[ResourceName, OfferedDevice]]
"""The offered devices with their resources, by device id."""


class Drawn(msgspec.Struct, frozen=True):
    """A view with its inputs."""

    inputs: ViewInputs
    view: NodeView


def make_view(inputs: ViewInputs, at: datetime, last: Drawn | None = None) -> NodeView:
    """Return the view of a node. What has not changed since the `last` view is taken from it."""
    facts, gpus = inputs.inventory.facts, inputs.inventory.gpus
    offered: Offered = {device.id: (resource, device) for resource, device in inputs.offers.devices()}
    return NodeView(
        at=at,
        gpus=_gpus(inputs, offered, last),
        functions=tuple(
            _function(inputs, offered, function, None, ())
            for address, function in sorted(facts.functions.items())
            if address not in gpus and VgpuId(address) not in inputs.inventory.vgpus
            if address in offered
            or function.is_gpu_part
            or (function.physfn is None and inputs.inventory.matters(function))
        ),
        resources=_resources(inputs, last),
        problems=(*inputs.problems, *malformed_entries(facts)),
        boot_id=facts.platform.boot_id,
        agent=inputs.agent,
        workload=inputs.workload,
        conditions=inputs.conditions,
        invalid=inputs.invalid,
        shared=inputs.sharing.gpus,
        vgpu_type=inputs.sharing.vgpu_type,
    )


def _gpus(inputs: ViewInputs, offered: Offered, last: Drawn | None) -> tuple[GpuView, ...]:
    gpus = inputs.inventory.gpus
    before = {view.address: view for view in last.view.gpus} if last is not None else {}
    changed = changed_gpus(inputs, last.inputs) if last is not None else gpus.keys()
    vgpus: defaultdict[PciAddress, list[Vgpu]] = defaultdict(list)
    for vgpu in inputs.inventory.vgpus.values():
        if vgpu.gpu in changed:
            vgpus[vgpu.gpu].append(vgpu)
    return tuple(
        _function(inputs, offered, gpu.function, gpu, vgpus[address]) if address in changed else before[address]
        for address, gpu in gpus.items()
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
    if sharers and withheld is not None and withheld.code is ReasonCode.NATIVE_DRIVER:
        withheld = replace(withheld, fix=f"{refusals.WAIT_FOR_POD}; then {withheld.fix}")
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


def _resources(inputs: ViewInputs, last: Drawn | None) -> tuple[ResourceView, ...]:
    nodes = changed_nodes(inputs.inventory, last.inputs.inventory) if last is not None else None
    before = {view.name: view for view in last.view.resources} if last is not None and nodes is not None else {}
    names = sorted(inputs.offers.names | inputs.on_demand.names)
    return tuple(_resource(inputs, name, _kept(name, before.get(name), last, nodes)) for name in names)


def _kept(
    name: ResourceName, view: ResourceView | None, last: Drawn | None, nodes: ChangedNodes | None
) -> Mapping[DeviceId, tuple[OfferedDevice, DeviceView]]:
    """Return the devices in the last view of a resource whose nodes have not changed, with their views."""
    if view is None or last is None or nodes is None:
        return {}
    views, offer = {device.id: device for device in view.devices}, last.inputs.offers.by_resource.get(name, Offer(name))
    return {id_: (device, views[id_]) for id_, device in offer.devices.items() if not nodes.concern(device.candidate)}


def _resource(
    inputs: ViewInputs, name: ResourceName, before: Mapping[DeviceId, tuple[OfferedDevice, DeviceView]]
) -> ResourceView:
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
            *ondemandviews.devices(inputs.inventory, inputs.on_demand, name, inputs.vfio_nodes),
            *_devices(inputs, offer, allocated_to, before),
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


def _devices(
    inputs: ViewInputs,
    offer: Offer,
    allocated_to: Mapping[DeviceId, str],
    before: Mapping[DeviceId, tuple[OfferedDevice, DeviceView]],
) -> Iterator[DeviceView]:
    for id_, device in offer.devices.items():
        pod, (last, view) = allocated_to.get(id_), before.get(id_, (None, None))
        is_same = last is device and view is not None and view.allocated_to == pod
        yield view if view is not None and is_same else _device(inputs, device, pod)


def _device(inputs: ViewInputs, device: OfferedDevice, pod: str | None) -> DeviceView:
    candidate, against = device.candidate, device.health.against
    return DeviceView(
        id=candidate.id,
        healthy=device.health.healthy,
        numa_node=candidate.numa_node,
        group=candidate.group,
        gpu=candidate.target.gpu,
        nodes=vm_nodes(inputs.inventory, candidate, inputs.vfio_nodes),
        reasons=against,
        allocated_to=pod,
    )
