"""Bindings over any order of requests, answers, delayed writes, events and fail-overs: no GPU is given twice."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typing_extensions import override

from gpuvirt.cluster.access.credentials import Credentials
from gpuvirt.cluster.client import Client
from gpuvirt.cluster.extender.binding import Binder
from gpuvirt.cluster.extender.protocol import BindingArguments
from gpuvirt.cluster.extender.writes import HOLD_S, LOOK_S, Binding, CannotBindError
from gpuvirt.cluster.failures import ApiError, ConflictError, NotFoundError, NotSentError
from gpuvirt.cluster.resources import Resource
from gpuvirt.cluster.shares.objects import SharingPod, demand_of_pod
from gpuvirt.cluster.shares.sharing import Sharing
from gpuvirt.facts.ids import NodeName
from gpuvirt.model.shares.annotations import pod_shares
from gpuvirt.sim.clock import SimClock
from tests.extender.podapi import Lease
from tests.extender.pods import IndexUnderTest, Object, decoded_pod, node, pod
from tests.thoroughness import examples

D = TypeVar("D")

CAPACITY: Mapping[str, Mapping[str, int]] = {"n": {"a": 1000, "b": 500}, "m": {"c": 1000}}
NAMES = [f"p{number}" for number in range(6)]
UNITS = st.sampled_from(([1000], [500], [500, 500], [300, 100]))
NUMBERS = st.integers(0, 11)
LATE_S = 9.0
"""The longest time after which the API server makes a write that its client has given up."""


@dataclass(eq=False)
class Write:
    """A binding that the API server has received."""

    name: str
    content: Binding
    answer: "asyncio.Future[None]"
    at_s: float


@dataclass
class Api:
    """The pods of the API server, and all events of its watch."""

    clock: SimClock
    pods: dict[str, Object] = field(default_factory=dict)
    events: list[tuple[str, Object]] = field(default_factory=list)
    received: list[Write] = field(default_factory=list)
    """Writes that are neither made nor answered yet."""
    late: list[Write] = field(default_factory=list)
    """Writes whose client waits no longer, which may still be made."""
    reads_fail: bool = False

    def put(self, name: str, content: Object) -> None:
        self.pods[name] = content
        self.events.append(("put", content))

    def remove(self, name: str) -> None:
        self.events.append(("gone", self.pods.pop(name)))

    def make(self, write: Write) -> ApiError | None:
        """Make a write as the API server does: once for each pod, and for the pod of its UID only."""
        given = write.content
        found = self.pods.get(write.name)
        if found is None:
            return NotFoundError("gone")
        known = decoded_pod(found)
        if known.uid != given.metadata.uid or known.spec.node_name:
            return ConflictError("another pod, or bound already")
        bound = msgspec.convert(msgspec.to_builtins(found), dict[str, dict[str, object]])
        annotations = msgspec.convert(bound["metadata"]["annotations"], dict[str, str])
        bound["metadata"]["annotations"] = annotations | given.metadata.annotations
        bound["spec"]["nodeName"] = given.target.name
        self.put(write.name, dict(bound))
        return None


class Replica(Client):
    """A replica's client of the API server; the test answers its writes."""

    def __init__(self, api: Api) -> None:
        super().__init__(Credentials("127.0.0.1", 1, "default"))
        self._api = api

    @override
    async def create_part(
        self,
        resource: Resource,
        name: str,
        part: str,
        content: object,
        *,
        within_s: float,
        may_send: Callable[[], bool],
    ) -> None:
        assert isinstance(content, Binding)
        if not may_send():
            raise NotSentError("not sent")
        write = Write(name, content, asyncio.get_running_loop().create_future(), self._api.clock.monotonic_s())
        self._api.received.append(write)
        try:
            await write.answer
        except (asyncio.CancelledError, TimeoutError):
            if write in self._api.received:
                self._api.received.remove(write)
                self._api.late.append(write)
            raise

    @override
    async def get(self, resource: Resource, name: str, shape: type[D]) -> D:
        if self._api.reads_fail:
            raise ApiError("cannot be read")
        if name not in self._api.pods:
            raise NotFoundError(name)
        return msgspec.convert(decoded_pod(self._api.pods[name]), shape)


@dataclass
class Leader:
    """A replica with its lease, its index, and how many events have reached it."""

    lease: Lease
    known: IndexUnderTest
    binder: Binder
    reported: int


class Bindings(RuleBasedStateMachine):
    """kube-scheduler, users, a slow API server, and one replica after another."""

    leader: Leader

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = SimClock()
        self.api = Api(self.clock)
        self.uids = itertools.count()
        self.former: list[Leader] = []
        self.tasks: set[asyncio.Task[None]] = set()
        """Requests."""
        self.runs: list[asyncio.Task[None]] = []

    @override
    def teardown(self) -> None:
        try:
            self.come_to_rest()
        finally:
            for task in (*self.tasks, *self.runs):
                task.cancel()
            self.settle()
            self.loop.close()

    def settle(self, seconds: float = 0.0) -> None:
        self.loop.run_until_complete(self.clock.advance(seconds))

    @initialize(units=UNITS)
    def begin(self, units: list[int]) -> None:
        """Users have created pods, of which a few fill the GPUs."""
        self.start()
        self.create(units, len(NAMES) - 1, reported=True)

    def start(self) -> None:
        """A replica lists all pods, and leads."""
        known, lease = self.listed(), Lease()
        binder = Binder(Replica(self.api), known.index, Sharing(), self.clock, lease.is_held)
        self.leader = Leader(lease, known, binder, len(self.api.events))
        self.runs.append(self.loop.create_task(binder.writes.run()))
        self.settle()

    def listed(self) -> IndexUnderTest:
        known = IndexUnderTest()
        known.nodes(*(node(name, **gpus) for name, gpus in CAPACITY.items()))
        known.pods(*self.api.pods.values())
        return known

    @rule(
        units=UNITS,
        number=st.integers(1, 4),
        reported=st.booleans(),
    )
    def create(self, units: list[int], number: int, reported: bool) -> None:
        """Users create equal pods."""
        for name in [name for name in NAMES if name not in self.api.pods][:number]:
            self.api.put(name, pod(name, *units, uid=f"uid-{next(self.uids)}"))
        if reported:
            self.report(len(self.api.events))

    @precondition(lambda self: self.api.pods)
    @rule(number=NUMBERS)
    def leave(self, number: int) -> None:
        """A pod ends, or is deleted."""
        self.api.remove(sorted(self.api.pods)[number % len(self.api.pods)])

    @precondition(lambda self: self.api.pods)
    @rule(number=NUMBERS, to=st.sampled_from(sorted(CAPACITY)))
    def bind(self, number: int, to: str) -> None:
        """kube-scheduler asks the leader."""
        self.ask(self.leader, sorted(self.api.pods)[number % len(self.api.pods)], to)

    @precondition(lambda self: self.api.pods)
    @rule(to=st.sampled_from(sorted(CAPACITY)))
    def bind_all(self, to: str) -> None:
        for name in sorted(self.api.pods):
            self.ask(self.leader, name, to)

    @precondition(lambda self: self.api.pods and self.former)
    @rule(number=NUMBERS, to=st.sampled_from(sorted(CAPACITY)))
    def bind_by_a_former_leader(self, number: int, to: str) -> None:
        """kube-scheduler still has a connection to a replica that led before."""
        self.ask(self.former[-1], sorted(self.api.pods)[number % len(self.api.pods)], to)

    def ask(self, replica: Leader, name: str, to: str) -> None:
        asked = BindingArguments(name, "default", decoded_pod(self.api.pods[name]).uid, NodeName(to))
        self.tasks.add(self.loop.create_task(self.bound(replica.binder, asked)))
        self.settle()

    @invariant()
    def no_request_fails_otherwise(self) -> None:
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.remove(task)
            task.result()

    async def bound(self, binder: Binder, asked: BindingArguments) -> None:
        with suppress(CannotBindError):
            await binder.bind(asked)
            found = self.api.pods.get(asked.name)
            known = decoded_pod(found) if found is not None else None
            assert known is None or known.uid != asked.uid or known.spec.node_name == asked.node

    @precondition(lambda self: self.api.received)
    @rule(
        number=NUMBERS,
        is_made=st.booleans(),
        error=st.sampled_from((None, ApiError("etcdserver: request timed out"), TimeoutError())),
    )
    def answer(self, number: int, is_made: bool, error: Exception | None) -> None:
        """The API server makes a write or not, and answers truly, by an error, or not at all: then it makes it later.

        An error may also come from a proxy between both, and the write be made later.
        """
        write = self.api.received[number % len(self.api.received)]
        self.api.received.remove(write)
        refused = self.api.make(write) if is_made or error is None else None
        if error is not None and not is_made:
            self.api.late.append(write)
        result = error or refused
        write.answer.set_exception(result) if result is not None else write.answer.set_result(None)
        self.settle()

    @rule()
    def answer_all(self) -> None:
        while self.api.received:
            self.answer(0, is_made=True, error=None)

    @precondition(lambda self: self.api.late)
    @rule(number=NUMBERS)
    def make_late(self, number: int) -> None:
        """The API server makes a write that its client has given up."""
        self.api.make(self.api.late.pop(number % len(self.api.late)))

    @rule(most=st.integers(1, 4))
    def report(self, most: int) -> None:
        """The next events reach the leader."""
        leader = self.leader
        for kind, content in self.api.events[leader.reported : leader.reported + most]:
            (leader.known.pods if kind == "put" else leader.known.gone)(content)
            leader.reported += 1
        self.settle()

    @rule(seconds=st.sampled_from((0.1, 3.0, 8.0)))
    def pass_time(self, seconds: float) -> None:
        self.give_up_late_ones(seconds)
        self.settle(seconds)

    def give_up_late_ones(self, seconds: float) -> None:
        until_s = self.clock.monotonic_s() + seconds - LATE_S
        self.api.late = [write for write in self.api.late if write.at_s >= until_s]

    @rule(reads_fail=st.booleans())
    def break_or_mend_reads(self, reads_fail: bool) -> None:
        self.api.reads_fail = reads_fail

    @rule(data=st.data())
    def fail_over(self, data: st.DataObject) -> None:
        """The leader loses its lease; before another one lists the pods, what it has sent is made or given up."""
        self.leader.lease.held = False
        self.former.append(self.leader)
        for write in (*self.api.received, *self.api.late):
            if data.draw(st.booleans()):
                self.api.make(write)
        for write in self.api.received:
            write.answer.set_exception(ApiError("the connection is gone"))
        self.api.received, self.api.late = [], []
        self.settle()
        self.start()

    @rule()
    def lead_again(self) -> None:
        """The leader loses its lease and gets it again at once; what it has sent may still be made."""
        leader = self.leader
        leader.lease.held = False
        self.settle()
        leader.lease.held = True
        leader.binder.begin_term()
        gone = [content for _, content in self.api.events[leader.reported :] if not self.exists(content)]
        leader.known.gone(*gone)
        leader.known.pods(*self.api.pods.values())
        leader.reported = len(self.api.events)

    def exists(self, content: Object) -> bool:
        known = decoded_pod(content)
        return any(decoded_pod(one).uid == known.uid for one in self.api.pods.values())

    @invariant()
    def no_gpu_is_given_twice(self) -> None:
        """By the API server's pods alone, each GPU has what it is worth, and each pod what it requests."""
        used: Counter[tuple[str, str]] = Counter()
        for found in self.bound_pods():
            demand = demand_of_pod(found, Sharing().resource)
            shares = pod_shares(found.metadata.annotations.shares, demand)
            used.update({(found.spec.node_name, gpu): units for gpu, units in shares.used.items()})
        for (on, gpu), units in used.items():
            assert units <= CAPACITY[on][gpu.removeprefix("GPU-")], f"{on} {gpu}"

    def bound_pods(self) -> list[SharingPod]:
        found = (decoded_pod(content) for content in self.api.pods.values())
        return [one for one in found if one.spec.node_name]

    def come_to_rest(self) -> None:
        """In the end, the books of the leader are those of the pods that exist: no reservation is left."""
        while any(not task.done() for task in self.tasks):
            self.report(len(self.api.events))
            self.pass_time(3.0)
            self.answer_all()
        self.report(len(self.api.events))
        self.api.reads_fail = False
        self.pass_time(HOLD_S + LOOK_S)
        assert free(self.leader.known) == free(self.listed())


def free(known: IndexUnderTest) -> Mapping[str, object]:
    """Return what each GPU of each node has left."""
    return {name: known.free(name) for name in CAPACITY}


Bindings.TestCase.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)
TestBindings = pytest.mark.filterwarnings("ignore::ResourceWarning")(Bindings.TestCase)
