"""One schedule's requests to the API server: what a round reads, and its writes with the versions that it has read.

A round also reads the schedules of the namespace, to find workers and VMs that two have. A hundred schedules in a
switch read all hundred each second: those who ask at the same time share one reading, without histories and conditions.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.controller.announcer import REPORTER
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube import events
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.events import About, EventDraft, EventLevel, events_of
from gpuvirt.kube.failures import NotFoundError
from gpuvirt.kube.kinds.core import Node, WholePod
from gpuvirt.kube.kinds.vgpuschedule import (
    API_VERSION,
    KIND,
    PhaseSpec,
    Spec,
    VgpuSchedule,
    WorkerStatus,
    vgpu_schedules,
)
from gpuvirt.kube.kinds.vgpuschedule import Status as StoredStatus
from gpuvirt.kube.labels import LabelSelector, Requirement
from gpuvirt.kube.resources import NODES, Collection, Metadata, VersionPrecondition, pods
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.workers.hypervisor import Answer, VmKey
from gpuvirt.model.workers.observed import ChangeVm, NodePod, NodeVm, ObservedVms, VmStep
from gpuvirt.model.workers.spec import PhaseName
from gpuvirt.model.workers.status import ConfiguredNode, ScheduleStatus, Worker
from gpuvirt.plans.knownconfigs import KnownConfigs
from gpuvirt_schedules.controller import objects
from gpuvirt_schedules.controller.configurednodes import ConfiguredNodes
from gpuvirt_schedules.controller.coverage import CoverageReading
from gpuvirt_schedules.controller.kubevirt.nodevms import NodeVms
from gpuvirt_schedules.controller.nodemarks import marks_patch
from gpuvirt_schedules.controller.rounds import ClusterReading, StoredSchedule
from gpuvirt_schedules.controller.workerobjects import (
    ALL_PODS,
    ATTACHMENTS,
    CORDONED_BY,
    LEASES,
    AttachmentObject,
    LeaseObject,
    PhaseTypes,
    node_pod,
    type_of,
    worker_of,
)
from gpuvirt_schedules.decide.faults import missing_profiles, shared_nodes, shared_workers
from gpuvirt_schedules.decide.nextstep import MarkNode
from gpuvirt_schedules.decide.times import Switch
from gpuvirt_schedules.decide.transition import Advance
from gpuvirt_schedules.sharedreading import SharedReading

ANNOUNCED, SWITCHING, REACHED, FORCED = "PhaseAnnounced", "Switching", "PhaseReached", "DrainForced"
APPLIED = "VgpuConfigApplied"
VM_EVENTS = {VmStep.STOP: "VmStopping", VmStep.STOPPED: "VmStopped", VmStep.START: "VmStarting"}


def event_drafts(
    before: ScheduleStatus,
    after: ScheduleStatus,
    following: Switch | None,
    problems: tuple[Reason, ...],
    before_codes: frozenset[str],
) -> Iterator[EventDraft]:
    """Yield the events of one round; `before_codes` are the codes of the problems that are in the stored status."""
    for problem in problems:
        if str(problem.code) not in before_codes:
            yield EventDraft(EventLevel.WARNING, str(problem.code), problem.text)
    if after.announced is not None and after.announced != before.announced and following is not None:
        leaving = [worker.node for worker in after.workers if after.announced not in worker.phases]
        note = f"phase {after.announced} begins at {following.at:%Y-%m-%d %H:%M} UTC"
        if after.workers or not after.nodes:
            note += f"; these workers leave: {', '.join(leaving) or 'none'}"
        yield EventDraft(EventLevel.NORMAL, ANNOUNCED, note)
    yield from _of_phases(before, after)
    yield from _of_workers(before, after)
    yield from _of_nodes(before, after)
    yield from _of_vms(before, after)


def _of_phases(before: ScheduleStatus, after: ScheduleStatus) -> Iterator[EventDraft]:
    """Yield that a switch begins or ends; without workers it does both in one round, and nodes may still wait.

    Workers for which the first phase holds already make no switch.
    """
    if after.unreached is not None and after.given_up != before.given_up:
        yield EventDraft(EventLevel.WARNING, str(after.unreached.code), after.unreached.text)
    begun = after.transition.phase if after.transition is not None else None
    last = before.transition.phase if before.transition is not None else None
    at_once = last is None and not after.workers and after.phase != before.phase
    if begun is None and at_once:
        begun = after.phase
    if begun is not None and begun != last:
        yield EventDraft(EventLevel.NORMAL, SWITCHING, f"the switch to phase {begun} begins")
    if after.transition is not None or after.phase is None:
        return
    if last is not None or (at_once and all(node.is_applied for node in after.nodes)):
        yield EventDraft(EventLevel.NORMAL, REACHED, f"phase {after.phase} is reached")


def _of_nodes(before: ScheduleStatus, after: ScheduleStatus) -> Iterator[EventDraft]:
    """Yield that all nodes have the vGPU config of their phase, and what single nodes wait for.

    For a moment after each switch all nodes wait for their agents, which no event says.
    """
    known = {(node.node, node.phase, node.reason.code) for node in before.nodes if node.reason is not None}
    for node in after.nodes:
        reason = node.reason
        if reason is None or reason.code is ReasonCode.VGPU_CONFIG_PENDING:
            continue
        if (node.node, node.phase, reason.code) not in known:
            yield EventDraft(EventLevel.WARNING, str(reason.code), reason.text)
    are_applied = after.nodes and all(node.is_applied for node in after.nodes)
    if are_applied and {(node.phase, node.is_applied) for node in before.nodes} != {(after.nodes[0].phase, True)}:
        first = after.nodes[0]
        note = f"all nodes of phase {first.phase} have the vGPU config {first.vgpu_config}: {len(after.nodes)}"
        yield EventDraft(EventLevel.NORMAL, APPLIED, note)


def _of_vms(before: ScheduleStatus, after: ScheduleStatus) -> Iterator[EventDraft]:
    """Yield the VMs that are stopped, were stopped or are started, and why others are not."""
    known = {vm.vm: vm for vm in before.vms}
    for vm in after.vms:
        last = known.get(vm.vm)
        is_new = last is None or last.step is not vm.step
        code = vm.reason.code if vm.reason is not None else None
        was = last.reason.code if last is not None and last.reason is not None else None
        if is_new and vm.step in VM_EVENTS:
            yield EventDraft(EventLevel.NORMAL, *_vm_event(vm))
        if vm.is_forced and not (last is not None and last.is_forced):
            yield EventDraft(EventLevel.WARNING, FORCED, f"VM {vm.where} is stopped against its PodDisruptionBudget")
        if code is ReasonCode.VM_NOT_STOPPED and was is not code and vm.reason is not None:
            yield EventDraft(EventLevel.WARNING, str(code), vm.reason.text)
        if vm.is_held and not (last is not None and last.is_held and not is_new) and vm.reason is not None:
            yield EventDraft(EventLevel.WARNING, str(code), f"step {vm.step} is held: {vm.reason.text}")


def _vm_event(vm: NodeVm) -> tuple[str, str]:
    """Return the code and the text of the event of a VM whose step has begun."""
    words = {
        VmStep.STOP: f"is shut down for the vGPU config of phase {vm.phase} on node {vm.node}",
        VmStep.STOPPED: f"is off until phase {vm.phase} ends",
        VmStep.START: f"is started again, since phase {vm.phase} has ended",
    }
    return VM_EVENTS[vm.step], f"VM {vm.where} {words[vm.step]}"


def _of_workers(before: ScheduleStatus, after: ScheduleStatus) -> Iterator[EventDraft]:
    known = {worker.node: worker for worker in before.workers}
    for worker in after.workers:
        last = known.get(worker.node)
        was_held, was_forced = (last.is_held, last.forced) if last is not None else (False, 0)
        if worker.is_held and not was_held and worker.reason is not None:
            note = f"step {worker.step} is held: {worker.reason.text}"
            yield EventDraft(EventLevel.WARNING, str(worker.reason.code), note)
        if _has_lost_labels(worker) and not _has_lost_labels(last) and worker.reason is not None:
            yield EventDraft(EventLevel.WARNING, str(worker.reason.code), worker.reason.text)
        if worker.forced > was_forced:
            deleted = worker.forced - was_forced
            note = (
                f"node {worker.node}: the drain took too long; pods that are deleted against their budgets: {deleted}"
            )
            yield EventDraft(EventLevel.WARNING, FORCED, note)


def _has_lost_labels(worker: Worker | None) -> bool:
    """Return whether a worker's Node has come back without labels: nothing else shows that between switches."""
    return worker is not None and worker.reason is not None and worker.reason.code is ReasonCode.WORKER_LABELS_LOST


class _Status(msgspec.Struct, frozen=True):
    workers: tuple[WorkerStatus, ...] = ()


class OtherSchedule(msgspec.Struct, frozen=True):
    """A schedule without the parts of its status that others do not need."""

    metadata: Metadata
    spec: Spec = Spec()
    status: _Status = _Status()


class OtherSchedules:
    """The schedules of one namespace."""

    def __init__(
        self, client: Client, namespace: str, on_shared: Callable[[Iterable[str]], None] | None = None
    ) -> None:
        """`on_shared` is called with the names of schedules that a reading shows to share workers."""
        self.on_shared = on_shared
        self._listed = SharedReading(lambda: client.list(Collection(vgpu_schedules(namespace), OtherSchedule)))

    async def read(self) -> tuple[OtherSchedule, ...]:
        """Return all schedules, from a reading that began after this was called; raises ApiError."""
        return (await self._listed.read()).items


EVICTION_S = 10.0
"""How long the API server may take for an eviction, which asks all budgets."""
READS_AT_ONCE = 8
"""How many requests about single nodes are under way at once."""
T = TypeVar("T")


class _StatusPatch(msgspec.Struct, frozen=True):
    metadata: VersionPrecondition
    status: StoredStatus


class _Preconditions(msgspec.Struct, frozen=True):
    uid: str


class _Options(msgspec.Struct, frozen=True):
    preconditions: _Preconditions


class _EvictedPod(msgspec.Struct, frozen=True):
    name: str
    namespace: str


class _Eviction(msgspec.Struct, frozen=True, rename="camel"):
    metadata: _EvictedPod
    delete_options: _Options
    api_version: str = "policy/v1"
    kind: str = "Eviction"


class ScheduleObjects:
    """The API server, as the rounds of one schedule need it. All methods raise ApiError."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        name: str,
        clock: Clock,
        configured: ConfiguredNodes | None = None,
        others: OtherSchedules | None = None,
    ) -> None:
        """Writes of `client` are sent with the lease alone (`Client.leading`).

        `configured` is None for a command, which observes no GpuNodes: the nodes of the status stay as they are.
        `others` is what the schedules of one controller share.
        """
        self._others = others if others is not None else OtherSchedules(client, namespace)
        self._configured = configured
        self._client = client
        self._resource = vgpu_schedules(namespace)
        self._name = name
        self._clock = clock
        self._object: VgpuSchedule | None = None
        self._nodes: dict[NodeName, Node] = {}
        """The nodes of the last reading."""
        self._coverage = CoverageReading(client, clock)
        self._vms = NodeVms(client, name)
        self._worker_namespaces: frozenset[str] = frozenset()
        """The namespaces in which schedules have their workers, by the last reading."""
        self._cordoned_s: dict[NodeName, float] = {}
        """When each node was first seen unschedulable."""

    @property
    def stored(self) -> VgpuSchedule | None:
        """The schedule as it was read or written last; None if it does not exist."""
        return self._object

    def use(self, stored: VgpuSchedule) -> None:
        """Take a schedule as it is: that of a command, which has read it, or has it from a file."""
        self._object = stored

    async def schedule(self) -> StoredSchedule | None:
        """Return the schedule; None if it does not exist any more."""
        try:
            found = await self._client.get(self._resource, self._name, VgpuSchedule)
        except NotFoundError:
            self._object = None
            return None
        self._object = found
        schedule, faults = objects.schedule_of(found)
        return StoredSchedule(schedule, objects.status_of(found), found.metadata.resource_version, faults)

    async def read(self, stored: StoredSchedule) -> ClusterReading:
        """Return the workers: nodes first, then their Leases, pods and volumes."""
        found, types = await self._read_nodes(stored.status)
        self._nodes = found
        now_s = self._clock.monotonic_s()
        self._cordoned_s = {
            name: self._cordoned_s.get(name, now_s) for name, node in found.items() if node.spec.unschedulable
        }
        renewals = await _of_each(found, self._renewal)
        nodes = {
            name: worker_of(node, types.get(name, {}), renewals[name], now_s - self._cordoned_s.get(name, now_s))
            for name, node in found.items()
        }
        pods_of = await _of_each(nodes, lambda name: self._client.list(Collection(ALL_PODS, WholePod, on_node=name)))
        placed = {name: tuple(map(node_pod, listed.items)) for name, listed in pods_of.items()}
        attachments = (await self._client.list(Collection(ATTACHMENTS, AttachmentObject))).items if nodes else ()
        attached = {
            name: tuple(volume.metadata.name for volume in attachments if volume.spec.node_name == name)
            for name in nodes
        }
        workers = [found[name] for name, node in nodes.items() if node.phases]
        configs = await self._read_config_nodes()
        # This schedule is as it was read, or as a command has it from a file.
        others = [other for other in await self._others.read() if other.metadata.name != self._name]
        own = (OtherSchedule(self._object.metadata, self._object.spec),) if self._object is not None else ()
        schedules = (*others, *own)
        places = [found.spec.hypervisor.kube_virt for found in schedules]
        self._worker_namespaces = frozenset(place.namespace for place in places if place is not None)
        problems = (*self._shared(schedules, configs), *missing_profiles(nodes.values()))
        problems += await self._coverage.faults(workers)
        config_nodes = {phase: frozenset(found) for phase, found in configs.items()}
        configured = (
            self._configured.of(self._object, stored.schedule, self._clock.now())
            if self._configured is not None and self._object is not None
            else None
        )
        return ClusterReading(nodes, placed, attached, problems, configured, self._claims(schedules), config_nodes)

    def _claims(self, schedules: Iterable[OtherSchedule]) -> Mapping[VmKey, str]:
        """Return the VMs that other schedules have matched, each with its node; one without a Node claims nothing."""
        return {
            VmKey(worker.vm): f"node {worker.node} of schedule {schedule.metadata.name}"
            for schedule in schedules
            if schedule.metadata.name != self._name
            for worker in schedule.status.workers
            if worker.vm and worker.node_uid
        }

    async def record(
        self, stored: StoredSchedule, status: ScheduleStatus, problems: tuple[Reason, ...], advance: Advance
    ) -> None:
        """Write the status for the version that was read, if it has changed; raises ConflictError."""
        before = self._object
        if before is None:
            return
        unknown = self._configured.faults(stored.schedule) if self._configured is not None else None
        desired = objects.written(before, status, problems, advance, self._clock.now(), unknown)
        if desired == before.status:
            return
        patch = _StatusPatch(VersionPrecondition(stored.version), desired)
        self._object = await self._client.patch(
            self._resource, self._name, patch, PatchType.MERGE, VgpuSchedule, part="status"
        )
        known = frozenset(condition.reason for condition in before.status.conditions)
        problems += (*(unknown or ()), *((advance.hypervisor,) if advance.hypervisor is not None else ()))
        drafts = event_drafts(stored.status, status, advance.next_switch, problems, known)
        about = About(API_VERSION, KIND, self._name, before.metadata.uid, before.metadata.namespace)
        found = events_of([(about, draft) for draft in drafts], REPORTER, self._clock.now())
        await events.write(self._client, found)

    async def mark(self, action: MarkNode) -> None:
        """Change the marks of a node of the version that was read; raises ConflictError."""
        taints = self._nodes[action.node].spec.taints
        patch = marks_patch(
            action.version, taints, self._name, cordon=action.cordon, taint=action.taint, labels=action.labels
        )
        await self._client.patch(NODES, action.node, patch, PatchType.MERGE, Node)

    async def evict(self, pod: NodePod) -> None:
        """Evict a pod; raises RefusedError if a budget forbids it."""
        content = _Eviction(_EvictedPod(pod.name, pod.namespace), _Options(_Preconditions(pod.uid)))
        await self._client.create_part(
            pods(pod.namespace), pod.name, "eviction", content, within_s=EVICTION_S, may_send=lambda: True
        )

    async def delete(self, pod: NodePod) -> None:
        """Delete a pod, with its grace period."""
        await self._client.delete(pods(pod.namespace), pod.name, pod.uid)

    async def read_vms(self, waiting: Iterable[ConfiguredNode], known: Iterable[NodeVm]) -> ObservedVms:
        """Return the users of GPUs of the nodes that wait, and the VMs that the status has."""
        configs = self._configured.configs if self._configured is not None else KnownConfigs(unread="not observed")
        return await self._vms.read(waiting, known, configs, self._worker_namespaces)

    async def change_vm(self, change: ChangeVm) -> Answer:
        """Shut down or start a VM, if its state permits that; errors are answers."""
        return await self._vms.change(change)

    async def _read_nodes(self, status: ScheduleStatus) -> tuple[dict[NodeName, Node], Mapping[NodeName, PhaseTypes]]:
        """Return the nodes that a phase selects, with their phases, those of the status, and those with a mark."""
        found, types = dict[NodeName, Node](), dict[NodeName, dict[PhaseName, str | None]]()
        selected = self._object.spec.phases if self._object is not None else ()
        for phase in selected:
            for node in await self._list(selector_text(phase.workers)) if phase.workers is not None else ():
                name = NodeName(node.metadata.name)
                found[name] = node
                types.setdefault(name, {})[PhaseName(phase.name)] = type_of(phase, node.metadata.labels)
        for node in await self._list(f"{CORDONED_BY}={self._name}"):
            found.setdefault(NodeName(node.metadata.name), node)
        for name in {worker.node for worker in status.workers} - found.keys():
            try:
                found[name] = await self._client.get(NODES, name, Node)
            except NotFoundError:
                continue
        return found, types

    async def _read_config_nodes(self) -> Mapping[PhaseName, Mapping[NodeName, Node]]:
        """Return the nodes that phases have vGPU configs for."""
        phases = self._object.config_phases if self._object is not None else ()
        return {
            PhaseName(phase.name): {
                NodeName(node.metadata.name): node for node in await self._list(selector_text(phase.nodes))
            }
            for phase in phases
            if phase.nodes is not None
        }

    def _shared(
        self, schedules: Sequence[OtherSchedule], configs: Mapping[PhaseName, Mapping[NodeName, Node]]
    ) -> tuple[Reason, ...]:
        """Return the workers and the nodes with vGPU configs that another schedule has, too."""
        configured = {name: node for nodes in configs.values() for name, node in nodes.items()}
        workers = shared_workers(_selected(schedules, self._nodes, PhaseSpec.has_worker))
        if workers and self._others.on_shared is not None:
            self._others.on_shared(workers)
        nodes = shared_nodes(_selected(schedules, configured, PhaseSpec.configures), self._name)
        return (*workers.get(self._name, ()), *nodes)

    async def _list(self, selector: str) -> Iterable[Node]:
        return (await self._client.list(Collection(NODES, Node, labelled=selector))).items

    async def _renewal(self, name: NodeName) -> str | None:
        try:
            return (await self._client.get(LEASES, name, LeaseObject)).spec.renew_time
        except NotFoundError:
            return None


async def _of_each(names: Iterable[NodeName], read: Callable[[NodeName], Awaitable[T]]) -> dict[NodeName, T]:
    """Return what is read of each node; several are read at once, since each answer takes some milliseconds."""
    limit = asyncio.Semaphore(READS_AT_ONCE)

    async def limited(name: NodeName) -> T:
        async with limit:
            return await read(name)

    order = tuple(names)
    return dict(zip(order, await asyncio.gather(*map(limited, order)), strict=True))


def _selected(
    schedules: Iterable[OtherSchedule],
    nodes: Mapping[NodeName, Node],
    selects: Callable[[PhaseSpec, Mapping[str, str]], bool],
) -> Mapping[str, frozenset[NodeName]]:
    """Return those of the nodes that a phase of each schedule selects."""
    return {
        schedule.metadata.name: frozenset(
            name
            for name, node in nodes.items()
            if any(selects(phase, node.metadata.labels) for phase in schedule.spec.phases)
        )
        for schedule in schedules
    }


def selector_text(selector: LabelSelector) -> str:
    """Return a selector as a query has it: `vgpu.type=v100-4q-4GB,tier notin (test)`."""
    equal = [f"{key}={value}" for key, value in sorted(selector.match_labels.items())]
    return ",".join([*equal, *(_requirement(requirement) for requirement in selector.match_expressions)])


def _requirement(requirement: Requirement) -> str:
    match requirement.operator:
        case "Exists":
            return requirement.key
        case "DoesNotExist":
            return f"!{requirement.key}"
        case operator:
            return f"{requirement.key} {operator.lower()} ({','.join(requirement.values)})"
