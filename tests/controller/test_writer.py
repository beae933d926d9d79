"""The writer: limited concurrency, separate retries, and no superseded write."""

import asyncio
import logging
from itertools import pairwise

import pytest
from typing_extensions import override

from gpuvirt.controller.writer import AT_ONCE
from gpuvirt.controller.writes import PatchNode, PatchPolicyStatus, WriteTarget
from gpuvirt.kube.kinds.clusterpolicy import CLUSTER_POLICIES, NodeCounts, Status
from gpuvirt.kube.labels import DesiredLabels, LabelPatch
from gpuvirt.kube.resources import NODES
from tests.controller.writeserver import Server, StatusServer, label, writing


async def test_writes_run_with_limited_concurrency_and_all_complete() -> None:
    server = Server(slow=asyncio.Event())
    async with writing(server) as (writer, clock):
        writer.offer([label(f"n{number}") for number in range(20)])
        await clock.settle()
        assert server.most == AT_ONCE
        assert server.slow is not None
        server.slow.set()
        await clock.settle()
        assert len(server.done) == 20
        assert writer.done == 20


async def test_only_successful_writes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with writing(Server(refuses={"bad"})) as (writer, clock):
            writer.offer([label("good"), label("bad")])
            await clock.settle()
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.INFO] == [
        "patched node good: label=x"
    ]


async def test_a_failing_write_is_retried_alone_and_reported_until_it_succeeds() -> None:
    server = Server(refuses={"bad"})
    async with writing(server) as (writer, clock):
        writer.offer([label("bad"), label("good")])
        await clock.settle()
        assert server.done == [("good", "x")]
        assert writer.failures == ("bad is refused",)
        before = server.asked
        await clock.advance(600)
        assert 5 < server.asked - before < 25, "with growing backoff"
        server.refuses.clear()
        await clock.advance(60)
        assert ("bad", "x") in server.done
        assert not writer.failures


async def test_superseded_writes_are_dropped_and_the_latest_is_written() -> None:
    server = Server(refuses={"a", "b"})
    async with writing(server) as (writer, clock):
        writer.offer([label("a", "old"), label("b")])
        await clock.settle()
        writer.offer([label("a", "new")])
        server.refuses.clear()
        await clock.advance(60)
        assert server.done == [("a", "new")]
        assert writer.failures == ()


async def test_a_write_in_progress_is_not_started_twice() -> None:
    server = Server(slow=asyncio.Event())
    async with writing(server) as (writer, clock):
        writer.offer([label("a", "one")])
        await clock.settle()
        writer.offer([label("a", "two")])
        await clock.settle()
        assert server.asked == 1
        assert server.slow is not None
        server.slow.set()
        await clock.settle()
        assert server.done == [("a", "one")], "the next decision offers the write again"


class CountedTarget(WriteTarget, frozen=True):
    """A target that counts how often a collection looks it up."""

    read = 0

    @override
    def __hash__(self) -> int:
        CountedTarget.read += 1
        return hash(self.name)


async def test_the_cost_of_a_write_does_not_grow_with_the_pending_writes() -> None:
    async def lookups_of(nodes: int) -> float:
        server = Server()
        async with writing(server) as (writer, clock):
            patch = LabelPatch(DesiredLabels({"label": "x"}))
            before = CountedTarget.read
            writer.offer([PatchNode(CountedTarget(NODES, f"n{number}"), patch) for number in range(nodes)])
            await clock.settle()
            assert len(server.done) == nodes
        return (CountedTarget.read - before) / nodes

    assert await lookups_of(400) <= 1.2 * await lookups_of(50)


async def test_a_write_that_failed_keeps_its_pause_while_it_is_offered_again() -> None:
    server = Server(refuses={"bad"})
    async with writing(server) as (writer, clock):
        for _ in range(100):
            writer.offer([label("bad"), label("bad2")])
            await clock.settle()
        assert server.asked <= 101, "one failure of bad, and the others' successes"
        assert server.done.count(("bad2", "x")) == 100


def status(ready: int, policy: str = "cluster-policy") -> PatchPolicyStatus:
    counts = NodeCounts(total=50, container=0, vm_passthrough=0, vm_vgpu=50, shared=0, ready=ready)
    return PatchPolicyStatus(WriteTarget(CLUSTER_POLICIES, policy, "status"), Status(nodes=counts))


def pauses_of(asked: list[tuple[float, str, int]]) -> list[float]:
    times = [at_s for at_s, _, _ in asked]
    return [later - earlier for earlier, later in pairwise(times)]


async def test_a_policys_status_is_written_once_a_second_and_at_the_end() -> None:
    server = StatusServer()
    async with writing(server) as (writer, clock):
        for ready in range(50):
            writer.offer([status(ready)])
            await clock.advance(0.1)
        assert server.asked[0] == (0.0, "cluster-policy", 0), "the first one is written at once"
        assert len(server.asked) <= 6
        await clock.advance(1.0)
        assert server.asked[-1][2] == 49, "the last one is always written"
        assert min(pauses_of(server.asked)) >= 0.999
        count = len(server.asked)
        await clock.advance(60)
        assert len(server.asked) == count
        writer.offer([status(50)])
        await clock.settle()
        assert server.asked[-1][2] == 50, "a later change waits for nothing"


async def test_only_the_status_of_one_policy_waits() -> None:
    server = StatusServer()
    async with writing(server) as (writer, clock):
        writer.offer([status(1)])
        await clock.advance(0.1)
        writer.offer([status(2), status(1, "other"), label("node01")])
        await clock.settle()
        assert [name for _, name, _ in server.asked] == ["cluster-policy", "other", "node01"]
        writer.offer([])
        await clock.advance(5)
        assert len(server.asked) == 3, "a status that is stored by now is not written again"


async def test_a_refused_status_is_not_written_more_often() -> None:
    server = StatusServer(refuses=True)
    async with writing(server) as (writer, clock):
        for ready in range(50):
            writer.offer([status(ready)])
            await clock.advance(0.1)
        assert min(pauses_of(server.asked)) >= 0.999
        server.refuses = False
        await clock.advance(60)
        assert server.asked[-1][2] == 49
        assert writer.failures == ()
