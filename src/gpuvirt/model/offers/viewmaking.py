"""Builds the view of a node from its inventory, its offers, the allocations and the desired state."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

import msgspec

from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName, VgpuId
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import DriverInformation
from gpuvirt.facts.vgpu import Scheduler, host_of_vfs
from gpuvirt.model.allocation.attachment import vm_nodes
from gpuvirt.model.devices.selectors import selectors_of
from gpuvirt.model.inventory.inventory import Gpu, Mode, Vgpu, malformed_entries, mode_of
from gpuvirt.model.offers.offers import Offer, OfferedDevice
from gpuvirt.model.offers.ondemand import ondemandviews
from gpuvirt.model.offers.view import (
    DeviceView,
    GpuView,
    NodeView,
    PlanningView,
    Registration,
    ResourceView,
    SchedulerView,
    VgpuView,
)
from gpuvirt.model.offers.viewinputs import ChangedNodes, ViewInputs, changed_gpus, changed_nodes
from gpuvirt.model.shares.placement import GpuId

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
