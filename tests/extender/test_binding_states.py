"""Bindings over any order of requests, answers, delayed writes, events and fail-overs: no GPU is given twice.

A write that its client has given up stays in the network for as long as the test likes: the API server may make it
under any later leader.
"""

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

from gpuvirt.extender.binding import Binder
from gpuvirt.extender.protocol import BindingArguments
from gpuvirt.extender.writes import CannotBindError
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.failures import ApiError, ConflictError, NotFoundError, NotSentError
from gpuvirt.kube.resources import Resource
from gpuvirt.model.shares.annotations import SHARES_ANNOTATION, pod_shares
from gpuvirt.shares.objects import SharingPod, demand_of_pod
from gpuvirt.shares.sharing import Sharing
from gpuvirt_sim.clock import SimClock
from tests.extender.podapi import Lease
from tests.extender.pods import IndexUnderTest, Object, decoded_pod, node, pod
from tests.thoroughness import examples

D = TypeVar("D")

CAPACITY: Mapping[str, Mapping[str, int]] = {"n": {"a": 1000, "b": 500}, "m": {"c": 1000}}
NAMES = [f"p{number}" for number in range(6)]
UNITS = st.sampled_from(([1000], [500], [500, 500], [300, 100]))
NUMBERS = st.integers(0, 11)
MOST_ROUNDS = 50
"""After so many answers to all requests, each binding is known to be made or not."""


@dataclass(eq=False)
class Write:
    """A binding of a pod, or a change of its annotations, that the API server has received."""

    name: str
    content: Mapping[str, object]
    answer: "asyncio.Future[SharingPod | None]"

    @property
    def is_binding(self) -> bool:
        return "target" in self.content


@dataclass
class Api:
    """The pods of the API server, and all events of its watch."""

    pods: dict[str, Object] = field(default_factory=dict)
    events: list[tuple[str, Object]] = field(default_factory=list)
    received: list[Write] = field(default_factory=list)
    """Writes that are neither made nor answered yet."""
    late: list[Write] = field(default_factory=list)
    """Writes whose client waits no longer, which may still be made."""
    reads_fail: bool = False
    version: int = 0

    def put(self, name: str, content: Object) -> None:
        self.version += 1
        stored = msgspec.convert(msgspec.to_builtins(content), dict[str, dict[str, object]])
        stored["metadata"]["resourceVersion"] = str(self.version)
        self.pods[name] = dict(stored)
        self.events.append(("put", self.pods[name]))

    def remove(self, name: str) -> None:
        self.events.append(("gone", self.pods.pop(name)))

    def make(self, write: Write) -> ApiError | None:
        """Make a write as the API server does: for the pod of its UID and version only, and one binding of each pod."""
        given = msgspec.convert(write.content["metadata"], dict[str, object])
        found = self.pods.get(write.name)
        if found is None:
            return NotFoundError("gone")
        known = decoded_pod(found)
        if (known.uid, known.metadata.resource_version) != (given["uid"], given["resourceVersion"]):
            return ConflictError("another pod, or another version")
        if write.is_binding and known.spec.node_name:
            return ConflictError("bound already")
        changed = msgspec.convert(msgspec.to_builtins(found), dict[str, dict[str, object]])
        annotations = msgspec.convert(changed["metadata"]["annotations"], dict[str, str])
        changed["metadata"]["annotations"] = annotations | msgspec.convert(given["annotations"], dict[str, str])
        if write.is_binding:
            changed["spec"]["nodeName"] = msgspec.convert(write.content["target"], dict[str, object])["name"]
        self.put(write.name, dict(changed))
        return None

    async def write(self, name: str, content: object) -> SharingPod | None:
        """Receive a write, and wait for the answer of the test."""
        write = Write(name, msgspec.to_builtins(content), asyncio.get_running_loop().create_future())
        self.received.append(write)
        try:
            return await write.answer
        except (asyncio.CancelledError, TimeoutError):
            if write in self.received:
                self.received.remove(write)
                self.late.append(write)
            raise


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
        if not may_send():
            raise NotSentError("not sent")
        await self._api.write(name, content)

    @override
    async def patch(
        self, resource: Resource, name: str, patch: object, patch_type: PatchType, shape: type[D], *, part: str = ""
    ) -> D:
        assert (patch_type, part) == (PatchType.MERGE, "status")
        return msgspec.convert(await self._api.write(name, patch), shape)

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
    begins: "asyncio.Task[None] | None" = None
    """The begin of its term."""


class Bindings(RuleBasedStateMachine):
    """kube-scheduler, users, a slow API server, and one replica after another."""

    leader: Leader

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = SimClock()
        self.api = Api()
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
            begins = [leader.begins for leader in (self.leader, *self.former) if leader.begins is not None]
            for task in (*self.tasks, *self.runs, *begins):
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
        self.begin_term(self.leader)

    def begin_term(self, leader: Leader) -> None:
        leader.begins = self.loop.create_task(leader.binder.begin_term())
        self.settle()

    def end_term(self, leader: Leader) -> None:
        """The leader loses its lease, and notices it."""
        leader.lease.held = False
        if leader.begins is not None:
            leader.begins.cancel()
        leader.binder.end_term()
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
    @rule(number=NUMBERS)
    def change(self, number: int) -> None:
        """A user, or kube-scheduler, changes a pod, which gets another version."""
        name = sorted(self.api.pods)[number % len(self.api.pods)]
        self.api.put(name, self.api.pods[name])

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
        if result is not None:
            write.answer.set_exception(result)
        else:
            write.answer.set_result(decoded_pod(self.api.pods[write.name]))
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
        self.settle(seconds)

    @rule(reads_fail=st.booleans())
    def break_or_mend_reads(self, reads_fail: bool) -> None:
        self.api.reads_fail = reads_fail

    @rule(data=st.data(), notices=st.booleans())
    def fail_over(self, data: st.DataObject, notices: bool) -> None:
        """The leader loses its lease; what it has sent is made before another one lists the pods, or any time later.

        The other one may have led before. A process that is stopped notices later that it leads no more.
        """
        self.lose(data, notices=notices)
        if len(self.former) > 1 and data.draw(st.booleans()):
            self.leader = self.former.pop(data.draw(st.integers(0, len(self.former) - 2)))
            self.lead_again()
        else:
            self.start()

    def lose(self, data: st.DataObject, *, notices: bool) -> None:
        if notices:
            self.end_term(self.leader)
        self.leader.lease.held = False
        self.former.append(self.leader)
        for write in tuple(self.api.received):
            if data.draw(st.booleans()):
                self.api.make(write)
            else:
                self.api.late.append(write)
            write.answer.set_exception(ApiError("gone") if data.draw(st.booleans()) else TimeoutError())
        self.api.received = []
        self.settle()

    @rule()
    def lead_again(self) -> None:
        """The leader loses its lease and gets it again at once; what it has sent may still be made."""
        leader = self.leader
        self.end_term(leader)
        leader.lease.held = True
        gone = [content for _, content in self.api.events[leader.reported :] if not self.exists(content)]
        leader.known.gone(*gone)
        leader.known.pods(*self.api.pods.values())
        leader.reported = len(self.api.events)
        self.begin_term(leader)

    def exists(self, content: Object) -> bool:
        known = decoded_pod(content)
        return any(decoded_pod(pod).uid == known.uid for pod in self.api.pods.values())

    @invariant()
    def no_gpu_is_given_twice(self) -> None:
        """By the API server's pods alone, each GPU has what it is worth, and each pod what it requests."""
        used: Counter[tuple[str, str]] = Counter()
        for found in self.bound_pods():
            demand = demand_of_pod(found, Sharing().resource)
            shares = pod_shares(found.metadata.annotations[SHARES_ANNOTATION], demand)
            used.update({(found.spec.node_name, gpu): units for gpu, units in shares.used.items()})
        for (on, gpu), units in used.items():
            assert units <= CAPACITY[on][gpu.removeprefix("GPU-")], f"{on} {gpu}"

    def bound_pods(self) -> list[SharingPod]:
        found = (decoded_pod(content) for content in self.api.pods.values())
        return [bound for bound in found if bound.spec.node_name]

    def come_to_rest(self) -> None:
        """In the end, the usage is that of the pods that exist, and no late binding can be made any more."""
        self.api.reads_fail = False
        for _ in range(MOST_ROUNDS):
            self.report(len(self.api.events))
            self.pass_time(3.0)
            self.answer_all()
            if self.is_at_rest():
                break
        assert self.is_at_rest()
        self.report(len(self.api.events))
        assert free(self.leader.known) == free(self.listed())
        for write in self.api.late:
            assert not write.is_binding or self.api.make(write) is not None

    def is_at_rest(self) -> bool:
        writes, is_fenced = self.leader.binder.writes, self.leader.binder.is_fenced
        return is_fenced and not writes.under_way and not writes.held and all(task.done() for task in self.tasks)


def free(known: IndexUnderTest) -> Mapping[str, object]:
    """Return what each GPU of each node has left."""
    return {name: known.free(name) for name in CAPACITY}


Bindings.TestCase.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)
TestBindings = pytest.mark.filterwarnings("ignore::ResourceWarning")(Bindings.TestCase)
