"""A node's GpuNode: its spec as a request of the cluster, and the agent's picture as its status."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from gpuvirt.cluster.agent.noderequests import Hear
from gpuvirt.cluster.cache import Delta
from gpuvirt.cluster.kinds.gpunode import (
    READY,
    Gpu,
    GpuNode,
    Invalid,
    Offered,
    Origins,
    Spec,
    Status,
    Totals,
    Vgpu,
    Why,
)
from gpuvirt.cluster.kinds.parts import Condition
from gpuvirt.cluster.objects import ObjectKey
from gpuvirt.model.desired.invalid import InvalidDesired
from gpuvirt.model.desired.observed import NodeRequest, NodeSpec, Observed, Withheld
from gpuvirt.model.offers.validation import Check
from gpuvirt.model.offers.view import GpuView, NodeView, ResourceView, VgpuView
from gpuvirt.model.reasons import Reason, in_words

MOST_MESSAGE = 4000
"""Characters of a condition's message; the API's own limit is 32,768."""
RECONCILED, NOT_LOOKED = "Reconciled", "NotLooked"
TYPES = {
    Check.VFIO_PCI: "VfioPciReady",
    Check.VGPU_MANAGER: "VgpuManagerReady",
    Check.VGPU_DEVICES: "VgpuDevicesReady",
}


def request_of_spec(spec: Spec | None) -> NodeRequest:
    """Return what a GpuNode wants; without a spec it wants nothing, and labels and settings do."""
    if spec is None:
        return NodeRequest(spec=Observed(None))
    gpus = {one.address: str(one.mode) for one in spec.gpus}
    withheld = tuple(Withheld(one.resource, one.code, one.message, one.offered_as) for one in spec.withheld)
    origins = spec.origins or Origins()
    return NodeRequest(
        spec=Observed(
            NodeSpec(
                mode=str(spec.mode),
                gpus=gpus,
                vgpu_config=spec.vgpu_config,
                withheld=withheld,
                mode_origin=origins.mode,
                config_origin=origins.vgpu_config,
                reviewed=spec.reviewed,
            )
        )
    )


@dataclass(frozen=True, slots=True)
class SpecListener:
    """Who hears of a GpuNode's spec."""

    observed: Callable[[], NodeRequest]
    """Returns what was heard last, before a restart too."""
    observe: Hear


def observe_no_spec(listener: SpecListener) -> None:
    """Hand on that there is no spec, where none was heard before: one that is gone wants what it wanted."""
    if listener.observed().spec is None:
        listener.observe(request_of_spec(None))


def observe_gpu_node(listener: SpecListener, key: ObjectKey) -> Callable[[Delta[GpuNode]], None]:
    """Return what hands on news of a GpuNode.

    One that never had a spec says nothing against what was wanted before: the agent has made it, again perhaps. A spec
    that was taken away does.
    """

    def observe(delta: Delta[GpuNode]) -> None:
        found = delta.objects.get(key)
        if found is None or (found.spec is None and found.metadata.generation <= 1):
            observe_no_spec(listener)
        else:
            listener.observe(request_of_spec(found.spec))

    return observe


def status_of(view: NodeView, observed: GpuNode, at: datetime) -> Status:
    """Return the status that an agent's picture gives; conditions that stand keep their time."""
    gpus = (*view.gpus, *(one for one in view.functions if one.offered_as is not None))
    known = {(one.type, one.status): one.last_transition_time for one in (observed.status or Status()).conditions}
    now = f"{at:%Y-%m-%dT%H:%M:%SZ}"
    return Status(
        observed_generation=observed.metadata.generation,
        agent=view.agent.version if view.agent is not None else None,
        totals=_totals(view),
        gpus=tuple(_gpu(one) for one in gpus),
        resources=tuple(_offered(one) for one in view.resources),
        invalid=tuple(_invalid(one) for one in view.invalid),
        conditions=tuple(
            Condition(
                type=kind,
                status=status,
                reason=reason,
                message=message[:MOST_MESSAGE],
                last_transition_time=known.get((kind, status), now),
                observed_generation=observed.metadata.generation,
            )
            for kind, status, reason, message in _conditions(view)
        ),
    )


def _conditions(view: NodeView) -> Iterator[tuple[str, str, str, str]]:
    if not view.looked:
        yield READY, "Unknown", NOT_LOOKED, "the host was not looked at yet"
        return
    against = tuple(_against(view))
    if against:
        yield READY, "False", str(against[0].code), in_words(against)
    else:
        yield READY, "True", RECONCILED, ""
    for one in view.conditions:
        if one.needed:
            reason = one.reason
            yield (
                TYPES[one.check],
                str(one.holds),
                str(reason.code) if reason else "Holds",
                reason.text if reason else "",
            )


def _against(view: NodeView) -> Iterator[Reason]:
    """Yield what speaks against a node: its own troubles, devices that are offered and ill, resources unregistered."""
    yield from view.notes
    for resource in view.resources:
        if (resource.devices or resource.withheld) and resource.not_registered_because is not None:
            yield resource.not_registered_because
        for device in resource.devices:
            if not device.healthy:
                yield from device.reasons


def _totals(view: NodeView) -> Totals:
    return Totals(
        gpus=len(view.gpus),
        vgpus=sum(len(gpu.vgpus) for gpu in view.gpus),
        allocated=sum(device.allocated_to is not None for resource in view.resources for device in resource.devices),
        modes=",".join(sorted({str(gpu.mode) for gpu in view.gpus})),
    )


def _gpu(gpu: GpuView) -> Gpu:
    return Gpu(
        address=gpu.address,
        name=gpu.name,
        mode=str(gpu.mode),
        desired_mode=gpu.desired,
        vgpu_config=gpu.vgpu_config,
        driver=gpu.driver,
        numa_node=gpu.numa_node,
        offered_as=gpu.offered_as,
        healthy=gpu.healthy,
        users=gpu.users,
        virtual_machines=gpu.vms,
        vgpus=tuple(_vgpu(one) for one in gpu.vgpus),
        vfs=gpu.vfs,
        reasons=_whys(gpu.reasons),
    )


def _vgpu(vgpu: VgpuView) -> Vgpu:
    return Vgpu(
        id=vgpu.id,
        type=vgpu.type,
        offered_as=vgpu.offered_as,
        users=vgpu.users,
        virtual_machines=vgpu.vms,
        reasons=_whys(vgpu.reasons),
    )


def _offered(resource: ResourceView) -> Offered:
    return Offered(
        name=resource.name,
        healthy=sum(device.healthy for device in resource.devices),
        allocated=sum(device.allocated_to is not None for device in resource.devices),
        registered=resource.registered,
        kind=resource.kind,
        pci_vendor_selectors=resource.pci_vendor_selectors,
        mdev_name_selectors=resource.mdev_name_selectors,
    )


def _invalid(one: InvalidDesired) -> Invalid:
    return Invalid(
        origin=str(one.origin),
        where=one.where,
        code=str(one.reason.code),
        found=one.found,
        expected=one.expected,
        near=one.near,
        message=one.reason.text,
    )


def _whys(reasons: Iterable[Reason]) -> tuple[Why, ...]:
    return tuple(Why(code=str(one.code), message=one.text) for one in reasons)
