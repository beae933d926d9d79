"""A world with one schedule: its controllers, which die and lose the lease anywhere, and admins who change things.

Each request of a controller is a point: there time passes, an event comes in, the request or its answer is lost, the
controller dies, or another one leads for some rounds before this one goes on.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.failures import ApiRefusedError, BrokenError, ConflictError, NotFoundError, NotSentError
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.workers.connection import DEAD_AFTER_S
from gpuvirt.model.workers.hypervisor import Action, Answer, Call, Hypervisor, Power, VmKey
from gpuvirt.model.workers.observed import ChangeVm, NodePod, NodeVm, ObservedVms
from gpuvirt.model.workers.spec import Drain, Leave, OnTimeout, Phase, PhaseName, PhaseOverride, Schedule
from gpuvirt.model.workers.status import ConfiguredNode, ScheduleStatus
from gpuvirt_schedules.controller.rounds import ClusterReading, Rounds, StoredSchedule
from gpuvirt_schedules.controller.vmcalls import VmCalls
from gpuvirt_schedules.decide.nextstep import MarkNode
from gpuvirt_schedules.decide.times import timeline_of
from gpuvirt_schedules.decide.transition import Advance
from gpuvirt_schedules.decide.workers import pods_left
from gpuvirt_sim.clock import SimTimer
from tests.schedules.choices import Choices
from tests.schedules.modelcluster import BIND_S, ModelCluster, NodeObject, PodObject
from tests.schedules.modelhypervisor import Connection, Fault, ModelHypervisor, Vm

DAY, NIGHT = PhaseName("day"), PhaseName("night")
BEGINS = ("2026-03-02T12:00", "2026-03-28T12:00", "2026-10-24T12:00")
"""An ordinary day, and the days before summer time begins and ends."""
LINES = ("0 7 * * *", "30 2 * * *")
MINE = "gpus"
SETTLED_S = 4000.0
"""Longer than all deadlines of a transition together."""
EVENTS_WEIGHT = 5


class DiedError(BaseException):
    """The controller has died."""


class ViolationError(AssertionError):
    """An invariant does not hold."""


@dataclass(slots=True)
class Term:
    """One controller that leads, or still thinks so."""

    rounds: Rounds
    leads: bool = True
    read_s: float = -1e9
    """When it last read the cluster."""
    connection: Connection | None = None


class WorldClock:
    """The time of a world: it passes when a controller sleeps, and at points."""

    def __init__(self, world: "World", lag_s: float = 0.0) -> None:
        self._world = world
        self.lag_s = lag_s
        """How far the wall clock of a controller is behind."""

    def now(self) -> datetime:
        """Return the wall-clock time."""
        return self._world.now - timedelta(seconds=self.lag_s)

    def monotonic_s(self) -> float:
        """Return the seconds since the begin."""
        return self._world.now_s

    def call_later(self, delay_s: float, call: object, /) -> SimTimer:
        """No code of the rounds sets timers."""
        raise NotImplementedError

    async def sleep(self, seconds: float, /) -> None:
        """Let time pass."""
        self._world.pass_time(seconds)


class World:
    """The world of one run."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.now_s = 0.0
        self.begin = datetime.fromisoformat(BEGINS[choices.pick([2, 1, 1])]).replace(tzinfo=UTC)
        self.reached_s = 0.0
        """When a transition last ended."""
        self.is_calm = False
        """Whether nothing goes wrong any more."""
        self.log: list[str] = []
        self.depth = 0
        self.calm = [4000, 1500, 400][choices.pick([2, 2, 1])]
        """The weight of a point at which nothing happens."""
        self.calls_fail = self.calm // 40
        """The weight of each way in which a call fails: one in ten does."""
        on_timeout = [OnTimeout.HOLD, OnTimeout.FORCE][choices.pick([3, 1])]
        self.schedule = Schedule(
            MINE,
            "Europe/Berlin",
            self.phases(LINES[choices.pick([2, 1])]),
            drain=Drain(120.0, on_timeout),
            leave=[Leave.SUSPEND, Leave.SHUT_DOWN][choices.pick([3, 1])],
            generation=1,
        )
        self.status = ScheduleStatus()
        self.version = 1
        workers = self.workers()
        vms = {node.vm: Vm(node.vm, node.name, _uuid(node.name), gpu) for node, gpu in workers}
        for number in (1, 2):
            vms[VmKey(f"key-worker-{number}")].power = Power.ON
        foreign = VmKey("key-foreign")  # it has the name of a worker, as in another folder
        vms[foreign] = Vm(foreign, "worker-1", _uuid("foreign"), 0, Power.ON)
        self.hypervisor = ModelHypervisor(vms, self._now_s, self._on_call, self.violate)
        nodes = {node.name: node for node, _ in workers}
        self.phases_of = {node.name: node.phases for node, _ in workers}
        """The phases that nodes have by their labels, while they have these."""
        self.cluster = ModelCluster(nodes, vms, self._now_s)
        for position, phase in enumerate([DAY, DAY, DAY, NIGHT, NIGHT]):
            flags = [frozenset[str](), frozenset({"empty dir"}), frozenset({"bare"})][choices.pick([8, 1, 1])]
            self.cluster.add_pod(phase, flags, volume=position == 2)
        self.pass_time(30.0)
        self.term = self._new_term()

    def phases(self, day: str) -> tuple[Phase, ...]:
        """Return the phases; `day` is the line by which the day begins."""
        return (Phase(DAY, day), Phase(NIGHT, "0 20 * * *"))

    def workers(self) -> list[tuple[NodeObject, int]]:
        """Return the workers' nodes, each with the GiB of the GPU that its VM has."""
        return [(worker(1, {DAY}), 4), (worker(2, {DAY}), 4), (worker(3, {NIGHT}), 16)]

    def _now_s(self) -> float:
        return self.now_s

    @property
    def now(self) -> datetime:
        """The wall-clock time."""
        return self.begin + timedelta(seconds=self.now_s)

    def violate(self, what: str) -> None:
        """Say that an invariant does not hold."""
        raise ViolationError("\n".join([*self.log[-60:], what]))

    def note(self, what: str) -> None:
        """Add a line to what a violation shows."""
        self.log.append(f"{self.now:%d %H:%M:%S} {what}")

    def pass_time(self, seconds: float) -> None:
        """Let time pass: in small steps at the begin and at the end of a long time, at once in between."""
        left_s, passed_s = seconds, 0.0
        while left_s > 0:
            step_s = min(1.0 if seconds < 60 else 5.0, left_s)
            if left_s > 240.0 and passed_s >= 120.0:
                step_s = left_s - 120.0
            self.now_s += step_s
            left_s, passed_s = left_s - step_s, passed_s + step_s
            self.hypervisor.pass_time()
            self.cluster.pass_time()

    def new_clock(self) -> WorldClock:
        """Return the clock of a controller that begins to lead."""
        return WorldClock(self)

    def _new_term(self) -> Term:
        clock = self.new_clock()
        term: list[Term] = []

        async def connect() -> Hypervisor:
            before = Point(self, term[0])
            term[0].connection = Connection(self.hypervisor, lambda: term[0].leads, before)
            return term[0].connection

        calls = VmCalls(connect, clock, lambda: term[0].leads, self.now_s)
        term.append(Term(Rounds(self.new_api(term), calls, clock)))
        return term[0]

    def new_api(self, term: Sequence[Term]) -> "ModelApi":
        """Return the API server as a controller asks it."""
        return ModelApi(self, term)

    def end_term(self, term: Term) -> None:
        """Take the lease from a controller; its connection is dead some seconds later."""
        term.leads = False
        connection = term.connection
        if connection is not None and connection.dead_at_s is None:
            connection.dead_at_s = self.now_s + self.choices.pick([1, 2]) * (DEAD_AFTER_S - 0.1)

    async def point(self, what: str, term: Term) -> Fault:
        """A request: return what goes wrong with it. Raises DiedError."""
        self.note(what)
        self.pass_time(0.25)
        if self.is_calm or not term.leads:
            return Fault.NONE
        fails = self.calls_fail if what.startswith("call") else 3
        match self.choices.pick([self.calm, fails, fails, fails, fails, fails, EVENTS_WEIGHT, 3]):
            case 1:
                self.note("the controller dies")
                raise DiedError
            case 2:
                return Fault.REFUSED
            case 3:
                return Fault.LOST_REQUEST
            case 4:
                return Fault.LOST_ANSWER
            case 5:
                return Fault.LATE
            case 6:
                self.event()
            case 7 if self.depth == 0:
                await self._overtake(term)
        return Fault.NONE

    async def _overtake(self, term: Term) -> None:
        """Another controller leads for some rounds, while this one is stopped."""
        self.note("the controller is stopped, and another leads")
        self.end_term(term)
        self.term = self._new_term()
        self.depth += 1
        for _ in range(1 + self.choices.pick([1] * 12)):
            await self.one_round()
        self.depth -= 1
        self.note("the stopped controller goes on")

    async def one_round(self) -> float | None:
        """Make a round of the leading controller; a dead one is replaced."""
        term = self.term
        try:
            pause_s = await self._round_of(term)
        except DiedError:
            self.end_term(term)
            if self.term is term:
                self.term = self._new_term()
            return 1.0
        if pause_s is not None:
            self.pass_time(max(pause_s, 0.25))
        return pause_s

    async def _round_of(self, term: Term) -> float | None:
        """Make a round; calls that are made together fail together, of which the first one counts."""
        try:
            return await term.rounds.round()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    def event(self) -> None:
        """Let an admin, a pod or the clock do something."""
        names = sorted(self.cluster.nodes)
        node = self.cluster.nodes[names[self.choices.pick([1] * len(names))]]
        vm = self.hypervisor.vms[node.vm]
        match self.choices.pick([3, 3, 2, 2, 2, 2, 2, 2, 2, 1]):
            case 0:
                self.cluster.budget_until_s = self.now_s + [60.0, 900.0][self.choices.pick([1, 1])]
                self.note("a budget allows no eviction")
            case 1:
                self._set_hypervisor()
            case 2:
                self._cordon(node)
            case 3:
                self._set_power(vm)
            case 4:
                self._delete_node(node)
            case 5:
                self._override()
            case 6:
                self._never_end()
            case 7:
                node.phases = frozenset() if node.phases else self.phases_of[node.name]
                node.opened_s = self.now_s
                self.cluster.touch(node)
                self.note(f"{node.name} has the labels of {set(node.phases)}")
            case 8:
                self._suspend(is_suspended=not self.schedule.is_suspended)
            case _:
                self.to_next_switch()

    def to_next_switch(self) -> None:
        """Let time pass to the next switch."""
        self.note("time passes to the next switch")
        now = self.now
        switch = timeline_of(self.schedule).next_switch(now)
        if switch is not None:
            self.pass_time((switch.at - now).total_seconds() + 1.0)

    def _set_hypervisor(self) -> None:
        self.hypervisor.is_reachable = not self.hypervisor.is_reachable
        self.note(f"the hypervisor is {'' if self.hypervisor.is_reachable else 'not '}reachable")

    def _cordon(self, node: NodeObject) -> None:
        if node.unschedulable:
            node.unschedulable = node.by_admin = False
            node.opened_s = self.now_s
        else:
            node.unschedulable, node.by_admin = True, not node.cordoned_by
        self.cluster.touch(node)
        self.note(f"an admin {'cordons' if node.unschedulable else 'uncordons'} {node.name}")

    def _set_power(self, vm: Vm) -> None:
        """An admin suspends or starts a VM; the hypervisor's capacity holds for admins, too."""
        used = sum(other.gpu for other in self.hypervisor.vms.values() if other.has_gpu)
        if vm.becomes is not None or (vm.power is not Power.ON and used + vm.gpu > 16):
            return
        vm.becomes = Power.SUSPENDED if vm.power is Power.ON else Power.ON
        vm.changes_until_s = self.now_s + 20.0
        vm.by_hand_s = self.now_s
        self.note(f"an admin lets {vm.name} become {vm.becomes}")

    def _delete_node(self, node: NodeObject) -> None:
        if node.exists:
            self.cluster.pods = [pod for pod in self.cluster.pods if pod.node != node.name]
            node.exists = False
            self.note(f"{node.name} is deleted")
        else:
            self._register(node, keeps_labels=bool(self.choices.pick([1, 2])))

    def _register(self, node: NodeObject, *, keeps_labels: bool) -> None:
        node.exists, node.uid, node.cordoned_by, node.unschedulable = True, node.uid + 1, "", False
        node.is_announced = node.by_admin = False
        node.opened_s = self.now_s
        if not keeps_labels:
            node.phases, node.labels = frozenset(), {}
        self.cluster.touch(node)
        self.note(f"{node.name} is registered again, {'with' if keeps_labels else 'without'} its labels")

    def _override(self) -> None:
        local = (self.now).replace(tzinfo=None)
        phase = [DAY, NIGHT][self.choices.pick([1, 1])]
        override = PhaseOverride(phase, local, local + timedelta(hours=3))
        overrides = () if self.schedule.overrides else (override,)
        self.schedule = replace(self.schedule, overrides=overrides, generation=self.schedule.generation + 1)
        self.version += 1
        self.note(f"an admin sets overrides: {[override.phase for override in overrides]}")

    def _suspend(self, *, is_suspended: bool) -> None:
        generation = self.schedule.generation + 1
        self.schedule = replace(self.schedule, is_suspended=is_suspended, generation=generation)
        self.version += 1
        self.note(f"an admin sets suspend: {is_suspended}")

    def _never_end(self) -> None:
        for pod in self.cluster.pods[:1]:
            pod.grace_s = 1e12
            self.note(f"{pod.name} never ends")

    def _on_call(self, call: Call, sender: Connection) -> None:
        """Judge a call at the moment at which the hypervisor carries it out."""
        self.note(f"the hypervisor carries out {call.action} {call.vm}")
        node = next((node for node in self.cluster.nodes.values() if node.vm == call.vm), None)
        if node is None:
            self.violate(f"foreign VM: {call}")
            return
        match call.action:
            case Action.START:
                self.judge_start(node, call, sender)
            case Action.SET_VGPU_TYPE:
                self.judge_type(node, call, sender)
            case _:
                self.judge_leave(node, call)

    def judge_type(self, node: NodeObject, call: Call, sender: Connection) -> None:
        """Judge a change of a vGPU type, which no phase of this world asks for."""
        self.violate(f"another type: {node.name} {call} {sender}")

    def judge_start(self, node: NodeObject, call: Call, sender: Connection) -> None:
        """Judge a start."""
        phases = node.phases
        for other in self.cluster.nodes.values():
            vm = self.hypervisor.vms[other.vm]
            is_other = bool(phases) and bool(other.phases) and not phases & other.phases and other.exists
            if is_other and vm.has_gpu and max(vm.by_hand_s, other.opened_s) < sender.last_read_s - 1.0:
                self.violate(f"two phases on one GPU: {call} while {vm.name} has it")

    def judge_leave(self, node: NodeObject, call: Call) -> None:
        """Judge a suspension, or another end of a VM."""
        running = [pod for pod in self.cluster.pods if pod.node == node.name and not pod.flags & {"daemon", "mirror"}]
        if running and node.opened_s < self.term.read_s - BIND_S:
            self.violate(f"suspended with pods: {call}: {[pod.name for pod in running]}")

    def judge_mark(self, node: NodeObject, action: MarkNode) -> None:
        """Judge an uncordon."""
        if action.cordon is not False:
            return
        if node.by_admin:
            self.violate(f"an admin's cordon is taken away from {node.name}")
        vm = self.hypervisor.vms[node.vm]
        is_alive = vm.power is Power.ON and node.renewed_s >= vm.on_since_s
        if node.phases and not is_alive and vm.by_hand_s < self.term.read_s:
            self.violate(f"uncordoned before its kubelet is alive: {node.name}")

    def judge_end(self) -> None:
        """Judge the world after a long calm time."""
        phase = timeline_of(self.schedule).current(self.now)
        assert phase is not None
        for worker in self.status.workers:
            if worker.step.name not in {"AWAY", "SERVING"} and worker.reason is None:
                self.violate(f"no reason: {worker}")
        if self.status.transition is not None:
            self._judge_held()
            return
        if self.status.given_up is not None:
            return
        if self.status.phase != phase.phase:
            self.violate(f"another phase: {self.status}")
        lost = {worker.node for worker in self.status.workers if worker.reason is not None}
        for node in self.cluster.nodes.values():
            if not node.exists or not node.phases or node.name in lost:
                continue
            vm = self.hypervisor.vms[node.vm]
            if phase.phase in node.phases and node.unschedulable and not node.by_admin:
                self.violate(f"left cordoned: {node}")
            if (phase.phase in node.phases) != (vm.power is Power.ON) and vm.by_hand_s < self.reached_s - 60.0:
                self.violate(f"not in its phase: {node} {vm}")

    def _judge_held(self) -> None:
        held = self.status.held
        if not held:
            self.violate(f"stuck without a held worker: {self.status}")
        by_budget = any(found.reason is not None and found.reason.code is ReasonCode.PODS_LEFT for found in held)
        if by_budget and all(pod.grace_s < SETTLED_S for pod in self.cluster.pods):
            self.violate(f"held by a budget that allows evictions: {self.status}")

    async def settle(self) -> None:
        """Let everything work until nothing is under way, or each deadline has passed."""
        self.is_calm, self.hypervisor.is_reachable, self.cluster.budget_until_s = True, True, 0.0
        for node in self.cluster.nodes.values():
            if not node.exists:
                self._register(node, keeps_labels=True)
        if self.schedule.is_suspended:
            self._suspend(is_suspended=False)
        if not self.term.leads:
            self.term = self._new_term()
        calm_since = self.now
        while await self.one_round() is not None:
            transition = self.status.transition  # deadlines count again from the first round of a term
            if transition is not None and (self.now - max(transition.began, calm_since)).total_seconds() > SETTLED_S:
                break
        if self.status.held and self.status.transition is not None:
            return
        self.pass_time(60.0)
        await self.one_round()


def worker(number: int, phases: AbstractSet[PhaseName]) -> NodeObject:
    """Return a worker's node."""
    name = NodeName(f"worker-{number}")
    return NodeObject(name, VmKey(f"key-{name}"), frozenset(phases), renewed_s=-100.0)


def _uuid(name: str) -> str:
    number = sum(ord(letter) * 31**position for position, letter in enumerate(name)) % 16**12
    return f"421c0000-0000-4000-8000-{number:012x}"


class Point:
    """The points of one controller's connection."""

    def __init__(self, world: World, term: Term) -> None:
        self._world = world
        self._term = term

    async def __call__(self, what: str) -> Fault:
        """Return what goes wrong with a request."""
        return await self._world.point(what, self._term)


class ModelApi:
    """The API server, as one controller asks it: a request can be lost, and so can its answer."""

    def __init__(self, world: World, term: Sequence[Term]) -> None:
        self._world = world
        self._terms = term

    @property
    def _term(self) -> Term:
        return self._terms[0]

    async def _read(self, what: str) -> None:
        if await self._world.point(what, self._term) in {Fault.LOST_REQUEST, Fault.LOST_ANSWER}:
            raise BrokenError(f"{what}: the connection broke")

    async def _write(self, what: str) -> bool:
        """Return whether the answer is lost; raises ApiError if the request is."""
        fault = await self._world.point(what, self._term)
        if not self._term.leads:
            raise NotSentError("this process does not lead")
        if fault is Fault.REFUSED:
            raise ApiRefusedError("the API server is overloaded")
        if fault is Fault.LOST_REQUEST:
            raise BrokenError("the connection broke")
        return fault is Fault.LOST_ANSWER

    async def _answer(self, *, is_lost: bool) -> None:
        await self._world.point("answer", self._term)
        if is_lost:
            raise BrokenError("the connection broke")

    async def schedule(self) -> StoredSchedule | None:
        """Return the schedule."""
        await self._read("get schedule")
        return StoredSchedule(self._world.schedule, self._world.status, str(self._world.version))

    async def read(self, stored: StoredSchedule) -> ClusterReading:
        """Return nodes, pods, attachments, in this order."""
        cluster, kept = self._world.cluster, {worker.node for worker in stored.status.workers}
        await self._read("list nodes")
        now_s = self._world.now_s
        names = [
            name
            for name, node in cluster.nodes.items()
            if node.exists and (node.phases or name in kept or node.cordoned_by == MINE)
        ]
        nodes = {
            name: replace(cluster.worker_node(name), cordoned_for_s=now_s - cluster.cordoned_s.get(name, now_s))
            for name in names
        }
        await self._read("list pods")
        self._term.read_s = self._world.now_s
        pods = {name: cluster.node_pods(name) for name in names}
        await self._read("list attachments")
        return ClusterReading(nodes, pods, {name: tuple(cluster.attached.get(name, ())) for name in names})

    async def record(
        self, stored: StoredSchedule, status: ScheduleStatus, problems: tuple[Reason, ...], advance: Advance
    ) -> None:
        """Write the status."""
        del advance
        if problems:
            self._world.violate(f"faults: {problems}")
        if status == stored.status:
            return
        is_lost = await self._write("write status")
        if stored.version != str(self._world.version):
            raise ConflictError("the schedule has changed")
        self._world.status, self._world.version = status, self._world.version + 1
        if status.transition is None:
            self._world.reached_s = self._world.now_s
        await self._answer(is_lost=is_lost)

    async def mark(self, action: MarkNode) -> None:
        """Cordon, uncordon, taint."""
        is_lost = await self._write(action.text)
        node = self._world.cluster.nodes[action.node]
        if not node.exists:
            raise NotFoundError(action.node)
        if str(node.version) != action.version:
            raise ConflictError("the node has changed")
        if self._world.hypervisor.has_others_call(self._term.connection):
            self._world.violate(f"a mark while a call of an older controller is under way: {action}")
        self._world.judge_mark(node, action)
        self._world.cluster.mark(node, MINE, cordon=action.cordon, taint=action.taint, labels=action.labels)
        await self._answer(is_lost=is_lost)

    async def read_vms(self, waiting: Iterable[ConfiguredNode], known: Iterable[NodeVm]) -> ObservedVms:
        """Return nothing: no node has GPUs of its own."""
        del waiting, known
        return ObservedVms()

    async def change_vm(self, change: ChangeVm) -> Answer:
        """Refuse: no node has GPUs of its own."""
        raise NotImplementedError

    async def evict(self, pod: NodePod) -> None:
        """Evict a pod."""
        is_lost = await self._write(f"evict {pod.name}")
        found = self._found(pod)
        if found.node is not None and not self._world.cluster.nodes[found.node].unschedulable:
            cordon_s = self._world.now_s - self._term.read_s
            if cordon_s > 5.0:
                self._world.violate(f"evicted from a node without cordon: {pod}")
        if not pods_left((pod,)) or pod.is_bare or pod.has_empty_dir:
            self._world.violate(f"evicted what kubectl drain leaves: {pod}")
        if not self._world.cluster.evict(found):
            raise ApiRefusedError("the budget allows no eviction")
        await self._answer(is_lost=is_lost)

    async def delete(self, pod: NodePod) -> None:
        """Delete a pod against its budget."""
        is_lost = await self._write(f"delete {pod.name}")
        if self._world.schedule.drain.on_timeout is not OnTimeout.FORCE:
            self._world.violate(f"evicted against a budget: {pod}")
        if pod.is_bare or pod.has_empty_dir:
            self._world.violate(f"deleted what kubectl drain leaves: {pod}")
        self._world.cluster.end(self._found(pod))
        await self._answer(is_lost=is_lost)

    def _found(self, pod: NodePod) -> PodObject:
        found = next((found for found in self._world.cluster.pods if str(found.uid) == pod.uid), None)
        if found is None:
            raise NotFoundError(pod.name)
        return found
