"""A schedule in virtual time: its objects as the controller's rounds ask for them, and the rounds when they are due."""

import asyncio
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta

import msgspec
from msgspec.structs import replace

from gpuvirt.kube.failures import ApiRefusedError, ConflictError, NotFoundError
from gpuvirt.model.reasons import Reason
from gpuvirt.model.workers.connection import DEAD_AFTER_S
from gpuvirt.model.workers.hypervisor import Answer, Hypervisor, Refused
from gpuvirt.model.workers.observed import ChangeVm, NodePod, NodeVm, ObservedVms, ScheduleObservation
from gpuvirt.model.workers.spec import Schedule
from gpuvirt.model.workers.status import ConfiguredNode, ScheduleStatus
from gpuvirt_schedules.controller.rounds import ClusterReading, Rounds, StoredSchedule
from gpuvirt_schedules.controller.vmcalls import VmCalls
from gpuvirt_schedules.decide.nextstep import MarkNode
from gpuvirt_schedules.decide.times import timeline_of
from gpuvirt_schedules.decide.transition import Advance, due_at
from gpuvirt_sim.clock import SimTimer
from gpuvirt_sim.schedules.cluster import ModelCluster, PodObject
from gpuvirt_sim.schedules.hypervisor import Connection, Fault, ModelHypervisor

STEP_S, LONG_STEP_S = 1.0, 5.0
"""The virtual time that passes at once, and while nothing is under way."""


class SimDay(msgspec.Struct):
    """The clock of a simulated cluster, and its API server. The time passes when the controller sleeps."""

    begin: datetime
    spec: Schedule
    cluster: ModelCluster
    hypervisor: ModelHypervisor
    report: Callable[[str], None]
    """Called with what the controller does, as its log has it."""
    now_s: float = 0.0
    status: ScheduleStatus = msgspec.field(default_factory=ScheduleStatus)
    version: int = 1

    def now(self) -> datetime:
        """Return the wall-clock time."""
        return self.begin + timedelta(seconds=self.now_s)

    def monotonic_s(self) -> float:
        """Return the seconds since the begin."""
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[[], None], /) -> SimTimer:
        """Return a timer for code that gives up waiting; no model lets it wait that long."""
        del delay_s
        return SimTimer(call)

    async def sleep(self, seconds: float, /) -> None:
        """Let time pass."""
        await asyncio.sleep(0)  # noqa: TID251  other tasks have their turns
        self.pass_time(max(seconds, 0.1))

    def pass_time(self, seconds: float) -> None:
        """Let time pass for cluster and hypervisor."""
        left_s = seconds
        while left_s > 0.0:
            step_s = min(STEP_S if seconds < 60.0 else LONG_STEP_S, left_s)
            self.now_s += step_s
            left_s -= step_s
            self.hypervisor.pass_time()
            self.cluster.pass_time()

    async def play_until(self, at: datetime) -> None:
        """Run the rounds that are due until a moment, as the leading controller does."""
        while (now := self.now()) < at:
            due = due_at(self.spec, timeline_of(self.spec), self.status, now)
            if due is not None and due <= now:
                calls = VmCalls(self._connect, self, lambda: True, self.now_s - DEAD_AFTER_S)
                await Rounds(self, calls, self).run()
            else:
                until = at if due is None else min(due, at)
                self.pass_time((until - now).total_seconds() or STEP_S)

    async def _connect(self) -> Hypervisor:
        async def before(what: str, /) -> Fault:
            del what
            return Fault.NONE

        return Connection(self.hypervisor, lambda: True, before)

    def observed(self) -> ScheduleObservation:
        """Return what a round would read now."""
        reading = self._reading()
        return ScheduleObservation(reading.nodes, reading.pods, reading.attachments, self.hypervisor.reading())

    async def schedule(self) -> StoredSchedule | None:
        """Return the schedule."""
        return StoredSchedule(self.spec, self.status, str(self.version))

    async def read(self, stored: StoredSchedule) -> ClusterReading:
        """Return the workers."""
        del stored
        return self._reading()

    def _reading(self) -> ClusterReading:
        nodes = {
            name: replace(
                self.cluster.worker_node(name),
                cordoned_for_s=self.now_s - self.cluster.cordoned_s.get(name, self.now_s),
            )
            for name in self.cluster.nodes
        }
        pods = {name: self.cluster.node_pods(name) for name in nodes}
        return ClusterReading(nodes, pods, {name: tuple(self.cluster.attached.get(name, ())) for name in nodes})

    async def record(
        self, stored: StoredSchedule, status: ScheduleStatus, problems: tuple[Reason, ...], advance: Advance
    ) -> None:
        """Write the status."""
        del problems, advance
        if stored.version != str(self.version):
            raise ConflictError("the schedule has changed")
        if status != stored.status:
            self.status, self.version = status, self.version + 1

    async def mark(self, action: MarkNode) -> None:
        """Change the marks of a node."""
        node = self.cluster.nodes[action.node]
        if str(node.version) != action.version:
            raise ConflictError("the node has changed")
        self.cluster.mark(node, self.spec.name, cordon=action.cordon, taint=action.taint, labels=action.labels)
        self.report(action.text)

    async def read_vms(self, waiting: Iterable[ConfiguredNode], known: Iterable[NodeVm]) -> ObservedVms:
        """Return nothing: no node of the day has GPUs of its own."""
        del waiting, known
        return ObservedVms()

    async def change_vm(self, change: ChangeVm) -> Answer:
        """Refuse: no node of the day has GPUs of its own."""
        return Refused("VmNotFound", f"the day has no VM {change.namespace}/{change.name}")

    async def evict(self, pod: NodePod) -> None:
        """Evict a pod."""
        if not self.cluster.evict(self._found(pod)):
            raise ApiRefusedError("the budget allows no eviction")
        self.report(f"evicts pod {pod.where}")

    async def delete(self, pod: NodePod) -> None:
        """Delete a pod against its budget."""
        self.cluster.end(self._found(pod))
        self.report(f"deletes pod {pod.where}")

    def _found(self, pod: NodePod) -> PodObject:
        found = next((found for found in self.cluster.pods if str(found.uid) == pod.uid), None)
        if found is None:
            raise NotFoundError(pod.name)
        return found
