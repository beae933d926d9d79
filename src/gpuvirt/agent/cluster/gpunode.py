"""The GpuNode of a node: its spec turned into desired state, and the agent's view written to its status and events."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime

import msgspec

from gpuvirt.agent.cluster.keeping import KeeperDependencies, ObservedObject, ReportOutcome
from gpuvirt.agent.cluster.nodelabels import TakeRequest
from gpuvirt.clock import Signal
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.sysfs import device_path
from gpuvirt.kube import events
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import PatchType
from gpuvirt.kube.events import EventDraft, EventLevel
from gpuvirt.kube.failures import ConflictError
from gpuvirt.kube.kinds.gpunode import (
    API_VERSION,
    GPU_NODES,
    KIND,
    READY,
    CreatableType,
    Gpu,
    GpuNode,
    Invalid,
    Offered,
    Origins,
    Planning,
    ReasonStatus,
    SharesStatus,
    Spec,
    Status,
    Totals,
    Vgpu,
)
from gpuvirt.kube.kinds.gpunode import PodMemory as ReportedMemory
from gpuvirt.kube.kinds.parts import Condition
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.loops.cell import Cell
from gpuvirt.model.desired.invalid import InvalidDesired
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed, Withheld
from gpuvirt.model.inventory.inventory import Mode
from gpuvirt.model.offers.validation import ValidatorCheck
from gpuvirt.model.offers.view import GpuView, NodeView, PlanningView, ResourceView, VgpuView
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, grouped_text
from gpuvirt.model.shares.node.memoryregion import PodMemory
from gpuvirt.model.shares.sharedgpus import SharedGpus

REPORTER = "gpuvirt.io/node"
PAUSE_S = 1.0
"""The pause between two writes, since the view may change many times while a pod starts."""


def events_between(before: Status | None, after: Status) -> Iterator[EventDraft]:
    """Yield events about the changes between two statuses; for the first status, only about invalid desired state."""
    known = {invalid.message for invalid in before.invalid} if before is not None else set[str]()
    for invalid in after.invalid:
        if invalid.message not in known:
            yield EventDraft(EventLevel.WARNING, invalid.code, invalid.message)
    if before is None:
        return
    modes = {gpu.address: gpu.mode for gpu in before.gpus}
    for gpu in after.gpus:
        if (mode := modes.get(gpu.address, gpu.mode)) != gpu.mode:
            yield EventDraft(EventLevel.NORMAL, "ModeChanged", f"{gpu.address} changed from mode {mode} to {gpu.mode}")
    for address in sorted(set(after.gone) - set(before.gone)):
        yield EventDraft(EventLevel.WARNING, ReasonCode.GPU_GONE, f"{address} has disappeared from the host")
    ready, was = _ready(after), _ready(before)
    if ready is None or ready.reason in {ReasonCode.AWAITS_CONTROLLER, ReasonCode.GPU_GONE}:
        return  # every new resource waits for the controller for a moment, and a GPU that is gone has an event
    if after.invalid and ready.message.startswith(after.invalid[0].message):
        return  # invalid desired state has its own events
    if was is None or (ready.status, ready.reason) != (was.status, was.reason):
        kind = EventLevel.NORMAL if ready.status == "True" else EventLevel.WARNING
        yield EventDraft(kind, ready.reason, ready.message or "all GPUs are in their desired state")


def _ready(status: Status) -> Condition | None:
    return next((condition for condition in status.conditions if condition.type == READY), None)


class _Name(msgspec.Struct, frozen=True):
    name: str


class _New(msgspec.Struct, frozen=True, rename="camel"):
    """A new GpuNode, without a spec, so that it changes no desired state."""

    api_version: str
    kind: str
    metadata: _Name


class _StatusPatch(msgspec.Struct, frozen=True):
    status: Status


class _Due(msgspec.Struct, frozen=True):
    """The next write."""

    content: _New | _StatusPatch


class GpuNodeKeeper:
    """Keeps the GpuNode of one node."""

    def __init__(self, dependencies: KeeperDependencies) -> None:
        self._dependencies = dependencies
        self._known: ObservedObject[GpuNode] = ObservedObject()
        self._due = Signal()
        self._pruned: tuple[Status, Status | None] | None = None
        """The status that was written last, and its stored form: an older CRD drops unknown fields."""

    def observe(self, delta: Delta[GpuNode]) -> None:
        """Store the observed GpuNode, or that it does not exist."""
        self._known.observe(delta.objects.get(self._dependencies.key))
        self._due.set()

    async def run(
        self, views: Cell[NodeView], report: ReportOutcome, memory: Cell[tuple[PodMemory, ...]] | None = None
    ) -> None:
        """Write the status whenever it differs from the view; `report` gets each error, and None after a success.

        `memory` has the memory use of pods with limits; None for an agent that shares no GPUs.
        """
        used: Cell[tuple[PodMemory, ...]] = Cell(()) if memory is None else memory

        def lacking() -> _Due | None:
            if self._known.latest is None:
                return None
            node = self._known.latest.item
            if node is None:
                return _Due(_New(API_VERSION, KIND, _Name(self._dependencies.node)))
            if not views.get().host_observed and node.status is not None:
                return None  # the status from before the restart stays until the host has been observed
            status = status_of(views.get(), node, self._dependencies.clock.now(), used.get())
            is_due = status != node.status and (status, node.status) != self._pruned
            return _Due(_StatusPatch(status)) if is_due else None

        with views.notifying(self._due), used.notifying(self._due):
            await self._dependencies.keep(lacking, self._write, report, self._due)

    async def _write(self, due: _Due) -> None:
        client, content, before = self._dependencies.client, due.content, self._known.latest
        if isinstance(content, _New):
            try:
                node = await client.create(GPU_NODES, content, GpuNode)
            except ConflictError:  # another client has just created it
                self._known.doubt(before)
                return
        else:
            node = await client.patch(
                GPU_NODES, self._dependencies.node, content, PatchType.MERGE, GpuNode, part="status"
            )
            self._pruned = content.status, node.status
        self._known.answer(before, node)
        await self._write_events(before.item if before is not None else None, node)
        await self._dependencies.clock.sleep(PAUSE_S)

    async def _write_events(self, before: GpuNode | None, after: GpuNode) -> None:
        if after.status is None:
            return
        about = events.About(API_VERSION, KIND, self._dependencies.node, after.metadata.uid)
        by, at = events.Reporter(REPORTER, self._dependencies.node), self._dependencies.clock.now()
        delta = events_between(before.status if before is not None else None, after.status)
        await events.write(self._dependencies.client, events.events_of([(about, draft) for draft in delta], by, at))


MOST_MESSAGE = 4000
"""The most characters of a condition's message; the API's own limit is 32,768."""
RECONCILED, NOT_OBSERVED = "Reconciled", "NotObserved"
BRIEF = frozenset(
    {
        ReasonCode.AWAITS_CONTROLLER,
        ReasonCode.PLAN_OUTDATED,
        ReasonCode.STILL_ALLOCATABLE,
        ReasonCode.UNIT_BUSY,
    }
)
"""The reasons that usually end in seconds without anyone's help: a condition has those that last before them."""
TYPES = {
    ValidatorCheck.VFIO_PCI: "VfioPciReady",
    ValidatorCheck.VGPU_MANAGER: "VgpuManagerReady",
    ValidatorCheck.VGPU_DEVICES: "VgpuDevicesReady",
}


def request_of_spec(spec: Spec | None) -> NodeRequest:
    """Return the desired state of a GpuNode's spec; without a spec, labels and settings apply."""
    if spec is None:
        return NodeRequest(spec=Observed(None))
    gpus = {gpu.address: str(gpu.mode) for gpu in spec.gpus}
    withheld = tuple(Withheld(entry.resource, entry.code, entry.message, entry.offered_as) for entry in spec.withheld)
    origins = spec.origins or Origins()
    return NodeRequest(
        spec=Observed(
            GpuNodeSpec(
                mode=str(spec.mode),
                gpus=gpus,
                vgpu_config=spec.vgpu_config,
                withheld=withheld,
                mode_origin=origins.mode,
                config_origin=origins.vgpu_config,
                reviewed=spec.reviewed,
                enforcement=_enforcement(spec),
            )
        )
    )


def _enforcement(spec: Spec) -> str | None:
    return str(spec.shares.enforcement) if spec.shares is not None and spec.shares.enforcement is not None else None


class SpecListener(msgspec.Struct, frozen=True):
    """The consumer of a GpuNode's spec."""

    observed: Callable[[], NodeRequest]
    """Returns the desired state that was observed last, also before a restart."""
    observe: TakeRequest


def observe_no_spec(listener: SpecListener) -> None:
    """Report that there is no spec, unless a spec was observed before: after its GpuNode is gone, it still applies."""
    if listener.observed().spec is None:
        listener.observe(request_of_spec(None))


def observe_gpu_node(listener: SpecListener, key: ObjectKey) -> Callable[[Delta[GpuNode]], None]:
    """Return a function that passes changes of a GpuNode's spec to the listener.

    A GpuNode that never had a spec keeps the desired state as it is: the agent has created it, perhaps again after it
    was deleted. A spec that was removed ends the desired state.
    """

    def observe(delta: Delta[GpuNode]) -> None:
        found = delta.objects.get(key)
        if found is None or (found.spec is None and found.metadata.generation <= 1):
            observe_no_spec(listener)
        else:
            listener.observe(request_of_spec(found.spec))

    return observe


def status_of(view: NodeView, observed: GpuNode, at: datetime, memory: Sequence[PodMemory] = ()) -> Status:
    """Return the status for an agent's view; a condition whose status is unchanged keeps its transition time."""
    gpus = (*view.gpus, *(function for function in view.functions if function.offered_as is not None))
    before = (observed.status or Status()).conditions
    gone = _gone(observed, view)
    known = {(condition.type, condition.status): condition.last_transition_time for condition in before}
    now = f"{at:%Y-%m-%dT%H:%M:%SZ}"
    return Status(
        observed_generation=observed.metadata.generation,
        agent=view.agent.version if view.agent is not None else None,
        totals=_totals(view),
        gpus=tuple(_gpu(gpu) for gpu in gpus),
        gone=gone,
        resources=tuple(_offered(resource) for resource in view.resources),
        invalid=tuple(_invalid(desired) for desired in view.invalid),
        shares=_shares(view.shared, memory),
        conditions=tuple(
            Condition(
                type=kind,
                status=status,
                reason=reason,
                message=message[:MOST_MESSAGE],
                last_transition_time=known.get((kind, status), now),
                observed_generation=observed.metadata.generation,
            )
            for kind, status, reason, message in _conditions(view, [_gpu_gone(gpu, observed) for gpu in gone])
        ),
    )


def _gone(observed: GpuNode, view: NodeView) -> tuple[str, ...]:
    """Return the GPUs that the GpuNode has listed and that the host has no more; VFs come and go."""
    if (before := observed.status) is None or not view.host_observed:
        return before.gone if before is not None else ()
    listed = {*before.gone, *(gpu.address for gpu in before.gpus if gpu.planning is not None)}
    return tuple(sorted(listed - {gpu.address for gpu in view.gpus}))


def _gpu_gone(address: str, node: GpuNode) -> Reason:
    fix = (
        "look at the kernel's log (dmesg); a rescan (echo 1 > /sys/bus/pci/rescan) or a cold reboot may bring it back."
        f" If it was taken out: kubectl delete gpunode {node.metadata.name}, which the agent creates again"
    )
    message, place = "has disappeared from the host", Seen.absent(device_path(PciAddress(address)))
    return Reason(ReasonCode.GPU_GONE, address, message, (place,), fix)


def _conditions(view: NodeView, gone: Sequence[Reason]) -> Iterator[tuple[str, str, str, str]]:
    if not view.host_observed:
        yield READY, "Unknown", NOT_OBSERVED, "the agent has not observed the host yet"
        return
    problems = sorted((*gone, *_problems(view)), key=lambda problem: problem.code in BRIEF)
    if problems:
        yield READY, "False", str(problems[0].code), grouped_text(problems)
    else:
        yield READY, "True", RECONCILED, ""
    for condition in view.conditions:
        if condition.needed:
            reason = condition.reason
            yield (
                TYPES[condition.check],
                str(condition.holds),
                str(reason.code) if reason else "Holds",
                reason.text if reason else "",
            )


def _problems(view: NodeView) -> Iterator[Reason]:
    """Yield why a node is not Ready: its own problems, unregistered resources, offered devices that are unhealthy,
    shared GPUs that are withheld."""
    yield from view.problems
    for resource in view.resources:
        if (resource.devices or resource.withheld) and resource.not_registered_because is not None:
            yield resource.not_registered_because
        for device in resource.devices:
            if not device.healthy:
                yield from device.reasons
    for gpu in view.shared.gpus:
        if gpu.withheld is not None and not gpu.withheld.code.passes:
            yield gpu.withheld


def _totals(view: NodeView) -> Totals:
    devices = sum(device.allocated_to is not None for resource in view.resources for device in resource.devices)
    return Totals(
        gpus=len(view.gpus),
        vgpus=sum(len(gpu.vgpus) for gpu in view.gpus),
        allocated=devices + sum(bool(gpu.users) for gpu in view.gpus if gpu.mode is Mode.SHARED),
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
        vgpus=tuple(_vgpu(vgpu) for vgpu in gpu.vgpus),
        units=gpu.units,
        vfs=gpu.vfs,
        planning=_planning(gpu, gpu.planning) if gpu.planning is not None else None,
        reasons=_whys(gpu.reasons),
    )


def _shares(shared: SharedGpus, memory: Sequence[PodMemory]) -> SharesStatus | None:
    if not shared.gpus or shared.enforcement is None:
        return None
    pods = tuple(
        ReportedMemory(namespace=pod.namespace, pod=pod.pod, limit_mib=pod.limit_mib, used_mib=pod.used_mib)
        for pod in memory
    )
    return SharesStatus(enforcement=shared.enforcement, origin=shared.enforced_by, memory=pods)


def _planning(gpu: GpuView, seen: PlanningView) -> Planning:
    return Planning(
        pci_id=gpu.pci_id,
        subsystem_id=seen.subsystem,
        class_code=seen.class_code,
        total_vfs=seen.total_vfs,
        framework=seen.framework,
        parents=seen.parents,
        types=tuple(CreatableType(name=name, creatable=left) for name, left in seen.types.items()),
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


def _invalid(desired: InvalidDesired) -> Invalid:
    return Invalid(
        origin=str(desired.origin),
        where=desired.where,
        code=str(desired.reason.code),
        found=desired.found,
        expected=desired.expected,
        near=desired.near,
        message=desired.reason.text,
    )


def _whys(reasons: Iterable[Reason]) -> tuple[ReasonStatus, ...]:
    return tuple(ReasonStatus(code=str(reason.code), message=reason.text) for reason in reasons)
