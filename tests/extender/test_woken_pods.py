"""A pod that was refused by usage older than what kube-scheduler had seen is woken by the event that comes late."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from gpuvirt.extender.extender import MOST_REFUSED, RefusedPods
from gpuvirt.extender.process import ExtenderProcess
from gpuvirt.extender.protocol import NodeArguments
from gpuvirt.facts.ids import NodeName
from gpuvirt.shares.sharing import Sharing
from gpuvirt_sim.clock import SimClock
from tests.extender.namedobjects import Object
from tests.extender.podapi import PodApi
from tests.extender.pods import IndexUnderTest, decoded_pod, node, pod
from tests.extender.processes import Running, bind, is_ready, post, running, until

LATE_S = 10.0
N = NodeName("n")


def ended(api: PodApi, name: str) -> Object:
    return {**api.pods[f"default/{name}"], "status": {"phase": "Succeeded"}}


@pytest.fixture
def api() -> PodApi:
    api = PodApi()
    api.put("nodes", node("n", a=1000))
    api.put("pods", pod("first", 900))
    for name, units in (("waits", 600), ("wide", 900), ("small", 50)):
        api.put("pods", pod(name, units))
    return api


async def started(processes: Running, api: PodApi) -> ExtenderProcess:
    """Return a process that answers and has changed no pod since."""
    process = await processes.start(elects=False)
    await until(lambda: is_ready(process))
    api.changed.clear()
    return process


async def filled(processes: Running, api: PodApi) -> ExtenderProcess:
    """Return such a process that has bound `first`, so that 100 of the node's units are free."""
    process = await started(processes, api)
    assert await bind(process, "first") == ""
    await until(lambda: process.extender.index.totals().free == 100)
    return process


async def ask(process: ExtenderProcess, api: PodApi, *names: str) -> None:
    """Ask for the node for each pod, as kube-scheduler does."""
    for name in names:
        await post(process, "filter", Pod=api.pods[f"default/{name}"], NodeNames=["n"])


async def test_a_refused_pod_is_changed_once_a_late_event_frees_its_units(api: PodApi, tmp_path: Path) -> None:
    async with running(api, tmp_path) as processes:
        process = await filled(processes, api)
        await ask(process, api, "waits", "wide", "small")
        api.put("pods", pod("other", 300))
        api.put("pods", ended(api, "first"))
        await until(lambda: len(api.changed) == 2)
        assert sorted(api.changed) == ["default/waits", "default/wide"], (
            "the small one was not refused, and keeps its place"
        )
        assert await bind(process, "waits") == ""
        assert await bind(process, "other") == ""
        api.put("pods", ended(api, "waits"))
        await until(lambda: process.extender.index.totals().free == 650)
        assert len(api.changed) == 2, "kube-scheduler has tried both again"


async def test_a_refused_pod_is_changed_once_a_node_shares_more(api: PodApi, tmp_path: Path) -> None:
    async with running(api, tmp_path) as processes:
        process = await started(processes, api)
        api.put("pods", pod("large", 1000, 1000))
        await ask(process, api, "large")
        api.put("nodes", node("n", a=1000, b=1000))
        await until(lambda: api.changed == ["default/large"])


async def test_a_pod_that_nobody_can_change_keeps_no_other_from_being_woken(
    api: PodApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(api, tmp_path) as processes:
        process = await filled(processes, api)
        await ask(process, api, "wide", "waits")
        api.faults.unchangeable = {"default/wide"}
        api.put("pods", ended(api, "first"))
        await until(lambda: api.changed == ["default/waits"])
    assert "pod default/wide fits now and can't be changed" in caplog.text
    assert 'webhook "frozen.example.com" denied the request' in caplog.text


class Refusals:
    """A node with 100 of 1000 units, pods that it was too small for, and time."""

    def __init__(self) -> None:
        self.known = IndexUnderTest()
        self.known.nodes(node("n", a=1000), node("m", b=1000))
        self.known.pods(pod("first", 900, on="n", gpus=[{"a": 900}]))
        self.clock = SimClock()
        self.pods = RefusedPods(self.known.index, Sharing(), self.clock, LATE_S)

    def refuse(self, name: str, units: int = 600, *names: str) -> None:
        self.pods.add(NodeArguments(decoded_pod(pod(name, units)), [NodeName(each) for each in names or "n"]))

    def end_first(self) -> None:
        self.known.gone(pod("first", 900, on="n"))

    async def fitting(self, changed: str = "n") -> list[str]:
        self.pods.observe({NodeName(changed)})
        found = list[str]()
        with suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0):
                    found.append((await self.pods.next_fitting()).metadata.name)
        return found


async def test_a_refusal_that_is_older_than_an_event_can_be_late_is_forgotten() -> None:
    refusals = Refusals()
    refusals.refuse("old")
    await refusals.clock.advance(LATE_S / 2)
    refusals.refuse("new")
    await refusals.clock.advance(LATE_S / 2 + 1)
    refusals.end_first()
    assert await refusals.fitting() == ["new"]
    assert await refusals.fitting() == [], "it was woken"


async def test_only_nodes_that_kube_scheduler_asked_for_count() -> None:
    refusals = Refusals()
    refusals.refuse("p", 600, "n")
    assert await refusals.fitting("m") == []
    refusals.end_first()
    assert await refusals.fitting("m") == []
    assert await refusals.fitting() == ["p"]


async def test_a_pod_that_was_placed_meanwhile_is_not_woken() -> None:
    refusals = Refusals()
    refusals.refuse("p")
    refusals.pods.drop(decoded_pod(pod("p", 600)).uid)
    refusals.end_first()
    assert await refusals.fitting() == []


async def test_a_pod_that_is_placed_before_it_is_woken_keeps_the_version_of_its_binding() -> None:
    refusals = Refusals()
    for name in ("placed", "waits"):
        refusals.refuse(name)
    refusals.end_first()
    refusals.pods.observe({N})
    refusals.pods.drop(decoded_pod(pod("placed", 600)).uid)
    assert (await refusals.pods.next_fitting()).metadata.name == "waits"


async def test_the_oldest_of_many_refusals_are_forgotten() -> None:
    refusals = Refusals()
    for number in range(MOST_REFUSED):
        refusals.refuse(f"p{number}")
    refusals.refuse("p0")
    refusals.refuse("last")
    refusals.end_first()
    assert await refusals.fitting() == [*(f"p{number}" for number in range(2, MOST_REFUSED)), "p0", "last"]
