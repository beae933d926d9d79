"""The state of an object that is watched and written concurrently, in any order of events."""

import asyncio
from dataclasses import dataclass
from random import Random
from typing import cast

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from gpuvirt.agent.cluster.gpunode import GpuNodeKeeper
from gpuvirt.agent.cluster.keeping import KeeperDependencies, ObservedObject
from gpuvirt.facts.ids import PciAddress
from gpuvirt.kube import events
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ConflictError
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.kinds.gpunode import GpuNode, Status
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import Metadata
from gpuvirt.loops.cell import Cell
from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.model.desired.workload import unknown_workload
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.node.memoryregion import PodMemory
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.model.shares.sharedgpus import SharedGpu, SharedGpus
from gpuvirt_sim.clock import BEGINNING, SimClock


@given(st.data())
def test_the_object_matches_the_last_watch_event_after_any_interleaving(data: st.DataObject) -> None:
    existing = data.draw(st.lists(st.booleans(), min_size=1, max_size=8))
    history = [Node(Metadata(resource_version=str(at))) if exists else None for at, exists in enumerate(existing)]
    written = data.draw(st.sampled_from([at for at, state in enumerate(history) if state is not None] or [0]))
    item = history[written]
    begins = data.draw(st.integers(0, written))
    answered = data.draw(st.integers(begins, len(history)))
    known = ObservedObject[Node]()
    before = known.latest
    for at in range(len(history) + 1):
        if at == begins:
            before = known.latest
        if at == answered and item is not None:
            known.answer(before, item)
        if at < len(history):
            known.observe(history[at])
    assert known.latest is not None
    assert known.item == history[-1]


def test_a_watch_event_during_a_conflicting_write_is_not_lost() -> None:
    known, made = ObservedObject[Node](), Node(Metadata(resource_version="1"))
    known.observe(None)
    before = known.latest
    known.observe(made)
    known.doubt(before)
    assert known.item == made
    known.doubt(known.latest)
    assert known.latest is None


@dataclass
class Beside:
    """An API server at which another writer creates the GpuNode, and the watch reports it before the response."""

    keeper: GpuNodeKeeper
    patched: int = 0

    async def create(self, *_: object) -> GpuNode:
        self.say(GpuNode(metadata=Metadata(name="node01", resource_version="1", generation=1)))
        raise ConflictError("gpunodes node01: is there")

    async def patch(self, *_: object, **__: object) -> GpuNode:
        self.patched += 1
        return GpuNode(metadata=Metadata(name="node01", resource_version="2", generation=1))

    def say(self, node: GpuNode | None) -> None:
        self.keeper.observe(Delta({ObjectKey("", "node01"): node} if node is not None else {}))


async def test_a_gpunode_that_another_writer_creates_concurrently_gets_its_status() -> None:
    clock, server = SimClock(), Beside(cast("GpuNodeKeeper", None))
    server.keeper = GpuNodeKeeper(KeeperDependencies(cast("Client", server), "node01", clock, Random(0)))  # noqa: S311
    server.say(None)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(server.keeper.run(Cell(NodeView(at=BEGINNING, host_observed=True)), lambda _: None))
        await clock.advance(5)
        running.cancel()
    assert server.patched


@dataclass
class Older(Beside):
    """An API server whose kind lacks `status.invalid`, and drops it."""

    @override
    async def patch(self, *arguments: object, **options: object) -> GpuNode:
        self.patched += 1
        content = msgspec.convert(msgspec.to_builtins(arguments[2]), dict[str, Status])
        kept = msgspec.structs.replace(content["status"], invalid=())
        return GpuNode(metadata=Metadata(name="node01", resource_version=str(self.patched), generation=1), status=kept)


async def test_a_status_whose_fields_the_api_server_drops_is_written_once() -> None:
    clock, server = SimClock(), Older(cast("GpuNodeKeeper", None))
    server.keeper = GpuNodeKeeper(KeeperDependencies(cast("Client", server), "node01", clock, Random(0)))  # noqa: S311
    server.say(GpuNode(metadata=Metadata(name="node01", resource_version="0", generation=1)))
    views = Cell(NodeView(at=BEGINNING, host_observed=True, invalid=(unknown_workload("vm-vgpus"),)))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(server.keeper.run(views, lambda _: None))
        await clock.advance(60)
        assert server.patched <= 2, "the write's response has the transition times"
        views.set(NodeView(at=BEGINNING, host_observed=True, invalid=(unknown_workload("other"),)))
        written = server.patched
        await clock.advance(60)
        assert server.patched == written + 1
        running.cancel()


@dataclass
class Storing(Beside):
    """An API server that stores each status."""

    stored: Status | None = None

    @override
    async def patch(self, *arguments: object, **options: object) -> GpuNode:
        self.patched += 1
        self.stored = msgspec.convert(msgspec.to_builtins(arguments[2]), dict[str, Status])["status"]
        version = str(self.patched)
        return GpuNode(metadata=Metadata(name="node01", resource_version=version, generation=1), status=self.stored)


async def test_the_memory_of_pods_is_written_when_it_changes() -> None:
    clock, server = SimClock(), Storing(cast("GpuNodeKeeper", None))
    server.keeper = GpuNodeKeeper(KeeperDependencies(cast("Client", server), "node01", clock, Random(0)))  # noqa: S311
    server.say(GpuNode(metadata=Metadata(name="node01", resource_version="0", generation=1)))
    shared = SharedGpus(
        (SharedGpu(PciAddress("0000:65:00.0"), GpuId("GPU-a"), Units(1000)),), enforcement=Enforcement.HAMI_CORE
    )
    memory: Cell[tuple[PodMemory, ...]] = Cell(())
    async with asyncio.TaskGroup() as group:
        views = Cell(NodeView(at=BEGINNING, host_observed=True, shared=shared))
        running = group.create_task(server.keeper.run(views, lambda _: None, memory))
        await clock.advance(60)
        written = server.patched
        memory.set((PodMemory("research", "train", 4915, None), PodMemory("research", "serve", 100, 7)))
        await clock.advance(60)
        assert server.patched == written + 1
        assert server.stored is not None
        assert server.stored.shares is not None
        found = [(pod.pod, pod.limit_mib, pod.used_mib) for pod in server.stored.shares.memory]
        assert found == [("train", 4915, None), ("serve", 100, 7)]
        running.cancel()


@given(st.integers(2, 9))
def test_events_of_the_same_moment_have_distinct_names(count: int) -> None:
    about, delta = (
        events.About("v1", "Node", "node01", "node01"),
        events.EventDraft(events.EventLevel.NORMAL, "ModeChanged", "x"),
    )
    made = events.events_of([(about, delta)] * count, events.Reporter("gpuvirt.io/node", "node01"), BEGINNING)
    assert len({event.metadata.name for event in made}) == count
