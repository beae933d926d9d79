"""The extender: keeps the index by watches, and answers kube-scheduler's requests while its process leads.

A standby keeps the index, too. A new leader lists all pods again after it got the lease, and answers nothing before:
the watch of a standby may lag behind the bindings of its predecessor. It then changes each unbound pod with units
(`fence`), so that no binding that its predecessor has sent can be made later.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from random import Random
from typing import NamedTuple, TypeVar

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.extender.binding import NOT_LEADING, Binder
from gpuvirt.extender.filtering import (
    HELD,
    MOST_STEPS,
    filtered,
    filtering,
    fits_without_held,
    kept_texts,
    name_upgrades,
    prioritized,
)
from gpuvirt.extender.intervals import INTERVALS, ExtenderIntervals
from gpuvirt.extender.places import BindingWait, Places
from gpuvirt.extender.preempting import MOST_STEPS as MOST_PREEMPTION_STEPS
from gpuvirt.extender.preempting import preempted
from gpuvirt.extender.protocol import (
    BindingResult,
    ErrorResult,
    MalformedRequestError,
    NodeArguments,
    PreemptionResult,
    binding_arguments,
    filter_arguments,
    filter_result,
    preemption_arguments,
    prioritize_arguments,
)
from gpuvirt.extender.writes import CannotBindError
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ApiError
from gpuvirt.kube.reflector import Reflector
from gpuvirt.kube.resources import KubernetesObject
from gpuvirt.loops.histogram import Histogram
from gpuvirt.model.shares.placement import Steps
from gpuvirt.shares.budgets import DISRUPTION_BUDGETS, DisruptionBudgets
from gpuvirt.shares.confinement import RUNTIME_CLASSES, Handlers, RuntimeClass, handlers_of, why_unconfined
from gpuvirt.shares.index import Index
from gpuvirt.shares.objects import SHARING_NODES, SHARING_PODS, SharingNode, SharingPod
from gpuvirt.shares.sharing import Sharing
from gpuvirt.tasks import keep_going

MOST_REFUSED = 64
"""How many refused pods are known; the oldest are forgotten. The binding of one that is woken is an event for all."""


MOST_WAKING_STEPS = 3000
"""The steps by which refused pods are judged after an event. A pod of which it is not certain then that it fits is not
woken: it waits for the next event, as kube-scheduler has it."""


class _Refused(NamedTuple):
    pod: SharingPod
    names: Sequence[NodeName]
    """The nodes that kube-scheduler asked for."""
    at_s: float


class RefusedPods:
    """The pods that filter has just refused, for as long as an event may be late, and those that fit after it.

    kube-scheduler tries a refused pod again at the next event of the cluster, and without one after five minutes. Its
    watch and the extender's are not in step: it may have seen the end of a pod, asked, and been refused by usage that
    did not know of that end. The event is past for it then, so the extender wakes the pod. To answer each refusal with
    an error instead would have kube-scheduler retry without end.

    Source: handleSchedulingFailure and moveAllToActiveOrBackoffQueue of Kubernetes 1.36, pkg/scheduler.
    """

    def __init__(self, index: Index, sharing: Sharing, clock: Clock, late_s: float) -> None:
        """`late_s`: how much later than kube-scheduler's watch this one may be."""
        self._index = index
        self._sharing = sharing
        self._clock = clock
        self._late_s = late_s
        self._refused: dict[PodUid, _Refused] = {}
        """In the order of the refusals."""
        self._fitting: dict[PodUid, SharingPod] = {}
        self._news = asyncio.Event()

    def add(self, asked: NodeArguments) -> None:
        """Remember a refusal."""
        self._refused.pop(asked.pod.uid, None)
        self._refused[asked.pod.uid] = _Refused(asked.pod, asked.names, self._clock.monotonic_s())
        if len(self._refused) > MOST_REFUSED:
            del self._refused[next(iter(self._refused))]

    def drop(self, pod: PodUid) -> None:
        """Forget a pod, since it was placed: a change of it would refuse its Binding."""
        self._refused.pop(pod, None)
        self._fitting.pop(pod, None)

    def nodes_of(self, delta: Delta[SharingPod]) -> frozenset[NodeName]:
        """Return the nodes of pods that are about to change in the index, or to leave it."""
        if not self._refused:
            return frozenset()
        known = (self._index.pod(key.namespace, key.name) for key in (*delta.changed, *delta.removed))
        return frozenset(NodeName(pod.spec.node_name) for pod in known if pod is not None and pod.spec.node_name)

    def observe(self, changed: AbstractSet[NodeName], but_beside: SharingPod | None = None) -> None:
        """Find the pods that were refused a moment ago and fit on a node that has changed.

        `but_beside` is the pod that has made room: another of its PodGroup would only be refused beside it again.
        """
        since_s = self._clock.monotonic_s() - self._late_s
        recent = {uid: refused for uid, refused in self._refused.items() if refused.at_s >= since_s}
        steps, group = Steps(MOST_WAKING_STEPS), but_beside.group if but_beside is not None else None
        found = {
            uid: refused.pod
            for uid, refused in recent.items()
            if (group is None or refused.pod.group != group) and self._fits(refused, changed, steps)
        }
        self._refused = {uid: refused for uid, refused in recent.items() if uid not in found}
        self._fitting |= found
        if found:
            self._news.set()

    async def next_fitting(self) -> SharingPod:
        """Wait for a pod that was refused and fits now, and forget it."""
        while not self._fitting:
            self._news.clear()
            await self._news.wait()
        return self._fitting.pop(next(iter(self._fitting)))

    def _fits(self, refused: _Refused, changed: AbstractSet[NodeName], steps: Steps) -> bool:
        names = [name for name in refused.names if name in changed]
        if not names:
            return False
        index, pod = self._index, refused.pod
        asked, rows = NodeArguments(pod, names), index.rows_for(pod)
        return bool(filtered(asked, rows, self._sharing, index.limiting, steps=steps).node_names)


Result = TypeVar("Result")

PART = 500
"""The steps of a part, about half a millisecond; a part ends with the search that exceeds them."""


class LongWork:
    """Does work on many nodes in short parts, between which the extender does everything else.

    kube-scheduler asks about one pod at a time, but several schedulers, and other clients, may ask at once. So long
    works take turns, and in one turn of the event loop at most one of them does a part. The lease, the watches and the
    requests that need no search never wait for more.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()
        """Given in the order of the requests for it."""

    async def result(self, work: Generator[None, None, Result], steps: Steps) -> Result:
        """Return the result of work that yields wherever it may be interrupted, and counts its `steps`.

        Work of fewer steps than a part is done at once.
        """
        done = _part(work, steps)
        while not done:
            async with self._turn:
                await self._clock.sleep(0)
                done = _part(work, steps)
        return done[0]


def _part(work: Generator[None, None, Result], steps: Steps) -> tuple[Result] | tuple[()]:
    """Do a part of some work; return its result, or an empty tuple while more is to be done."""
    until = steps.left - PART
    while steps.left > until:
        try:
            next(work)
        except StopIteration as done:
            return (done.value,)
    return ()


T = TypeVar("T", bound=KubernetesObject)

log = logging.getLogger(__name__)

FILTER, PRIORITIZE, PREEMPT, BIND = VERBS = ("filter", "prioritize", "preempt", "bind")
OK, REFUSED, MALFORMED, NOT_SERVING, FAILED = "ok", "refused", "malformed", "not-serving", "failed"
"""Results of requests: refused is a pod that fits nowhere, or that was not bound."""
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Requests(msgspec.Struct):
    """The counters of requests."""

    results: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    """By verb and result."""
    seconds: dict[str, Histogram] = msgspec.field(
        default_factory=lambda: {verb: Histogram(BUCKETS_S) for verb in VERBS}
    )


class SchedulerAnswer(msgspec.Struct, frozen=True):
    """An answer to kube-scheduler, as JSON."""

    body: bytes
    result: str


class Extender:
    """The extender of one process, in all its terms."""

    def __init__(
        self,
        client: Client,
        sharing: Sharing,
        clock: Clock,
        random: Random,
        may_write: Callable[[], bool],
        intervals: ExtenderIntervals = INTERVALS,
    ) -> None:
        self.leads = False
        """Whether this process is in a term: it has the lease, or had it a moment ago."""
        self.index = Index(sharing)
        self.budgets = DisruptionBudgets()
        self._intervals = intervals
        self.binder = Binder(client, self.index, sharing, clock, may_write, intervals)
        self._binding_wait = BindingWait(clock, intervals.turn_s)
        self._long_work = LongWork(clock)
        self._places = Places(self.index, sharing, clock, intervals)
        self._refused = RefusedPods(self.index, sharing, clock, intervals.late_s)
        self._sharing = sharing
        self._clock = clock
        self._may_write = may_write
        self._nodes = Reflector(client, SHARING_NODES, clock, random)
        self._pods = Reflector(client, SHARING_PODS, clock, random)
        self._classes = Reflector(client, RUNTIME_CLASSES, clock, random)
        self._handlers: Handlers | None = None
        self._disruptions = Reflector(client, DISRUPTION_BUDGETS, clock, random)
        self._problems: dict[str, ApiError] = {}
        self._term = 0
        self._term_of_list = 0
        """The term in which the pods were listed last."""
        self._new_term = asyncio.Event()

    async def run(self) -> None:
        """Keep the index, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow("nodes", self._nodes, self._observe_nodes))
            group.create_task(keep_going("bindings", self.binder.writes.run, self._clock))
            group.create_task(keep_going("wakes", self._wake_pods, self._clock))
            group.create_task(keep_going("places", self._expire_places, self._clock))
            group.create_task(self._follow("budgets", self._disruptions, self.budgets.observe))
            group.create_task(self._follow("RuntimeClasses", self._classes, self._observe_classes))
            while True:
                self._new_term.clear()
                pods = group.create_task(self._follow("pods", self._pods, self._observer_of(self._term)))
                await self._new_term.wait()
                pods.cancel()
                await asyncio.wait({pods})

    async def lead(self) -> None:
        """Answer requests once the pods are listed again and fenced, until cancelled; then wait for bindings."""
        self.leads = True
        self._places.clear()
        self._term += 1
        self._new_term.set()
        try:
            while not self._is_listed_in_term:
                await self._clock.sleep(self._intervals.look_s)
            await self.binder.begin_term()
            await asyncio.get_running_loop().create_future()
        finally:
            self.leads = False
            self.binder.end_term()
            await self.binder.writes.settled()

    @property
    def is_listed(self) -> bool:
        """Whether nodes, pods and PodDisruptionBudgets have been listed."""
        return self.index.is_ready and self.budgets.is_ready

    @property
    def unlisted(self) -> str | None:
        """Why this process could not take over: it has not listed all objects; None once it has."""
        return None if self.is_listed else self._not_listed()

    @property
    def missing(self) -> str | None:
        """Why no request can be answered; None while all can be."""
        if not self.leads or not self._may_write():
            return NOT_LEADING
        if not self._is_listed_in_term:
            return self._not_listed()
        return None if self.binder.is_fenced else self.binder.fence.missing

    @property
    def _is_listed_in_term(self) -> bool:
        return self.is_listed and self._term_of_list == self._term

    def _not_listed(self) -> str:
        why = "; ".join(str(error) for error in self._problems.values())
        return f"not all nodes, pods and PodDisruptionBudgets are listed yet{f': {why}' if why else ''}"

    async def answer(self, verb: str, body: bytes) -> SchedulerAnswer:
        """Return the answer to a request of one of `VERBS`."""
        await self._wait_for_fence()
        if (missing := self.missing) is not None:
            return failed(missing, NOT_SERVING)
        try:
            return await _ANSWERS[verb](self, body)
        except MalformedRequestError as error:
            log.warning("%s", error)
            return failed(str(error), MALFORMED)
        except CannotBindError as error:
            log.info("%s", error)
            return failed(str(error), REFUSED)

    async def _wait_for_fence(self) -> None:
        until_s = self._clock.monotonic_s() + self._intervals.fenced_s
        while self.leads and self._is_listed_in_term and not self.binder.is_fenced:
            if self._clock.monotonic_s() >= until_s:
                return
            await self._clock.sleep(self._intervals.look_s)

    async def filter(self, body: bytes) -> SchedulerAnswer:
        """Answer filter."""
        asked = filter_arguments(body)
        if (reason := why_unconfined(asked.pod, self._sharing, self._handlers)) is not None:
            found = filter_result(asked, (), {}, dict.fromkeys(asked.names, reason.text))
            return SchedulerAnswer(msgspec.json.encode(found), REFUSED)
        await self._binding_wait.wait(asked.pod.uid)
        index, pod = self.index, asked.pod
        if (why := self.binder.fence.why_withheld(pod.uid)) is not None:
            return failed(f"filter: pod {pod.where} is not placed: {why}", REFUSED)
        steps, sharing, limiting, result = Steps(MOST_STEPS), self._sharing, index.limiting, self._long_work.result
        if (left_s := self._places.failing_for_s(pod)) > 0:
            await self._clock.sleep(left_s + self._intervals.look_s)
        with self._waking():
            self._places.expire(pod)
        rows, kept = index.rows_for(pod), kept_texts(index.nominated_for(pod), index.waiting_beside(pod))
        found = await result(filtering(asked, rows, sharing, limiting, steps, kept), steps)
        name_upgrades(found.failed_and_unresolvable_nodes, index.upgrading)
        with self._waking():
            self._places.take_filter(asked, found)
        if not found.node_names and (found.nodes is None or not found.nodes.items):
            without = index.rows_without(self.binder.writes.held)
            if await result(fits_without_held(asked, without, sharing, limiting, steps), steps):
                # A pod that is refused waits for an event or five minutes, one with an error is tried again soon.
                return failed(f"filter: pod {pod.where}: {HELD}", REFUSED)
            self._refused.add(asked)
            return SchedulerAnswer(msgspec.json.encode(found), REFUSED)
        self._refused.drop(asked.pod.uid)
        self._binding_wait.place(asked.pod.uid)
        return SchedulerAnswer(msgspec.json.encode(found), OK)

    async def prioritize(self, body: bytes) -> SchedulerAnswer:
        """Answer prioritize."""
        asked = prioritize_arguments(body)
        steps = Steps(MOST_STEPS)
        scoring = prioritized(asked, self.index.rows_for(asked.pod), self._sharing, steps)
        scores = await self._long_work.result(scoring, steps)
        with self._waking():
            scores = self._places.take_scores(asked.pod, scores)
        self._binding_wait.place(asked.pod.uid)
        return SchedulerAnswer(msgspec.json.encode(scores), OK)

    async def preempt(self, body: bytes) -> SchedulerAnswer:
        """Answer preempt."""
        asked, steps = preemption_arguments(body), Steps(MOST_PREEMPTION_STEPS)
        until_s = self._clock.monotonic_s() + self._intervals.preempt_s
        searching = preempted(
            asked, self.index, self.budgets, self._sharing, steps, lambda: self._clock.monotonic_s() >= until_s
        )
        victims = await self._long_work.result(searching, steps)
        return SchedulerAnswer(msgspec.json.encode(PreemptionResult(victims)), OK if victims else REFUSED)

    async def bind(self, body: bytes) -> SchedulerAnswer:
        """Answer bind."""
        asked = binding_arguments(body)
        self._binding_wait.bind(asked.uid)
        with self._waking():
            self._places.take_binding(asked.uid, asked.node)
        await self.binder.bind(asked)
        return SchedulerAnswer(msgspec.json.encode(BindingResult()), OK)

    def _observer_of(self, term: int) -> Callable[[Delta[SharingPod]], None]:
        """Return the consumer of a list that begins in a term, and of the changes after it."""

        def observe(delta: Delta[SharingPod]) -> None:
            changed = self._refused.nodes_of(delta)
            with self._waking():
                self.index.observe_pods(delta)
                self._places.observe(delta)
            self._term_of_list = term
            self._refused.observe(changed)

        return observe

    def _observe_nodes(self, delta: Delta[SharingNode]) -> None:
        self.index.observe_nodes(delta)
        self._refused.observe({NodeName(key.name) for key in delta.changed})

    def _observe_classes(self, delta: Delta[RuntimeClass]) -> None:
        self._handlers = handlers_of(delta.objects.values())

    @contextmanager
    def _waking(self) -> Iterator[None]:
        """Wake the pods that were refused a moment ago and fit where the block frees places."""
        before = dict(self.index.granted)
        yield
        after = self.index.granted
        for uid, place in before.items():
            if uid not in after or after[uid].node != place.node:
                self._refused.observe({place.node}, but_beside=place.pod)

    async def _expire_places(self) -> None:
        while True:
            await self._clock.sleep(self._intervals.place_check_s)
            with self._waking():
                self._places.expire()

    async def _wake_pods(self) -> None:
        while True:
            pod = await self._refused.next_fitting()
            if self.missing is None:
                await self.binder.fence.wake(pod)

    async def _follow(self, name: str, reflector: Reflector[T], observe: Callable[[Delta[T]], None]) -> None:
        def report(error: ApiError | None) -> None:
            if error is None:
                self._problems.pop(name, None)
            elif str(self._problems.get(name)) != str(error):
                log.warning("the %s cannot be observed: %s", name, error)
                self._problems[name] = error

        await keep_going(name, lambda: reflector.run(observe, report), self._clock)


_ANSWERS: Mapping[str, Callable[[Extender, bytes], Awaitable[SchedulerAnswer]]] = {
    FILTER: Extender.filter,
    PRIORITIZE: Extender.prioritize,
    PREEMPT: Extender.preempt,
    BIND: Extender.bind,
}


def failed(error: str, result: str) -> SchedulerAnswer:
    """Return the answer to a request that failed."""
    return SchedulerAnswer(msgspec.json.encode(ErrorResult(error)), result)
