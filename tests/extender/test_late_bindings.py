"""Bindings that arrive late: the API server refuses each of them once their units may be another pod's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from gpuvirt.clock import RealClock
from gpuvirt.extender.binding import Binder
from gpuvirt.model.shares.annotations import FENCE_ANNOTATION
from gpuvirt.shares.sharing import Sharing
from tests.extender.binderbench import Bench, benched
from tests.extender.pods import IndexUnderTest, node, pod
from tests.kube.scriptedapi import CONFLICT

MADE, REFUSED = 201, 409
UNKNOWN = "whether it is bound is not known"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with benched(tmp_path) as bench:
        yield bench


def cut_off(bench: Bench) -> None:
    """Let bindings of the leader stay on the way, and all else fail."""
    bench.api.faults.delayed = 9
    bench.api.faults.changes_fail = bench.api.faults.reads_fail = True


def mend(bench: Bench) -> None:
    bench.api.faults.delayed = 0
    bench.api.faults.changes_fail = bench.api.faults.reads_fail = False


def successor(bench: Bench) -> Bench:
    """Return another replica, which has just listed nodes and pods."""
    known = IndexUnderTest()
    known.nodes(node("n", a=1000, b=500), node("m", c=1000))
    known.pods(*bench.api.pods.values())
    binder = Binder(bench.client, known.index, Sharing(), RealClock(), lambda: True)
    return Bench(bench.api, known, binder, bench.lease, bench.client)


async def test_a_binding_that_was_not_answered_cannot_be_made_after_its_units_are_free(bench: Bench) -> None:
    bench.add(pod("p", 1000))
    bench.api.faults.delayed = 1
    assert "etcdserver: request timed out" in await bench.bind("p")
    assert bench.known.free("n") == {"a": 1000, "b": 500}
    bench.add(pod("q", 1000))
    assert await bench.bind("q") == ""
    assert bench.api.arrive() == [REFUSED]


async def test_a_successor_places_no_pod_before_its_predecessors_bindings_are_dead(bench: Bench) -> None:
    bench.add(pod("p", 1000))
    cut_off(bench)
    assert UNKNOWN in await bench.bind("p")
    bench.lease.held = False
    bench.api.put("pods", pod("q", 1000))
    other = successor(bench)
    assert "does not lead" in await other.bind("q")
    begins = asyncio.create_task(other.binder.begin_term())  # noqa: TID251
    await RealClock().sleep(0.5)
    assert "does not lead" in await other.bind("q"), "pods cannot be changed yet"
    assert "2 pods" in other.binder.fence.missing
    assert "etcdserver: request timed out" in other.binder.fence.missing
    mend(bench)
    await begins
    other.report("q")
    assert await other.bind("q") == ""
    assert bench.api.arrive() == [REFUSED]


@asynccontextmanager
async def began_with_an_unchangeable_pod(bench: Bench) -> AsyncIterator[Bench]:
    """A successor in whose term the pod `p` of 300 units may still be bound by its predecessor, anywhere."""
    bench.add(pod("p", 300))
    cut_off(bench)
    assert UNKNOWN in await bench.bind("p", "m")
    mend(bench)
    bench.lease.held = False
    bench.api.faults.unchangeable = {"default/p"}
    for name, units in (("q", 800), ("r", 700), ("s", 700), ("t", 200), ("u", 300)):
        bench.api.put("pods", pod(name, units))
    other = successor(bench)
    async with asyncio.TaskGroup() as group:
        begins = group.create_task(other.binder.begin_term())
        async with asyncio.timeout(20):
            while not other.binder.is_fenced:
                await RealClock().sleep(0.02)
        for name in "qrstu":
            other.report(name)
        yield other
        async with asyncio.timeout(20):
            await begins


async def test_a_pod_that_nobody_can_change_keeps_no_other_pod_waiting(bench: Bench) -> None:
    async with began_with_an_unchangeable_pod(bench) as other:
        why = await other.bind("p")
        assert "bindings of earlier leaders may still arrive for 1 pod (default/p)" in why
        assert 'webhook "frozen.example.com" denied the request' in why
        assert "its largest free piece is 700" in await other.bind("q"), "its units are free on each GPU"
        assert [await other.bind("r"), await other.bind("s", "m")] == ["", ""]
        assert bench.api.arrive() == [MADE], "the binding that nobody could prevent finds room"
        other.report("p")
        assert "does not fit" in await other.bind("u", "m")
        assert await other.bind("t") == ""
    assert other.known.free("m") == {"c": 0}
    assert other.known.free("n") == {"a": 300, "b": 300}


async def test_the_units_of_an_unchangeable_pod_are_free_once_it_is_deleted(bench: Bench) -> None:
    async with began_with_an_unchangeable_pod(bench) as other:
        assert other.known.free("n") == {"a": 700, "b": 200}
        other.known.nodes(node("n", a=1000, b=500), node("m", c=1000), node("new", d=1000))
        assert other.known.free("new") == {"d": 700}
        bench.api.delete("pods", "default/p")
    assert bench.api.arrive() == [404]
    assert other.known.free("n") == {"a": 1000, "b": 500}
    assert other.known.free("new") == {"d": 1000}
    assert await other.bind("q") == ""


async def test_an_unchangeable_pod_that_changes_by_itself_waits_no_longer(bench: Bench) -> None:
    async with began_with_an_unchangeable_pod(bench) as other:
        bench.api.put("pods", pod("p", 300, labels={"changed": "true"}))
        other.report("p")
    assert bench.api.arrive() == [REFUSED]
    assert await other.bind("p") == ""


async def test_a_binding_that_arrives_before_the_change_counts(bench: Bench) -> None:
    bench.add(pod("p", 1000))
    cut_off(bench)
    assert UNKNOWN in await bench.bind("p")
    bench.api.put("pods", pod("q", 1000))
    other = successor(bench)
    mend(bench)
    assert bench.api.arrive() == [MADE]
    begins = asyncio.create_task(other.binder.begin_term())  # noqa: TID251
    await RealClock().sleep(0.3)
    assert not other.binder.is_fenced, "no event has reported the pod on its node yet"
    other.report("p")
    await begins
    assert "does not fit" in await other.bind("q")


async def test_only_pods_that_can_be_bound_to_units_are_changed(bench: Bench) -> None:
    gated, deleted = pod("gated", 100), pod("deleted", 100)
    gated["spec"] = {**msgspec.convert(gated["spec"], dict[str, object]), "schedulingGates": [{"name": "quota"}]}
    deleted["metadata"] = {**msgspec.convert(deleted["metadata"], dict[str, object]), "deletionTimestamp": "2026-01-01"}
    others = gated, deleted, pod("none", 0), pod("bound", 100, on="m", gpus=[{"c": 100}])
    for content in (*others, pod("p", 300), pod("q", 300)):
        bench.api.put("pods", content)
    await successor(bench).binder.begin_term()
    assert sorted(bench.api.changed) == ["default/p", "default/q"]
    assert bench.api.annotations("default/p")["example.com/own"] == "kept"


async def test_a_pod_that_has_changed_is_read_and_its_binding_sent_again(bench: Bench) -> None:
    bench.add(pod("p", 300))
    bench.api.put("pods", bench.api.pods["default/p"])
    assert await bench.bind("p") == ""
    assert versions(bench) == ["11", "12"]
    assert bench.api.node_of("default/p") == "n"


async def test_a_conflict_frees_nothing_while_an_earlier_try_may_be_made(bench: Bench) -> None:
    bench.add(pod("p", 1000))
    cut_off(bench)
    assert UNKNOWN in await bench.bind("p")
    bench.api.faults.reads_fail = False
    bench.api.faults.before_write.append(CONFLICT)  # of a proxy: the pod is as it was
    assert UNKNOWN in await bench.bind("p")
    assert bench.known.free("n") == {"a": 0, "b": 500}
    assert bench.api.arrive() == [MADE]


async def test_a_refusal_frees_nothing_while_an_earlier_try_may_be_made(bench: Bench) -> None:
    bench.add(pod("p", 1000))
    cut_off(bench)
    assert UNKNOWN in await bench.bind("p")
    bench.api.faults.before_write.append((403, {"message": "not yours"}))
    assert "not yours" in await bench.bind("p")
    assert bench.known.free("n") == {"a": 0, "b": 500}


async def test_a_binding_is_not_sent_again_in_another_term(bench: Bench) -> None:
    """Another process may have led in between, and have given the units to another pod."""
    bench.add(pod("p", 1000))
    async with asyncio.TaskGroup() as group:

        def lead_again() -> None:
            bench.api.put("pods", bench.api.pods["default/p"])
            group.create_task(bench.binder.begin_term())

        bench.api.faults.meanwhile.append(lead_again)
        assert "not sent" in await bench.bind("p")
    assert len(bench.api.bindings) == 1
    assert bench.known.free("n") == {"a": 1000, "b": 500}


async def test_a_binding_is_not_sent_again_for_a_pod_that_another_leader_has_fenced(bench: Bench) -> None:
    """The clock of this process stood still, as in a VM that was paused: it takes its lease for its own."""
    bench.add(pod("p", 1000))

    def another_leads() -> None:
        fenced = {"annotations": {FENCE_ANNOTATION: "of another process"}, "resourceVersion": ""}
        found = pod("p", 1000)
        metadata = msgspec.convert(found["metadata"], dict[str, object])
        bench.api.put("pods", {**found, "metadata": metadata | fenced})
        bench.api.put("pods", pod("q", 1000, on="n", gpus=[{"a": 1000}]))

    bench.api.faults.meanwhile.append(another_leads)
    assert "the object has been modified" in await bench.bind("p")
    assert len(bench.api.bindings) == 1
    assert bench.api.node_of("default/p") == ""


async def test_a_term_begins_when_its_processs_own_bindings_are_known(bench: Bench) -> None:
    bench.add(pod("p", 1000))
    cut_off(bench)
    assert UNKNOWN in await bench.bind("p")
    mend(bench)
    await bench.binder.begin_term()
    assert bench.known.free("n") == {"a": 1000, "b": 500}
    assert bench.api.arrive() == [REFUSED]


def versions(bench: Bench) -> list[str]:
    """Return the versions of pods in the bindings that were sent."""
    found = (msgspec.convert(binding["metadata"], dict[str, object]) for binding in bench.api.bindings)
    return [str(metadata["resourceVersion"]) for metadata in found]
