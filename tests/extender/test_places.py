"""A pod that kube-scheduler has placed keeps its place until it is bound, whatever it waits for, and no longer."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.controller.scheduler import WEIGHT
from gpuvirt.extender.filtering import MOST_STEPS, filtered, prioritized
from gpuvirt.extender.intervals import ExtenderIntervals
from gpuvirt.extender.places import Places
from gpuvirt.extender.process import ExtenderProcess
from gpuvirt.extender.protocol import HostPriority, NodeArguments, PreemptionArguments, Victims
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.shares.placement import Steps, finished
from gpuvirt.shares.objects import demand_of_pod
from gpuvirt.shares.sharing import Sharing
from gpuvirt_sim.clock import SimClock
from tests.extender.httpclient import ask as http_ask
from tests.extender.httpclient import request
from tests.extender.podapi import PodApi
from tests.extender.pods import (
    IndexUnderTest,
    N,
    Object,
    budgets_of,
    decoded_delta,
    decoded_pod,
    index_of,
    node,
    pod,
    preempted_on,
)
from tests.extender.processes import bind, is_ready, post, running, until

PLACE_S, RETRIED_S = 60.0, 10.0
UNITS = [100, 300, 600, 700, 1000]


@dataclass
class Played:
    """kube-scheduler and the API server, as the index of one extender knows them."""

    known: IndexUnderTest
    clock: SimClock
    places: Places

    @property
    def nodes(self) -> Mapping[PodUid, NodeName]:
        """The nodes of the places."""
        return {uid: place.node for uid, place in self.known.index.granted.items()}

    def filter(self, content: Object, *names: str) -> Sequence[str]:
        """Ask for nodes, and return those that fit."""
        asked = NodeArguments(decoded_pod(content), [NodeName(name) for name in names])
        answer = filtered(asked, self.known.index.rows_for(asked.pod), Sharing(), ())
        self.places.take_filter(asked, answer)
        return list(answer.node_names or ())

    def send_binding(self, content: Object, name: str) -> bool:
        """Reserve the units of a binding as the extender does; return False where the node has no room."""
        asked, index, to = decoded_pod(content), self.known.index, NodeName(name)
        place, usage = index.revoke(asked.uid), index.usage_for(asked, to)
        demand = demand_of_pod(asked, Sharing().resource)
        chosen = place.chosen if place is not None and place.node == to else usage and usage.place(demand)
        if chosen:
            index.reserve(asked, to, chosen)
        return bool(chosen)

    def report(self, *contents: Object) -> None:
        """Report pods that were added or changed."""
        self.known.pods(*contents)
        self.places.observe(decoded_delta(*contents))


@pytest.fixture
def played() -> Played:
    return played_on(node("n", a=1000, b=1000), node("m", c=1000, d=1000))


def played_on(*nodes: Object) -> Played:
    known, clock = index_of(nodes), SimClock()
    return Played(
        known, clock, Places(known.index, Sharing(), clock, ExtenderIntervals(place_s=PLACE_S, retried_s=RETRIED_S))
    )


def unschedulable(content: Object, message: str = "rejected in Permit") -> Object:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return with_status(content, conditions=[{"type": "Ready", "status": "False"}, condition])


def with_status(content: Object, **status: object) -> Object:
    known = content["status"]
    assert isinstance(known, dict)
    return {**content, "status": {**known, **status}}


def deleted(content: Object) -> Object:
    metadata = content["metadata"]
    assert isinstance(metadata, dict)
    return {**content, "metadata": {**metadata, "deletionTimestamp": "2030-01-01T00:00:00Z"}}


A = pod("a", 700)


def test_a_pod_with_one_node_has_its_place_from_filter_on(played: Played) -> None:
    assert played.filter(A, "n") == ["n"]
    assert played.known.free("n") == {"a": 300, "b": 1000}
    assert played.filter(A, "n") == ["n"], "its own place is free for the pod itself"
    assert played.known.free("n") == {"a": 300, "b": 1000}
    assert played.filter(pod("b", 700), "n") == ["n"]
    assert played.filter(pod("c", 700), "n") == []


def test_a_pod_with_several_nodes_has_its_place_from_prioritize_on(played: Played) -> None:
    assert played.filter(A, "n", "m") == ["n", "m"]
    assert played.nodes == {}
    scores = [HostPriority("n", 0), HostPriority("m", 10)]
    played.places.take_scores(decoded_pod(A), scores)
    assert played.nodes == {"uid-a": "m"}
    played.places.take_scores(decoded_pod(A), [HostPriority("n", 0)])
    assert played.nodes == {}


def test_a_place_counts_for_pods_of_any_priority(played: Played) -> None:
    """As kube-scheduler counts the pods that it has assumed."""
    played.filter(pod("a", 1000), "n")
    played.filter(pod("b", 1000), "n")
    assert played.filter(pod("top", 100, priority=9), "n") == []
    assert played.filter(pod("top", 100, priority=9), "n", "m") == ["m"]


def test_a_pod_that_waits_can_be_a_victim(played: Played) -> None:
    played.filter(pod("a", 1000), "n")
    played.filter(pod("b", 1000, priority=5), "n")
    asked = PreemptionArguments(decoded_pod(pod("top", 700, priority=9)), {N: Victims([PodUid("uid-a")])})
    victims = preempted_on(asked, played.known, budgets_of())["n"]
    assert [victim.uid for victim in victims.pods] == ["uid-a"]
    equal = PreemptionArguments(decoded_pod(pod("equal", 700)), {N: Victims([PodUid("uid-a")])})
    assert preempted_on(equal, played.known, budgets_of()) == {}, "none of an equal priority is a victim"


@pytest.mark.parametrize(
    "news",
    [
        unschedulable(A),
        deleted(A),
        pod("a", 700, on="m", gpus=[{"c": 700}]),
        pod("a", 700, uid="of-another-pod"),
    ],
    ids=["unschedulable", "deleted", "bound elsewhere", "replaced"],
)
def test_a_place_is_given_up_by_the_news_about_its_pod(played: Played, news: Object) -> None:
    played.report(A)
    played.filter(A, "n")
    played.report(A)
    assert played.nodes == {"uid-a": "n"}
    played.report(news)
    assert played.nodes == {}
    assert played.known.free("n") == {"a": 1000, "b": 1000}


def test_a_place_is_given_up_where_the_pod_is_gone_or_fits_no_more(played: Played) -> None:
    played.report(A)
    played.filter(A, "n")
    played.known.gone(A)
    assert played.nodes == {}
    played.filter(A, "n")
    assert played.filter(A, "elsewhere") == []
    assert played.nodes == {}


def test_why_an_earlier_try_failed_is_no_news(played: Played) -> None:
    """The condition stays while kube-scheduler tries again: the pod of the request has it, too."""
    again = unschedulable(A)
    played.report(again)
    played.filter(again, "n")
    played.report(again)
    assert played.nodes == {"uid-a": "n"}
    played.report(unschedulable(A, "the volume could not be made"))
    assert played.nodes == {}


def test_a_place_follows_the_node_that_kube_scheduler_reports(played: Played) -> None:
    played.filter(A, "n")
    played.report(with_status(A, nominatedNodeName="m"))
    assert played.nodes == {"uid-a": "m"}
    assert played.known.free("n") == {"a": 1000, "b": 1000}
    assert played.filter(pod("low", 1000, priority=-1), "m") == ["m"]
    assert played.filter(pod("more", 400), "m") == [], "the pod counts once: by its place, and not as nominated"
    played.report(A)
    assert played.nodes == {"uid-low": "m"}, "kube-scheduler has withdrawn it"


def test_a_nomination_of_before_is_no_news(played: Played) -> None:
    """A pod that has preempted others on a node may be placed on another one."""
    before = pod("a", 700, nominated="m")
    played.report(before)
    played.filter(before, "n")
    played.report(before)
    assert played.nodes == {"uid-a": "n"}
    played.report(pod("a", 700, nominated="n"))
    assert played.nodes == {"uid-a": "n"}
    played.report(pod("a", 700))
    assert played.nodes == {}


async def test_a_place_is_given_up_in_time(played: Played) -> None:
    played.filter(A, "n")
    await played.clock.advance(PLACE_S - 1)
    played.report(with_status(A, nominatedNodeName="n"))
    played.places.expire()
    assert played.nodes == {"uid-a": "n"}
    await played.clock.advance(1)
    played.places.expire()
    assert played.nodes == {}, "no news makes the time longer"


async def test_a_place_of_a_pod_that_may_fail_silently_ends_earlier(played: Played) -> None:
    """kube-scheduler writes no condition that the pod has already, but reports the node of a pod that waits."""
    for name in "ab":
        again = unschedulable(pod(name, 700))
        played.report(again)
        played.filter(again, "n")
    played.report(with_status(unschedulable(pod("b", 700)), nominatedNodeName="n"))
    await played.clock.advance(RETRIED_S)
    played.places.expire()
    assert played.nodes == {"uid-b": "n"}
    await played.clock.advance(PLACE_S - RETRIED_S)
    played.places.expire()
    assert played.nodes == {}


def test_a_binding_takes_the_place_over(played: Played) -> None:
    played.report(A)
    played.filter(A, "n")
    assert played.send_binding(A, "n")
    assert played.nodes == {}
    assert played.known.free("n") == {"a": 300, "b": 1000}
    played.filter(A, "n")
    assert played.nodes == {}, "the pod counts by its reservation"
    played.known.index.release(decoded_pod(A).uid, N)
    assert played.known.free("n") == {"a": 1000, "b": 1000}


def test_no_pod_gets_two_places_by_the_fence(played: Played) -> None:
    asked = decoded_pod(A)
    played.filter(A, "n")
    played.known.index.withhold(asked)
    played.filter(A, "n")
    assert played.nodes == {}
    played.known.index.restore(asked.uid)
    assert played.known.free("n") == {"a": 1000, "b": 1000}


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["filter", "score", "bind", "fail", "delete", "nominate", "leave", "release"]),
        st.integers(0, 4),
        st.sampled_from("nm"),
    ),
    max_size=30,
)


@given(OPERATIONS, st.lists(st.sampled_from(UNITS), min_size=5, max_size=5))
def test_places_never_overcommit_a_gpu_and_leave_nothing_behind(
    operations: Sequence[tuple[str, int, str]], units: Sequence[int]
) -> None:
    """Whatever kube-scheduler and the API server do, in any order."""
    played = played_on(node("n", a=1000, b=1000), node("m", c=1000, d=1000))
    pods = [pod(f"p{number}", units[number], priority=number % 2) for number in range(5)]
    gone = set[int]()
    for what, number, name in operations:
        content, asked = pods[number], decoded_pod(pods[number])
        if number in gone:
            continue
        act(played, what, content, name)
        if what in {"delete", "leave"}:
            gone.add(number)
        for usage in played.known.index.nodes.values():
            taken = dict.fromkeys(usage.capacity, 0)
            for used in usage.pods.values():
                for gpu, some in used.items():
                    taken[gpu] += some
            assert all(some <= usage.capacity[gpu] for gpu, some in taken.items())
            counted = [uid for uid in usage.all_pods if uid == asked.uid]
            assert len(counted) <= 1
    for content in pods:
        played.report(content)
        played.known.gone(content)
    assert played.nodes == {}
    assert [played.known.free(name) for name in "nm"] == [{"a": 1000, "b": 1000}, {"c": 1000, "d": 1000}]


def act(played: Played, what: str, content: Object, name: str) -> None:
    asked, index = decoded_pod(content), played.known.index
    known = index.pod("default", asked.metadata.name)
    is_bound = known is not None and known.spec.node_name
    if what == "filter" and not is_bound:
        played.filter(content, name)
    elif what == "score" and not is_bound:
        played.filter(content, "n", "m")
        played.places.take_scores(asked, [HostPriority(name, 10)])
    elif what == "nominate" and not is_bound:
        played.report(with_status(content, nominatedNodeName=name))
    elif what == "fail" and not is_bound:
        played.report(unschedulable(content))
    elif what == "bind" and not any(index.reserved(asked.uid, NodeName(each)) for each in "nm"):
        played.send_binding(content, name)
    elif what == "release":
        index.release(asked.uid, NodeName(name))
    elif what == "delete":
        played.report(content)
        played.known.gone(content)
    elif what == "leave":
        played.report(deleted(content))
        played.known.gone(content)


def test_one_node_alone_has_the_highest_score(played: Played) -> None:
    """Among equal scores kube-scheduler would choose any node, and the place would be on another one."""
    scores = [HostPriority("x", 3), HostPriority("n", 10), HostPriority("m", 10)]
    answer = played.places.take_scores(decoded_pod(A), scores)
    assert [(score.host, score.score) for score in answer] == [("x", 3), ("n", 10), ("m", 9)]
    assert played.nodes == {"uid-a": "n"}
    without = pod("without", 0)
    assert played.places.take_scores(decoded_pod(without), scores) == scores, "it takes nothing"


class Waiting(NamedTuple):
    """A gang of which kube-scheduler has placed the first pods."""

    pods: Sequence[Object]
    nodes: list[str]


class Coscheduler:
    """kube-scheduler with the coscheduling plugin: the pods of a gang wait in Permit until all of them are placed."""

    def __init__(self, played: Played, random: Random) -> None:
        self._played = played
        self._random = random

    def place(self, content: Object) -> str | None:
        """Return the node that a pod is assumed on; None where it fits nowhere."""
        fitting = self._played.filter(content, "n", "m", "o")
        if len(fitting) <= 1:
            return fitting[0] if fitting else None
        asked = NodeArguments(decoded_pod(content), [NodeName(name) for name in fitting])
        rows = self._played.known.index.rows_for(asked.pod)
        scoring = prioritized(asked, rows, Sharing(), Steps(MOST_STEPS))
        scores = self._played.places.take_scores(asked.pod, finished(scoring))
        others = {score.host: self._random.randrange(10 * WEIGHT) for score in scores}
        return max(scores, key=lambda score: 10 * WEIGHT * score.score + others[score.host]).host

    def end(self, gang: Waiting, *, is_whole: bool) -> None:
        """Bind all pods of a gang, or refuse all of them."""
        for content, name in zip(gang.pods, gang.nodes, strict=False):
            if is_whole:
                assert self._played.send_binding(content, name), "a gang is bound whole or not at all"
        for content in gang.pods if not is_whole else ():
            self._played.report(unschedulable(content))


@given(
    st.lists(st.lists(st.sampled_from(UNITS), min_size=1, max_size=4), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_a_gang_is_bound_whole_or_not_at_all(gangs: Sequence[Sequence[int]], random: Random) -> None:
    """Gangs are placed pod by pod, in any order among each other; each ends once a pod of it fits nowhere."""
    played = played_on(*(node(name, **{f"{name}0": 1000, f"{name}1": 700}) for name in "nmo"))
    scheduler = Coscheduler(played, random)
    waiting = [
        Waiting([pod(f"g{gang}-{number}", some) for number, some in enumerate(units)], [])
        for gang, units in enumerate(gangs)
    ]
    while waiting:
        gang = random.choice(waiting)
        placed = scheduler.place(gang.pods[len(gang.nodes)])
        if placed is not None:
            gang.nodes.append(placed)
        if placed is None or len(gang.nodes) == len(gang.pods):
            scheduler.end(gang, is_whole=placed is not None)
            waiting.remove(gang)
    assert played.nodes == {}, "no place is held without a limit"
    for usage in played.known.index.nodes.values():
        assert all(
            sum(used.get(gpu, 0) for used in usage.pods.values()) <= most for gpu, most in usage.capacity.items()
        )


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[tuple[PodApi, ExtenderProcess]]:
    api = PodApi()
    async with running(api, tmp_path, intervals=ExtenderIntervals(place_s=60.0)) as processes:
        process = await processes.start(elects=False)
        await until(lambda: is_ready(process))
        yield api, process


async def ask(process: ExtenderProcess, api: PodApi, name: str, *nodes: str) -> Sequence[str]:
    """Ask for nodes as kube-scheduler does, and return those that fit: scores follow where there are several."""
    content = api.pods[f"default/{name}"]
    found = (await post(process, "filter", Pod=content, NodeNames=nodes))["NodeNames"]
    assert isinstance(found, list)
    if len(found) > 1:
        await score(process, content, found)
    return found


async def score(process: ExtenderProcess, content: Object, names: Sequence[str]) -> None:
    assert process.server.port is not None
    body = msgspec.json.encode({"Pod": content, "NodeNames": names})
    status, _, _ = await http_ask(process.server.port, request("/prioritize", body))
    assert status == 200


async def add(api: PodApi, process: ExtenderProcess, *contents: Object) -> None:
    for content in contents:
        api.put("pods", content)
        name = decoded_pod(content).metadata.name
        await until(lambda name=name: process.extender.index.pod("default", name) is not None)  # type: ignore[misc]


async def test_a_gang_is_bound_whole(process: tuple[PodApi, ExtenderProcess]) -> None:
    """Three workers wait for each other; each of two nodes has room for two of them."""
    api, extender = process
    api.put("nodes", node("n", a=1000, b=1000))
    api.put("nodes", node("m", c=1000, d=1000))
    names = [f"worker{number}" for number in range(3)]
    await add(api, extender, *(pod(name, 600) for name in names))
    await until(lambda: len(extender.extender.index.nodes) == 2)
    for name in names:
        assert await ask(extender, api, name, "n", "m")
    chosen = {uid: place.node for uid, place in extender.extender.index.granted.items()}
    assert {list(chosen.values()).count(name) for name in (N, NodeName("m"))} == {1, 2}
    for name in names:
        assert await bind(extender, name, to=chosen[PodUid(f"uid-{name}")]) == ""
    assert all(api.node_of(f"default/{name}") for name in names)


async def test_a_pod_that_waits_for_its_volume_is_bound(process: tuple[PodApi, ExtenderProcess]) -> None:
    """Others are placed and bound meanwhile; the one that does not fit beside it is told who waits."""
    api, extender = process
    api.put("nodes", node("n", a=1000, b=1000))
    await add(api, extender, pod("a", 700), pod("b", 700), pod("c", 600))
    await until(lambda: len(extender.extender.index.nodes) == 1)
    assert await ask(extender, api, "a", "n") == ["n"]
    assert await ask(extender, api, "b", "n") == ["n"]
    assert await bind(extender, "b") == ""
    answer = await post(extender, "filter", Pod=api.pods["default/c"], NodeNames=["n"])
    assert "more is kept for pods that wait to be bound there: default/a" in str(answer["FailedAndUnresolvableNodes"])
    assert await bind(extender, "a") == ""
    assert (
        api.annotations("default/a")["gpuvirt.io/shares"] == '{"containers":{"c0":{"GPU-a":700}},"enforcement":"none"}'
    )


async def test_a_pod_that_was_refused_is_woken_once_a_place_is_given_up(
    process: tuple[PodApi, ExtenderProcess],
) -> None:
    api, extender = process
    api.put("nodes", node("n", a=1000))
    await add(api, extender, pod("a", 700), pod("b", 700))
    await until(lambda: len(extender.extender.index.nodes) == 1)
    assert await ask(extender, api, "a", "n") == ["n"]
    assert await ask(extender, api, "b", "n") == []
    api.put("pods", unschedulable(api.pods["default/a"]))
    await until(lambda: "default/b" in api.changed)
    assert await ask(extender, api, "b", "n") == ["n"]


async def test_places_end_with_their_time_and_with_the_term(tmp_path: Path) -> None:
    api = PodApi()
    api.put("nodes", node("n", a=1000))
    api.put("pods", pod("a", 700))
    async with running(api, tmp_path, intervals=ExtenderIntervals(place_s=0.1, place_check_s=0.01)) as processes:
        process = await processes.start(elects=False)
        await until(lambda: is_ready(process))
        assert await ask(process, api, "a", "n") == ["n"]
        await until(lambda: not process.extender.index.granted)
    assert process.extender.index.totals().free == 1000


async def test_a_place_on_another_node_ends_with_the_binding(process: tuple[PodApi, ExtenderProcess]) -> None:
    """kube-scheduler adds scores of its own, so that it may choose another node than the extender expects."""
    api, extender = process
    for name, gpus in (("n", {"a": 700}), ("m", {"b": 1000})):
        api.put("nodes", node(name, **gpus))
    await add(api, extender, pod("a", 700), pod("b", 700))
    await until(lambda: len(extender.extender.index.nodes) == 2)
    assert await ask(extender, api, "a", "n", "m") == ["n", "m"]
    assert {place.node for place in extender.extender.index.granted.values()} == {"n"}
    assert await ask(extender, api, "b", "n") == []
    assert await bind(extender, "a", to="m") == ""
    await until(lambda: api.changed == ["default/b"])
    free: Mapping[str, int] = {
        str(gpu): units for usage in extender.extender.index.nodes.values() for gpu, units in usage.free.items()
    }
    assert free == {"GPU-a": 700, "GPU-b": 300}


async def test_a_place_of_another_request_than_the_pods_own_is_not_bound(
    process: tuple[PodApi, ExtenderProcess],
) -> None:
    api, extender = process
    api.put("nodes", node("n", a=1000, b=1000))
    await add(api, extender, pod("a", 700))
    await until(lambda: len(extender.extender.index.nodes) == 1)
    await post(extender, "filter", Pod=pod("a", 100, 100), NodeNames=["n"])
    assert await bind(extender, "a") == ""
    assert (
        api.annotations("default/a")["gpuvirt.io/shares"] == '{"containers":{"c0":{"GPU-a":700}},"enforcement":"none"}'
    )


def of_group(content: Object) -> Object:
    spec = content["spec"]
    assert isinstance(spec, dict)
    return {**content, "spec": {**spec, "schedulingGroup": {"podGroupName": "g"}}}


async def test_a_late_request_for_a_pod_of_a_group_takes_no_place_of_the_group(played: Played) -> None:
    """Seen where the computer was busy: two pods of a group got the same units, and one of them was bound alone."""
    first, other = (of_group(unschedulable(pod(name, 1000))) for name in ("first", "other"))
    played.filter(pod("alone", 1000), "n")
    assert played.filter(first, "n") == ["n"]
    assert played.filter(other, "n") == []
    assert played.filter(first, "n") == ["n"]
    await played.clock.advance(0.06)
    played.places.expire(decoded_pod(other))
    assert played.filter(other, "n") == []
    await played.clock.advance(0.06)
    played.places.expire(decoded_pod(pod("small", 100)))
    assert played.nodes == {"uid-alone": "n"}, "kube-scheduler asks for another pod when it has left the group"


async def test_a_group_of_which_a_pod_was_refused_leaves_its_places_at_once(played: Played) -> None:
    """kube-scheduler tries such a group again and again, and reports no failure with the same text twice."""
    first, other = (of_group(unschedulable(pod(name, 1000))) for name in ("first", "other"))
    played.filter(pod("alone", 1000), "n")
    for _ in range(3):
        assert played.filter(first, "n") == ["n"]
        assert played.filter(other, "n") == []
        played.places.expire()
        assert played.nodes == {"uid-alone": "n", "uid-first": "n"}, "fewer pods may be enough for the group"
        assert 0 < played.places.failing_for_s(decoded_pod(pod("small", 100))) < 0.06
        assert played.places.failing_for_s(decoded_pod(other)) <= 0
        await played.clock.advance(0.06)
        played.places.expire()
        assert played.nodes == {"uid-alone": "n"}
    assert played.filter(first, "n") == ["n"]
    assert played.filter(pod("small", 100), "m") == ["m"]
    assert played.filter(other, "m") == ["m"], "the next try begins without a refusal"
    await played.clock.advance(1)
    played.places.expire()
    assert {"uid-first", "uid-other"} <= played.nodes.keys()
    await played.clock.advance(3)
    played.places.expire()
    assert played.nodes == {"uid-alone": "n", "uid-small": "m"}, "both would be bound, or reported, by now"


async def test_the_places_of_a_group_last_as_long_as_it_is_placed(played: Played) -> None:
    for number, node_name in enumerate("nnmm"):
        assert played.filter(of_group(pod(f"p{number}", 1000)), node_name) == [node_name]
        await played.clock.advance(2)
        played.places.expire()
    assert len(played.nodes) == 4
    played.report(with_status(of_group(pod("p0", 1000)), nominatedNodeName="n"))
    await played.clock.advance(20)
    played.places.expire()
    assert played.nodes == {"uid-p0": "n"}


async def test_a_pod_that_has_failed_silently_has_its_place_for_seconds(played: Played) -> None:
    again = unschedulable(A)
    played.filter(again, "n")
    await played.clock.advance(5)
    played.places.expire()
    assert played.nodes == {"uid-a": "n"}
    played.filter(again, "n")
    await played.clock.advance(5)
    played.places.expire()
    assert played.nodes == {}


async def test_a_group_that_is_tried_again_leaves_its_places_to_others(process: tuple[PodApi, ExtenderProcess]) -> None:
    """kube-scheduler 1.36 tries a group that has failed every 2 ms; no other pod may be refused for that."""
    api, extender = process
    api.put("nodes", node("n", a=1000))
    await add(api, extender, *(of_group(pod(name, 700)) for name in ("g0", "g1")), pod("small", 700))
    await until(lambda: len(extender.extender.index.nodes) == 1)
    for _ in range(3):
        assert await ask(extender, api, "g0", "n") == ["n"]
        assert await ask(extender, api, "g1", "n") == []
    assert await ask(extender, api, "small", "n") == ["n"]
    assert await bind(extender, "small") == ""
    assert api.changed == [], "the second pod of the group would be refused again beside the first"
