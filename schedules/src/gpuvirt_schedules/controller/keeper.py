"""The schedules of one term as the leader: each has a task while something is due, and costs nothing otherwise.

Schedules outside the controller's namespace are refused: a tenant's would drain any node. One whose status another
controller writes, which runs in its namespace, is left alone.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from functools import partial
from random import Random

import msgspec

from gpuvirt.clock import Clock, Signal
from gpuvirt.controller.nodes.resolve import OwnedGpuNode
from gpuvirt.controller.picture import Picture
from gpuvirt.controller.store import Store
from gpuvirt.controller.writer import logged
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.failures import ApiError
from gpuvirt.kube.kinds.core import ReadNode
from gpuvirt.kube.kinds.parts import Condition
from gpuvirt.kube.kinds.vgpuschedule import ALL_SCHEDULES, READY, VALID, VgpuSchedule, WorkerStatus, vgpu_schedules
from gpuvirt.kube.objects import ObjectKey, key_of
from gpuvirt.kube.reflector import ApiGroups
from gpuvirt.kube.resources import Collection, VersionPrecondition
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, schedules
from gpuvirt.model.workers.hypervisor import Hypervisor
from gpuvirt.model.workers.spec import Schedule
from gpuvirt.model.workers.status import ScheduleStatus
from gpuvirt.plans.knownconfigs import configs_known
from gpuvirt.tasks import keep_going
from gpuvirt_schedules.controller.configurednodes import ConfiguredNodes
from gpuvirt_schedules.controller.nodemarks import AbandonedMarks
from gpuvirt_schedules.controller.objects import (
    conditions_of,
    is_outdated,
    schedule_of,
    schedule_time,
    status_of,
    time_of,
)
from gpuvirt_schedules.controller.rounds import Rounds
from gpuvirt_schedules.controller.scheduleapi import OtherSchedules, ScheduleObjects
from gpuvirt_schedules.controller.schedulemetrics import ScheduleTelemetry
from gpuvirt_schedules.controller.secretconnection import FindSchedule
from gpuvirt_schedules.controller.vmcalls import VmCalls
from gpuvirt_schedules.controller.workerobjects import types_of
from gpuvirt_schedules.decide.faults import faults
from gpuvirt_schedules.decide.times import timeline_of
from gpuvirt_schedules.decide.transition import due_at

log = logging.getLogger(__name__)


PATIENCE_S = 30.0
"""How long a controller of the schedule's own namespace has to write its status first."""


class _Conditions(msgspec.Struct, frozen=True):
    conditions: tuple[Condition, ...]


class _Patch(msgspec.Struct, frozen=True):
    metadata: VersionPrecondition
    status: _Conditions


class RefusedSchedules:
    """The schedules of other namespaces, in one term as the leader."""

    def __init__(self, client: Client, namespace: str, clock: Clock) -> None:
        self._client = client
        self._namespace = namespace
        self._clock = clock
        self._written: dict[ObjectKey, int] = {}
        """The generations that were reported, or are being reported."""
        self._first_s: dict[ObjectKey, float] = {}
        """When a schedule that has to be reported was first seen."""

    def due_in_s(self, stored: VgpuSchedule) -> float | None:
        """Return the seconds until a schedule has to be reported; None if it has not. At 0, `report` is then called."""
        key, generation = key_of(stored), stored.metadata.generation
        is_reported = is_refused(stored) and any(
            condition.type == VALID and condition.observed_generation == generation
            for condition in stored.status.conditions
        )
        if is_followed(stored) or self._written.get(key) == generation or is_reported:
            self._first_s.pop(key, None)
            return None
        now_s = self._clock.monotonic_s()
        left_s = self._first_s.setdefault(key, now_s) + PATIENCE_S - now_s
        if left_s > 0.0:
            return left_s
        self._written[key] = generation
        return 0.0

    async def report(self, stored: VgpuSchedule) -> None:
        """Write the conditions of a schedule; what fails is tried again with the next change."""
        metadata = stored.metadata
        reason = Reason(
            ReasonCode.SCHEDULE_NOT_ALLOWED,
            schedules.SCHEDULE,
            "is not in the controller's namespace, so nothing is done for it",
            (Seen("namespace", metadata.namespace),),
            f"create it in namespace {self._namespace}",
        )
        found = tuple(conditions_of(stored, status_of(stored), (reason,), self._clock.now()))
        patch = _Patch(VersionPrecondition(metadata.resource_version), _Conditions(found))
        try:
            await self._client.patch(
                vgpu_schedules(metadata.namespace), metadata.name, patch, PatchType.MERGE, VgpuSchedule, part="status"
            )
        except ApiError as error:
            log.info("schedule: could not report that it is not allowed: %s", logged(str(error)))
            self._written.pop(key_of(stored), None)


def is_refused(stored: VgpuSchedule) -> bool:
    """Return whether a controller of another namespace has refused a schedule."""
    return any(
        condition.type == VALID and condition.reason == ReasonCode.SCHEDULE_NOT_ALLOWED
        for condition in stored.status.conditions
    )


def lacks_secret(stored: VgpuSchedule) -> bool:
    """Return whether a round has found that the hypervisor's Secret is missing, or lacks keys."""
    return any(
        condition.type == READY and condition.reason == ReasonCode.CREDENTIALS_INCOMPLETE
        for condition in stored.status.conditions
    )


def is_followed(stored: VgpuSchedule) -> bool:
    """Return whether a controller of the schedule's namespace writes its status."""
    return any(condition.type == VALID for condition in stored.status.conditions) and not is_refused(stored)


class ObservedNodes:
    """The nodes as they were observed last, and those that a schedule has not followed yet.

    A schedule looks at its workers between switches when a node was labelled, deleted, or registered again. The nodes
    are those that the controller watches anyway. A heartbeat of a node changes neither its labels nor its uid.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[str, Mapping[str, str]]] = {}
        """The uid and the labels of each node."""
        self._pending: set[str] = set()

    @property
    def is_pending(self) -> bool:
        """Whether a schedule has other workers than its status says, or might have."""
        return bool(self._pending)

    def observe(self, delta: Delta[ReadNode]) -> bool:
        """Record changes of nodes; return whether labels or a uid changed. A delta that names no change may be any."""
        names = {key.name for key in delta.changed | delta.removed} or {
            *self._nodes,
            *(key.name for key in delta.objects),
        }
        found = {key.name: delta.objects[key].metadata for key in delta.objects if key.name in names}
        is_changed = False
        for name in names:
            metadata = found.get(name)
            now = (metadata.uid, metadata.labels) if metadata is not None else None
            if now != self._nodes.get(name):
                is_changed = True  # also of a node that is pending already: it was deleted, and is back
                self._pending.add(name)
            if now is not None:
                self._nodes[name] = now
            else:
                self._nodes.pop(name, None)
        return is_changed

    def moved(self, schedules: Iterable[VgpuSchedule]) -> frozenset[str]:
        """Return the schedules, by name, whose statuses do not follow their nodes yet; those nodes stay pending."""
        moved, waiting = set[str](), set[str]()
        for schedule in schedules:
            if schedule.spec.suspend:
                continue
            workers = {worker.node: worker for worker in schedule.status.workers}
            behind = {name for name in self._pending if self._is_behind(schedule, name, workers.get(name))}
            if behind:
                moved.add(schedule.metadata.name)
                waiting |= behind
        self._pending = waiting
        return frozenset(moved)

    def _is_behind(self, schedule: VgpuSchedule, name: str, worker: WorkerStatus | None) -> bool:
        if name not in self._nodes:
            return worker is not None and bool(worker.node_uid)
        uid, labels = self._nodes[name]
        types = types_of(schedule.spec.phases, labels)
        if worker is None:
            return bool(types)
        if not types:
            was_replaced = worker.node_uid != uid
            return not was_replaced or worker.code != ReasonCode.WORKER_LABELS_LOST
        given = {str(phase): vgpu_type for phase, vgpu_type in types.items() if vgpu_type is not None}
        return (worker.node_uid, {*worker.phases}, worker.types) != (uid, {*types}, given)


Connect = Callable[[FindSchedule], Hypervisor]
"""Returns the connection to a schedule's hypervisor, which opens with the first reading."""

MOST_PAUSE_S = 600.0
"""The longest time between two looks at the wall clock, which may be set."""
LEAST_PAUSE_S = 0.1
REPORTED_AGAIN_S = 1.0
"""How long after a round that wrote the vGPU configs of nodes the next one begins for that."""
ASKED_AGAIN_S = 30.0
"""How often the hypervisor of an announced switch is read, so that its child, which ends when it is idle, stays."""
MOVED_AGAIN_S = 60.0
"""How long after a round that did not follow a change of its workers' nodes the next one begins."""


class EarlyConnection(msgspec.Struct):
    """A connection for a switch that was announced, and the reading that starts its child, or keeps it."""

    calls: VmCalls
    asked_s: float
    reading: "asyncio.Task[object]"

    async def close(self) -> None:
        """End it."""
        self.reading.cancel()
        await self.calls.close()


class ScheduleKeeper:
    """Runs the rounds of each VgpuSchedule of a namespace when they are due, and refuses those of other namespaces."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        clock: Clock,
        connect: Connect,
        may_write: Callable[[], bool],
    ) -> None:
        """`may_write` returns whether this process leads at this moment.

        Writes of `client` are sent with the lease alone (`Client.leading`).
        """
        self._client = client
        self._namespace = namespace
        self._clock = clock
        self._connect = connect
        self._may_write = may_write
        self._since_s = clock.monotonic_s()
        self._changed = Signal()
        self._removed = Signal()
        """Set when the schedules were listed, and when one was deleted."""
        self._store = Store(Collection(ALL_SCHEDULES, VgpuSchedule), self._changed, self._observe_removed)
        self.telemetry = ScheduleTelemetry()
        self._others = OtherSchedules(client, namespace, self._observe_shared)
        self._refusals = RefusedSchedules(client, namespace, clock)
        self._running: set[str] = set()
        self._checked: dict[str, int] = {}
        """The generations of schedules with faults that are in their status."""
        self._membership = ObservedNodes()
        self._configured = ConfiguredNodes()
        self._statuses: dict[str, tuple[VgpuSchedule, ScheduleStatus]] = {}
        """The status of each schedule as it was read last, with the object that it is from."""
        self._reported_s: dict[str, float] = {}
        """When a round was last begun for a schedule because the nodes of its status had changed."""
        self._moved: dict[str, float] = {}
        """The schedules with other workers than their statuses say, and when a round was last begun for it."""
        self._early: dict[str, EarlyConnection] = {}
        """The connections for announced switches, which are opened at the announcement."""
        self._shared: set[str] = set()
        """The schedules that a round of another one has found to share a worker, which their own rounds report."""

    @property
    def schedules(self) -> Iterator[VgpuSchedule]:
        """The schedules of the namespace, as they were last observed."""
        return (stored for stored in self._store.known.values() if stored.metadata.namespace == self._namespace)

    async def run(self, random: Random) -> None:
        """Run schedules until cancelled, which ends each connection to a hypervisor."""
        groups = ApiGroups(self._client, self._clock)
        follow = partial(self._store.follow, self._client, self._clock, random, groups)
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_going("controller: schedules", follow, self._clock))
            unmark = partial(self._unmark, AbandonedMarks(self._client, self._clock))
            group.create_task(keep_going("controller: marks of deleted schedules", unmark, self._clock))
            try:
                while True:
                    pause_s = min(self._begin(group), self._connect_early(group))
                    await self._changed.wait_for(self._clock, pause_s)
            finally:
                early, self._early = self._early, {}
                for found in early.values():
                    await found.close()

    def _begin(self, group: asyncio.TaskGroup) -> float:
        """Start the rounds that are due, and return the seconds until the next are."""
        clock_now = self._clock.now()
        pauses_s = [MOST_PAUSE_S, self._look_for_moved()]
        for stored in self._store.known.values():
            name = stored.metadata.name
            if stored.metadata.namespace != self._namespace:
                wait_s = self._refusals.due_in_s(stored)
                if wait_s is not None and wait_s <= 0.0:
                    group.create_task(self._refusals.report(stored))
                elif wait_s is not None:
                    pauses_s.append(wait_s)
                continue
            if name in self._running:
                continue
            now = schedule_time(stored, clock_now)
            at = self._due_at(stored, now)
            if at is not None and at <= now:
                self._running.add(name)
                group.create_task(self._run(stored, self._early.pop(name, None)))
            elif at is not None:
                pauses_s.append((at - now).total_seconds())
        return max(min(pauses_s), LEAST_PAUSE_S)

    def _connect_early(self, group: asyncio.TaskGroup) -> float:
        """Open the connections of announced switches, and return the seconds until to read their hypervisors again.

        Rounds are begun before this, so that a switch that is due takes over its connection. What is wrong with the
        hypervisor is reported by the switch.
        """
        now, now_s = self._clock.now(), self._clock.monotonic_s()
        announced = {stored.metadata.name for stored in self.schedules if self._is_announced(stored, now)}
        announced -= self._running
        for name in self._early.keys() - announced:
            group.create_task(self._early.pop(name).close())
        for name in announced:
            early = self._early.get(name)
            if early is None or now_s - early.asked_s >= ASKED_AGAIN_S:
                calls = early.calls if early is not None else self._calls(name)
                self._early[name] = EarlyConnection(calls, now_s, group.create_task(calls.read()))
        return ASKED_AGAIN_S if announced else MOST_PAUSE_S

    def _is_announced(self, stored: VgpuSchedule, now: datetime) -> bool:
        """Return whether a switch of workers whose hypervisor has a child is announced, and was not made yet."""
        if stored.status.announced is None or stored.spec.suspend or stored.spec.hypervisor.secret is None:
            return False
        at = time_of(stored.status.next_switch or "")
        return bool(stored.status.workers) and at is not None and at > now

    def observe_nodes(self, delta: Delta[ReadNode]) -> None:
        """Record changes of nodes, which the controller watches: a node that is labelled is a worker at once."""
        self._configured.observe_nodes(delta)
        if self._membership.observe(delta):
            self._moved = dict.fromkeys(self._moved, -math.inf)  # what a schedule did not follow has changed
            self._changed.set()

    def observe_gpu_nodes(self, delta: Delta[OwnedGpuNode]) -> None:
        """Record changes of GpuNodes, which show whether nodes have the vGPU config of a phase."""
        self._configured.observe_gpu_nodes(delta)
        if any(stored.config_phases for stored in self.schedules):
            self._changed.set()

    def observe_picture(self, picture: Picture) -> None:
        """Record the vGPU configs of the cluster: a phase may name a missing one, long before it begins."""
        known = configs_known(picture.policies.values(), self._namespace, picture.texts_of)
        if self._configured.observe_configs(known):
            self._changed.set()

    def _look_for_moved(self) -> float:
        """Find the schedules whose workers have changed, and return the seconds until to look again.

        A schedule that does not follow, since its hypervisor does not answer, gets another round some time later.
        """
        if not self._store.is_observed or not self._membership.is_pending:
            return MOST_PAUSE_S
        moved = self._membership.moved(self.schedules)
        self._moved = {name: self._moved.get(name, -math.inf) for name in moved}
        return MOVED_AGAIN_S if moved else MOST_PAUSE_S

    def _observe_removed(self, delta: Delta[VgpuSchedule]) -> None:
        for key in delta.removed:
            if key.namespace == self._namespace:
                self._configured.forget(key.name)
                self._statuses.pop(key.name, None)
        if delta.removed or not self._store.is_observed:
            self._removed.set()

    def _observe_shared(self, names: Iterable[str]) -> None:
        """Let each schedule that shares a worker report that: one between two switches makes no round by itself."""
        self._shared |= set(names) - self._running
        self._changed.set()

    async def _unmark(self, marks: AbandonedMarks) -> None:
        """Remove the marks of schedules that are deleted, until cancelled.

        A kind that is not installed shows no schedules, which proves nothing: an uninstall removes those marks.
        """
        while True:
            if self._store.is_observed and self._store.installed:
                workers = {
                    stored.metadata.name: frozenset(worker.node for worker in stored.status.workers)
                    for stored in self._store.known.values()
                    if stored.metadata.namespace == self._namespace or is_followed(stored)
                }
                pause_s = await marks.remove(workers)
                if pause_s is not None:
                    await self._clock.sleep(pause_s)
                    continue
            await self._removed.wait()

    def _calls(self, name: str) -> VmCalls:
        async def connect() -> Hypervisor:
            return self._connect(lambda: self._store.get(name, self._namespace))

        return VmCalls(connect, self._clock, self._may_write, self._since_s, self.telemetry)

    def _due_at(self, stored: VgpuSchedule, now: datetime) -> datetime | None:
        schedule, problems = schedule_of(stored)
        if problems or faults(schedule, now):
            is_known = self._checked.get(schedule.name) == schedule.generation
            return None if is_known else now
        if (is_refused(stored) or lacks_secret(stored)) and not schedule.is_suspended:
            return now
        if schedule.name in self._shared and not schedule.is_suspended:
            self._shared.discard(schedule.name)
            return now
        if schedule.name in self._moved:
            now_s = self._clock.monotonic_s()
            if now_s - self._moved[schedule.name] >= MOVED_AGAIN_S:
                self._moved[schedule.name] = now_s
                return now
        due = due_at(schedule, timeline_of(schedule), self._status(stored), now)
        unreported = self._unreported_at(stored, schedule, now)
        return min((at for at in (due, unreported) if at is not None), default=None)

    def _unreported_at(self, stored: VgpuSchedule, schedule: Schedule, now: datetime) -> datetime | None:
        """Return when a round has to write that nodes have another vGPU config, or another reason; None if none has."""
        if schedule.is_suspended or not (stored.status.nodes or stored.config_phases):
            return None
        found = self._configured.of(stored, schedule, now)
        is_reported = found is None or found == self._status(stored).nodes
        if is_reported and not is_outdated(stored, self._configured.faults(schedule)):
            return None
        now_s = self._clock.monotonic_s()
        left_s = self._reported_s.get(schedule.name, -math.inf) + REPORTED_AGAIN_S - now_s
        if left_s > 0.0:
            return now + timedelta(seconds=left_s)
        self._reported_s[schedule.name] = now_s
        return now

    def _status(self, stored: VgpuSchedule) -> ScheduleStatus:
        """Return the status as the model has it; that of a thousand nodes takes some milliseconds to read."""
        name = stored.metadata.name
        known = self._statuses.get(name)
        if known is None or known[0] is not stored:
            known = self._statuses[name] = stored, status_of(stored)
        return known[1]

    async def _run(self, stored: VgpuSchedule, early: EarlyConnection | None) -> None:
        """Make the rounds of one schedule until nothing is under way; what fails in it does not touch the others."""
        name = stored.metadata.name
        api = ScheduleObjects(self._client, self._namespace, name, self._clock, self._configured, self._others)
        calls = early.calls if early is not None else self._calls(name)
        try:
            await keep_going(f"schedule {name}", Rounds(api, calls, self._clock, self.telemetry).run, self._clock)
        finally:
            if api.stored is not None:
                self._store.take(api.stored)
            self._checked[name] = stored.metadata.generation
            self._running.discard(name)
            self._changed.set()
