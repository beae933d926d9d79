"""The rounds of one schedule: read, decide, record, act. A round can end anywhere, and the next one goes on."""

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Protocol

import msgspec
from msgspec.structs import replace

from gpuvirt.clock import Clock
from gpuvirt.controller.writer import logged
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.kube.failures import ApiError, ApiRefusedError, ConflictError, ForbiddenError, NotFoundError
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.hypervisor import Abilities, Accepted, Action, Answer, VmKey, VmsReading, VmsUnknown
from gpuvirt.model.workers.observed import (
    ChangeVm,
    LastCall,
    NodePod,
    NodeVm,
    ObservedVms,
    ScheduleObservation,
    WorkerNode,
)
from gpuvirt.model.workers.spec import PhaseName, Schedule, VmPolicy, phase_named
from gpuvirt.model.workers.status import ConfiguredNode, ScheduleStatus, not_before_switch
from gpuvirt_schedules.controller.schedulemetrics import ScheduleTelemetry
from gpuvirt_schedules.controller.vmcalls import VmCalls
from gpuvirt_schedules.decide.faults import faults
from gpuvirt_schedules.decide.history import PodsTaken, with_history
from gpuvirt_schedules.decide.nextstep import HELD_AGAIN_S, CallVm, DeletePod, EvictPod, MarkNode, ScheduleAction
from gpuvirt_schedules.decide.times import timeline_of
from gpuvirt_schedules.decide.transition import Advance, advance
from gpuvirt_schedules.decide.vmstops import is_in_use, next_vms, round_s

log = logging.getLogger(__name__)

EVICT_AGAIN_S = 5.0
"""How long after a budget has refused an eviction it is tried again, as kubectl drain does."""
FAULTY_ROUND_S = 60.0
"""How long after a round that found a fault of a worker the next one begins."""
NO_HYPERVISOR = VmsUnknown("", "the schedule has no workers, and no hypervisor")
AGAIN_S = 5.0
"""How long after a round that failed the next one begins."""


class StoredSchedule(msgspec.Struct, frozen=True):
    """A schedule as the API server has it."""

    schedule: Schedule
    status: ScheduleStatus
    version: str
    faults: tuple[Reason, ...] = ()
    """The faults of the texts in its spec."""


class ClusterReading(msgspec.Struct, frozen=True):
    """Workers' nodes, pods and volumes, read in this order."""

    nodes: Mapping[NodeName, WorkerNode] = msgspec.field(default_factory=dict)
    pods: Mapping[NodeName, tuple[NodePod, ...]] = msgspec.field(default_factory=dict)
    attachments: Mapping[NodeName, tuple[str, ...]] = msgspec.field(default_factory=dict)
    faults: tuple[Reason, ...] = ()
    """Workers and nodes of another schedule, workers without a profile in one of their phases, or whose VMs something
    may delete."""
    configured: tuple[ConfiguredNode, ...] | None = None
    """The nodes that have a vGPU config by the current phase; None if that was not observed."""
    claims: Mapping[VmKey, str] = msgspec.field(default_factory=dict)
    """The VMs that other schedules have matched with Nodes, each with that node and schedule, in words."""
    config_nodes: Mapping[PhaseName, frozenset[NodeName]] = msgspec.field(default_factory=dict)
    """The nodes that phases have vGPU configs for."""


class ScheduleApi(Protocol):
    """The API server, as the rounds of one schedule need it. Each method raises ApiError."""

    async def schedule(self) -> StoredSchedule | None:
        """Return the schedule; None if it does not exist any more."""
        ...

    async def read(self, stored: StoredSchedule) -> ClusterReading:
        """Return the workers: nodes that a phase selects, that the status names, or that the schedule has marked."""
        ...

    async def record(
        self, stored: StoredSchedule, status: ScheduleStatus, problems: tuple[Reason, ...], advance: Advance
    ) -> None:
        """Write the status of the version that was read; raises ConflictError if the schedule has changed since."""
        ...

    async def mark(self, action: MarkNode) -> None:
        """Change the marks of a node of the version that was read."""
        ...

    async def read_vms(self, waiting: Iterable[ConfiguredNode], known: Iterable[NodeVm]) -> ObservedVms:
        """Return the users of GPUs of the nodes that wait, and the VMs that the status has."""
        ...

    async def change_vm(self, change: ChangeVm) -> Answer:
        """Shut down or start a VM, if its state permits that; errors are answers."""
        ...

    async def evict(self, pod: NodePod) -> None:
        """Evict a pod; raises RefusedError if a budget forbids it."""
        ...

    async def delete(self, pod: NodePod) -> None:
        """Delete a pod, with its grace period."""
        ...


class Rounds:
    """The rounds of one schedule in one term as the leader."""

    def __init__(
        self, api: ScheduleApi, vms: VmCalls, clock: Clock, telemetry: ScheduleTelemetry | None = None
    ) -> None:
        self.latest: Advance | None = None
        """The decision of the last whole round."""
        self._api = api
        self._vms = vms
        self._clock = clock
        self._telemetry = telemetry if telemetry is not None else ScheduleTelemetry()
        self._first_s = math.inf
        """When the first round of which the status was written began."""
        self._lags = False
        """Whether the clock was behind the last switch in the last round."""
        self._refused_s: dict[PodUid, float] = {}
        """When a budget last refused the eviction of a pod."""
        self._forbidden: dict[NodeName, str] = {}
        """The nodes for which the API server has forbidden the last attempt to change or drain them, with its words."""
        self._tried_s: dict[NodeName, float] = {}
        """When the actions of each held worker were last taken."""
        self._checked: tuple[float, frozenset[VmKey], Mapping[VmKey, Abilities] | VmsUnknown] = (
            -math.inf,
            frozenset(),
            {},
        )
        """When the hypervisor was last asked what can be done with which VMs, and its answer."""
        self._taken = PodsTaken()
        """The pods that were taken since the status was last written."""
        self._changed: dict[VmKey, tuple[Action, Answer, float]] = {}
        """The latest call for each VM on a node with GPUs of its own, and when it was made."""

    async def run(self) -> None:
        """Make rounds until nothing is under way."""
        try:
            while (pause_s := await self.round()) is not None:
                await self._clock.sleep(pause_s)
        finally:
            await self._vms.close()

    async def round(self) -> float | None:
        """Make one round, and return the time until the next; None if nothing is under way.

        With workers, there is none before the connections of an earlier leader are dead: a late suspension would meet
        new pods.
        """
        try:
            return await self._round()
        except ConflictError:
            return 0.0  # the schedule has changed: it is read again
        except ForbiddenError as error:
            return await self._report(error)
        except ApiError as error:
            log.warning("schedule: %s; the next round follows", logged(str(error)))
            return max(AGAIN_S, error.retry_after_s)

    async def _report(self, missing: ForbiddenError) -> float:
        """Write into the status which right is missing for a round, and return the time until the next one."""
        log.warning("schedule: %s; the next round follows", logged(str(missing)))
        problem = reasons.right_missing(reasons.SCHEDULE, logged(str(missing)))
        try:
            if (stored := await self._api.schedule()) is not None:
                await self._api.record(stored, stored.status, (problem,), Advance(stored.status))
        except ApiError as error:
            log.warning("schedule: could not report it: %s", logged(str(error)))
        return FAULTY_ROUND_S

    async def _round(self) -> float | None:
        stored = await self._api.schedule()
        if stored is None or stored.schedule.is_suspended:
            return None
        if stored.schedule.has_workers and (wait_s := self._vms.alone_in_s) > 0.0:
            return wait_s
        now, now_s = self._time_now(stored), self._clock.monotonic_s()
        first_s = min(self._first_s, now_s)
        since = now - timedelta(seconds=math.ceil(now_s - first_s))  # at or before `now` of the first round
        problems = (*stored.faults, *faults(stored.schedule, now))
        if problems:
            await self._api.record(stored, stored.status, problems, Advance(stored.status))
            return None
        reading = await self._api.read(stored)
        if reading.faults:
            await self._api.record(stored, stored.status, reading.faults, Advance(stored.status))
            return FAULTY_ROUND_S
        vms = await self._vms.read() if stored.schedule.has_workers else NO_HYPERVISOR
        observed = ScheduleObservation(
            reading.nodes,
            reading.pods,
            reading.attachments,
            vms,
            self._vms.latest,
            since,
            forbidden=self._forbidden,
            claims=reading.claims,
        )
        decided = await self._decide(stored, observed, now)
        if reading.configured is not None:
            decided = replace(decided, status=replace(decided.status, nodes=reading.configured))
        decided = _with_secret(decided, vms)
        decided, changes = await self._with_vms(stored, decided, now, since, is_known=reading.configured is not None)
        timeline = timeline_of(stored.schedule)
        status = with_history(stored.schedule, timeline, stored.status, decided.status, self._taken, now)
        decided = replace(decided, status=status)
        await self._api.record(stored, status, (), decided)
        self._taken = PodsTaken()
        self._first_s = first_s
        self.latest = decided
        self._telemetry.observe_round(stored.status, decided.status, now)
        await self._take(self._due(decided))
        for change in changes:
            answer = await self._api.change_vm(change)
            self._changed[change.call.vm] = change.call.action, answer, self._clock.monotonic_s()
            self._telemetry.observe_call(change.call, answer)
            words = "schedule: %s" if isinstance(answer, Accepted) else "schedule: could not: %s"
            log.info(words, logged(change.text))
        return decided.pause_s

    async def _decide(self, stored: StoredSchedule, observed: ScheduleObservation, now: datetime) -> Advance:
        """Return the decision of a round; where it depends on what VMs can do, the hypervisor is asked for that."""
        timeline = timeline_of(stored.schedule)
        decided = advance(stored.schedule, timeline, stored.status, observed, now)
        if not decided.unchecked:
            return decided
        checked_s, keys, _ = self._checked
        if keys != decided.unchecked or self._clock.monotonic_s() - checked_s >= HELD_AGAIN_S:
            self._checked = self._clock.monotonic_s(), decided.unchecked, await self._vms.check(decided.unchecked)
        observed = replace(observed, abilities=self._checked[2])
        return advance(stored.schedule, timeline, stored.status, observed, now)

    def _time_now(self, stored: StoredSchedule) -> datetime:
        """Return the time of the round in whole seconds, which is not before the last switch."""
        clock_now = self._clock.now().replace(microsecond=0)
        now = not_before_switch(clock_now, stored.status.last_switch)
        if now > clock_now and not self._lags:
            name, lag_s = stored.schedule.name, (now - clock_now).total_seconds()
            log.warning("schedule %s: the clock of this host is %g s behind the last switch: not undone", name, lag_s)
        self._lags = now > clock_now
        return now

    async def _with_vms(
        self, stored: StoredSchedule, decided: Advance, now: datetime, rounds_since: datetime, *, is_known: bool
    ) -> tuple[Advance, tuple[ChangeVm, ...]]:
        """Return the decision with the VMs on nodes with GPUs of their own, and what follows for these.

        `is_known` says whether what the nodes wait for was observed in this round.
        """
        schedule, before = stored.schedule, stored.status.vms
        current = timeline_of(schedule).current(now)
        phase = phase_named(schedule, current.phase) if current is not None else None
        if phase is None or (phase.vms is VmPolicy.WAIT and not before):
            return decided, ()
        stops = is_known and phase.vms is VmPolicy.STOP
        waiting = [node for node in decided.status.nodes if stops and is_in_use(node.reason)]
        seen = replace(await self._observed_vms(waiting, before), rounds_since=rounds_since)
        found = next_vms(schedule, phase, before, seen, now)
        status = replace(decided.status, vms=found.vms)
        pauses_s = [pause for pause in (decided.pause_s, round_s(schedule, phase, status)) if pause is not None]
        return replace(decided, status=status, pause_s=min(pauses_s, default=None)), found.actions

    async def _observed_vms(self, waiting: list[ConfiguredNode], before: tuple[NodeVm, ...]) -> ObservedVms:
        if not waiting and not before:
            return ObservedVms()
        now_s, seen = self._clock.monotonic_s(), await self._api.read_vms(waiting, before)
        calls = {key: LastCall(action, answer, now_s - at_s) for key, (action, answer, at_s) in self._changed.items()}
        return replace(seen, calls=calls)

    def _due(self, decided: Advance) -> tuple[ScheduleAction, ...]:
        """Return the actions without those of held workers for which they were just taken."""
        now_s, held = self._clock.monotonic_s(), {worker.node for worker in decided.status.held}
        recent = {node for node in held if now_s - self._tried_s.get(node, -math.inf) < HELD_AGAIN_S}
        self._tried_s = {node: self._tried_s[node] if node in recent else now_s for node in held}
        return tuple(action for action in decided.actions if action.node not in recent)

    async def _take(self, actions: tuple[ScheduleAction, ...]) -> None:
        """Take the actions of a round; calls for several VMs together, since each is watched for some seconds."""
        changes = [action for action in actions if not isinstance(action, CallVm)]
        tried = {action.node for action in changes}
        self._forbidden = {node: problem for node, problem in self._forbidden.items() if node not in tried}
        for change in changes:
            await self._act(change)
        async with asyncio.TaskGroup() as group:
            for action in actions:
                if isinstance(action, CallVm):
                    group.create_task(self._act(action))

    async def _act(self, action: ScheduleAction) -> None:
        """Take one action. What fails is decided again in the next round."""
        try:
            match action:
                case CallVm(call=call):
                    answer = await self._vms.call(call)
                    if not isinstance(answer, Accepted):
                        return
                case MarkNode():
                    await self._api.mark(action)
                case EvictPod(pod=pod):
                    if not await self._evict(pod):
                        return
                    self._taken = replace(self._taken, evicted=self._taken.evicted + 1)
                case DeletePod(pod=pod):
                    await self._api.delete(pod)
                    self._taken = replace(self._taken, deleted=self._taken.deleted + 1)
            log.info("schedule: %s", logged(action.text))
        except NotFoundError:
            pass  # the pod has ended, or the node is gone
        except ApiError as error:
            if isinstance(error, ForbiddenError):
                self._forbidden[action.node] = logged(str(error))
            log.info("schedule: could not: %s: %s", logged(action.text), logged(str(error)))

    async def _evict(self, pod: NodePod) -> bool:
        now_s = self._clock.monotonic_s()
        if now_s - self._refused_s.get(pod.uid, -EVICT_AGAIN_S) < EVICT_AGAIN_S:
            return False
        try:
            await self._api.evict(pod)
        except ApiRefusedError:
            self._refused_s[pod.uid] = now_s
            return False
        return True


def _with_secret(decided: Advance, vms: VmsReading) -> Advance:
    """Return the decision with the reason of a Secret that is missing, or lacks keys, and another round for it.

    Workers that wait have the reason themselves; without such workers, nothing would show it before the next switch.
    """
    if not isinstance(vms, VmsUnknown) or vms.code != ReasonCode.CREDENTIALS_INCOMPLETE:
        return decided
    if decided.status.transition is not None:
        return decided
    pause_s = min(FAULTY_ROUND_S, decided.pause_s or FAULTY_ROUND_S)
    return replace(decided, hypervisor=reasons.hypervisor_unknown(vms.code, vms.text), pause_s=pause_s)
