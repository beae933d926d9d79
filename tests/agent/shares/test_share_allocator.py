"""A container starts with its share only if each account agrees, and keeps none that was refused or has ended."""

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec.structs import replace

from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.agent.shares.nodeshares import stored_shares
from gpuvirt.agent.shares.shareallocator import Accounts, Dependencies, GpuChoice, ShareAllocator, UnitAllocation
from gpuvirt.agent.shares.sharefiles import SpecFiles
from gpuvirt.facts.ids import DeviceId, PciAddress, PodUid
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.desired.settings import ShareSettings
from gpuvirt.model.reasons import Reason, ReasonCode, refusals
from gpuvirt.model.reasons.sharing import driver_upgrade
from gpuvirt.model.shares.demand import ContainerDemand, ContainerKind, ContainerName, Demand, Units
from gpuvirt.model.shares.node.choice import NodeSharing, PodOnNode
from gpuvirt.model.shares.node.records import ShareRecords
from gpuvirt.model.shares.node.sharespec import device_name
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.model.shares.sharedgpus import UNITS_RESOURCE
from gpuvirt_sim.clock import SimClock
from tests.agent.shares.opengpus import decide
from tests.agent.shares.sharednode import GPUS, MINORS, nvidia_spec, spec_env

T = TypeVar("T")
A, B = GPUS
POD = PodUid("8a5c0001-0000-4000-8000-000000000001")
MAIN, SIDE = ContainerName("main"), ContainerName("side")
DEMAND = Demand(tuple(ContainerDemand(name, ContainerKind.APP, Units(2)) for name in (MAIN, SIDE)))
IDS = {MAIN: (DeviceId("u0"), DeviceId("u1")), SIDE: (DeviceId("u2"), DeviceId("u3"))}
CHANGING = refusals.changing(PciAddress("0000:02:00.0"), None)


class Worker:
    """A worker whose jobs the test can hold back."""

    def __init__(self) -> None:
        self.goes = asyncio.Event()
        self.goes.set()

    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        del name, timeout_s
        await self.goes.wait()
        return job()


class Gpus:
    """GPUs that a change may have."""

    changing: Reason | None = None

    def why_closed(self, gpu: GpuId) -> Reason | None:
        del gpu
        return None

    def claim(self, gpus: Collection[GpuId], unit: DeviceId, record: Callable[[], None]) -> None:
        del gpus, unit
        if self.changing is not None:
            raise RefusedError(self.changing)
        record()


class Node:
    """A node on which one pod with two containers has units of two GPUs."""

    def __init__(self, folder: Path) -> None:
        (folder / "cdi").mkdir()
        (folder / "nvidia").mkdir()
        (folder / "nvidia/nvidia.json").write_text(nvidia_spec(MINORS))
        self.folder = folder
        self.worker = Worker()
        self.gpus = Gpus()
        self.recorded: list[UnitAllocation] | Unknown = [self.allocation(name) for name in (MAIN, SIDE)]
        files = SpecFiles(folder / "cdi", (folder / "nvidia",))
        self.shares = stored_shares(folder / "shares.json", files, self.worker, ShareSettings())
        self.shares.follow(replace(self.shares.state.get(), node=NodeSharing({A: Units(1000)}, minors=MINORS)))
        self.shares.pods.observe({POD: PodOnNode(POD, "default", "p", DEMAND)})
        accounts = Accounts(lambda: self.recorded, lambda _: frozenset())
        self.clock = SimClock()
        on = Dependencies(self.shares, self.clock, self.worker, accounts, self.gpus, lambda: decide(self.shares))
        self.allocator = ShareAllocator(on)

    def allocation(self, name: ContainerName, device: str = "") -> UnitAllocation:
        """Return the units of a container in the kubelet's record."""
        return UnitAllocation(POD, name, frozenset(IDS[name]), device or device_name(name))

    @property
    def records(self) -> ShareRecords:
        return self.shares.store.records.get()

    @property
    def specs(self) -> dict[str, str]:
        """The GPUs in the spec of each container."""
        found = {path.stem.rpartition("-")[2]: spec_env(path) for path in (self.folder / "cdi").glob("*.json")}
        return {name: dict(line.split("=") for line in env)["GPUVIRT_GPUS"] for name, env in found.items()}

    async def start(self, name: ContainerName) -> ReasonCode | None:
        """Return why a container does not start, None if it does."""
        try:
            await self.allocator.pre_start(UNITS_RESOURCE, IDS[name])
        except AllocationRefusedError as error:
            return error.reason.code
        return None


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Return a node on whose containers every account agrees."""
    return Node(tmp_path)


async def test_a_container_that_every_account_has_starts(node: Node) -> None:
    assert await node.start(MAIN) is None
    assert node.specs == {MAIN: A}
    assert node.records.devices == {device_name(MAIN)}


async def test_while_the_driver_is_replaced_no_pod_starts_with_a_share(node: Node) -> None:
    node.shares.observe_node("containerd://2.1.3", "nvidia.com/gpu-driver-upgrade-state=upgrade-required")
    reason = driver_upgrade(node.shares.observed.get().upgrade, ())
    node.shares.follow(
        replace(node.shares.state.get(), published=node.shares.state.get().node, upgrade=reason).closed()
    )
    assert await node.start(MAIN) is ReasonCode.DRIVER_UPGRADE
    assert GpuChoice(node.shares, node.gpus).why_refused(Units(1)) == reason


async def test_units_that_no_container_has_are_refused(node: Node) -> None:
    node.recorded = [node.allocation(SIDE)]
    assert await node.start(MAIN) is ReasonCode.UNKNOWN_DEVICE
    assert node.shares.refusals.counts == {("pre-start", "UnknownDevice"): 1}


async def test_an_answer_of_another_plugin_gets_no_share(node: Node) -> None:
    node.recorded = [node.allocation(MAIN, "example.com/gpu=0")]
    assert await node.start(MAIN) is ReasonCode.UNKNOWN_DEVICE
    assert node.specs == {}
    assert node.records.devices == frozenset()


async def test_a_container_whose_pod_does_not_request_its_units_gets_no_share(node: Node) -> None:
    other = Demand((ContainerDemand(SIDE, ContainerKind.APP, Units(2)),))
    node.shares.pods.observe({POD: PodOnNode(POD, "default", "p", other)})
    assert await node.start(MAIN) is ReasonCode.API_SERVER_AWAY
    assert node.specs == {}


async def test_a_container_of_a_pod_that_has_ended_gets_no_share(node: Node) -> None:
    node.shares.pods.observe({POD: PodOnNode(POD, "default", "p", DEMAND, ended=True)})
    assert await node.start(MAIN) is ReasonCode.API_SERVER_AWAY
    assert not node.records.pods


async def test_a_container_that_starts_again_waits_while_its_gpu_is_changed(node: Node) -> None:
    assert await node.start(MAIN) is None
    node.gpus.changing = CHANGING
    assert await node.start(MAIN) is ReasonCode.UNIT_BUSY
    assert await node.start(SIDE) is ReasonCode.UNIT_BUSY, "the pod has its GPU already"
    assert node.specs == {MAIN: A}


async def test_a_container_whose_device_cannot_be_recorded_gets_no_share(node: Node) -> None:
    assert await node.start(MAIN) is None
    (node.folder / "shares.json").unlink()
    (node.folder / "shares.json").mkdir()
    assert await node.start(SIDE) is ReasonCode.LEDGER_NOT_WRITTEN
    assert node.specs == {MAIN: A}, "the next removal of old specs would remove it while its container runs"


async def test_a_spec_that_cannot_be_written_is_named(node: Node) -> None:
    (node.folder / "cdi").rmdir()
    (node.folder / "cdi").touch()
    assert await node.start(MAIN) is ReasonCode.CDI_NOT_WRITTEN


async def test_two_containers_that_start_at_once_get_the_gpu_that_was_chosen_for_the_first(node: Node) -> None:
    node.worker.goes.clear()
    async with asyncio.TaskGroup() as group:
        starts = [group.create_task(node.start(name)) for name in (MAIN, SIDE)]
        await node.clock.settle()
        node.shares.follow(replace(node.shares.state.get(), node=NodeSharing({B: Units(1000)}, minors=MINORS)))
        node.worker.goes.set()
    assert [start.result() for start in starts] == [None, None]
    assert node.specs == {MAIN: A, SIDE: A}
    assert node.records.pods[POD].placement.used == {A: 4}


@pytest.mark.parametrize("waits_first", [False, True])
async def test_a_container_that_starts_while_its_share_ends_gets_no_spec(node: Node, waits_first: bool) -> None:
    """The container waits behind one reading of the accounts, or between two of them."""
    assert await node.start(MAIN) is None
    recorded, node.recorded = node.recorded, []
    node.shares.pods.observe({})
    if not waits_first:
        await node.allocator.tidy()
    node.worker.goes.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(node.allocator.tidy())
        await node.clock.settle()
        node.recorded = recorded
        start = group.create_task(node.start(MAIN))
        await node.clock.settle()
        node.recorded = []
        if waits_first:
            group.create_task(node.allocator.tidy())
            await node.clock.settle()
        node.worker.goes.set()
    assert start.result() is ReasonCode.API_SERVER_AWAY
    assert not node.records.pods
    assert node.specs == {}
