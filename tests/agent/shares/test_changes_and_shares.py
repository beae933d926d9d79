"""Changes of GPUs and shares exclude each other, as changes and devices do."""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec.structs import replace

from gpuvirt.agent.change.gate import gaterecord
from gpuvirt.agent.change.gate.gate import Gate
from gpuvirt.agent.change.steps.changes import Change, StalePlanError
from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.agent.shares.gpuclaims import GatedGpus
from gpuvirt.agent.shares.nodeshares import NodeShares, stored_shares
from gpuvirt.agent.shares.shareallocator import GpuChoice
from gpuvirt.agent.shares.sharefiles import SpecFiles
from gpuvirt.facts.ids import DeviceId, PciAddress, PodUid, slot_of
from gpuvirt.model.change.plan import Scope, StepScope
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Enforcement, Settings, ShareSettings
from gpuvirt.model.node.shares import CdiReading, ObservedShares, ShareState, decide_shares
from gpuvirt.model.offers.sharing import SharedOffer
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.shares.annotations import placement
from gpuvirt.model.shares.demand import ContainerDemand, ContainerKind, ContainerName, Demand, Units
from gpuvirt.model.shares.node.choice import PodOnNode
from gpuvirt.model.shares.node.nvidiacdi import parse
from gpuvirt.model.shares.node.records import record_of
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.model.shares.sharedgpus import SharedGpu, SharedGpus
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.nvidia import gpu_uuid
from gpuvirt_sim.kernel import SimKernel
from tests.agent.change.changes import UNGATED
from tests.agent.node.simnode import SimNode, sharing_node
from tests.agent.shares.sharednode import nvidia_spec
from tests.inlineworker import InlineWorker
from tests.sim.simulated import Simulated

pytestmark = pytest.mark.usefixtures("worker")

T = TypeVar("T")
FIRST, SECOND = PciAddress("0000:02:00.0"), PciAddress("0000:02:01.0")
A, B = GpuId(gpu_uuid(FIRST)), GpuId(gpu_uuid(SECOND))
GONE = GpuId("GPU-gone")
MAIN, UNIT = ContainerName("main"), DeviceId("u7")
POD = PodUid("8a5c0001-0000-4000-8000-000000000001")
SHARED = Settings(mode=DesiredMode.SHARED)


class HeldWorker:
    """A worker whose jobs wait until the test lets them run."""

    def __init__(self) -> None:
        self.may_run = asyncio.Event()
        self.waits = asyncio.Event()

    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        del name, timeout_s
        self.waits.set()
        await self.may_run.wait()
        return job()


class Shared:
    """A node with two shared GPUs, and the choice among them."""

    def __init__(self, node: SimNode, folder: Path, shares: NodeShares) -> None:
        self.node, self.shares = node, shares
        self.gates = Gate(folder / "locks")
        """The gates as another process has them."""
        specs = [spec for spec in [parse("nvidia.json", nvidia_spec({A: 0, B: 1}).encode())] if spec is not None]
        self.shares.observe_node("containerd://2.1.3")
        self._specs = specs
        self.judge()
        claims: GatedGpus = node.agent.gpu_claims
        self.choice = GpuChoice(self.shares, claims)

    def judge(self) -> None:
        """Conclude which GPUs containers can get."""
        reading = CdiReading(tuple(self._specs), None)
        self.shares.observed.set(replace(self.shares.observed.get(), cdi=reading))
        self.node.agent.decide()

    async def choose(self, gpu: GpuId | None, units: int = 1000) -> str:
        """Return the GPU of a new pod, or the code of the reason against it."""
        demand = Demand((ContainerDemand(MAIN, ContainerKind.APP, Units(units)),))
        desired = placement(demand, {MAIN: {gpu: Units(units)}}) if gpu is not None else None
        try:
            record = await self.choice.choose(PodOnNode(POD, "default", "p", demand, desired), UNIT)
        except AllocationRefusedError as error:
            return error.reason.code
        return ",".join(record.placement.used)

    def change(self, *functions: PciAddress) -> tuple[Change, StepScope]:
        """Return a change by the agent itself."""
        return Change(self.node.agent._state.changes, "unit", lambda: True, None), StepScope.of(functions)


@asynccontextmanager
async def shared(
    kernel: SimKernel, folder: Path, worker: InlineWorker | HeldWorker | None = None
) -> AsyncIterator[Shared]:
    files = SpecFiles(folder / "cdi", (folder / "cdi",))
    shares = stored_shares(folder / "shares.json", files, worker or InlineWorker(), ShareSettings())
    async with sharing_node(kernel, folder, SHARED, shares=shares) as node:
        await node.report_account()
        found = Shared(node, folder, shares)
        assert dict(found.shares.state.get().node.capacity) == {A: 1000, B: 1000}
        yield found


def code_of(view: NodeView, address: PciAddress) -> ReasonCode | None:
    return next(gpu.withheld.code if gpu.withheld else None for gpu in view.shared.gpus if gpu.address == address)


async def test_a_gpu_that_another_process_changes_is_no_choice(simulated: Simulated, tmp_path: Path) -> None:
    async with shared(simulated("vm-2xV100"), tmp_path) as node:
        with node.gates.change("unit", lambda: (slot_of(FIRST),)):
            assert await node.choose(A) == B
        assert node.shares.records.pods[POD].placement.used == {B: 1000}


async def test_no_share_is_given_while_another_process_changes_all_gpus(simulated: Simulated, tmp_path: Path) -> None:
    async with shared(simulated("vm-2xV100"), tmp_path) as node:
        with node.gates.change("unit", lambda: (slot_of(FIRST), slot_of(SECOND))):
            assert await node.choose(A) == ReasonCode.UNIT_BUSY
            assert not node.shares.records.pods
        assert await node.choose(A) == A


async def test_a_gpu_that_a_command_drains_is_no_choice(simulated: Simulated, tmp_path: Path) -> None:
    async with shared(simulated("vm-2xV100"), tmp_path) as node:
        node.gates.drain("unit", (slot_of(FIRST),), "unbind")
        assert await node.choose(A) == B
        node.gates.stop_draining([slot_of(FIRST)])


async def test_a_gpu_that_the_agent_itself_changes_is_no_choice(simulated: Simulated, tmp_path: Path) -> None:
    async with shared(simulated("vm-2xV100"), tmp_path) as node:
        change, scope = node.change(FIRST)
        with change.under_way(UNGATED):
            change.claim(scope)
            assert node.choice.why_refused(Units(1000)) is None, "the other GPU can give them"
            assert await node.choose(A) == B
            reason = node.choice.why_refused(Units(1000))
            assert reason is not None
            assert reason.code is ReasonCode.UNIT_BUSY, "Allocate names the change, not the lack of room"
            reason = node.choice.why_refused(Units(1500))
            assert reason is not None
            assert reason.code is ReasonCode.NO_ROOM, "without the change there was none, either"


async def test_a_container_does_not_start_again_while_its_gpu_is_changed(simulated: Simulated, tmp_path: Path) -> None:
    async with shared(simulated("vm-2xV100"), tmp_path) as node:
        assert await node.choose(A) == A
        record = node.shares.records.pods[POD]
        with (
            node.gates.change("unit", lambda: (slot_of(FIRST),)),
            pytest.raises(AllocationRefusedError, match="UnitBusy"),
        ):
            node.choice.claim_again(record, MAIN, UNIT)
        node.choice.claim_again(record, MAIN, UNIT)


async def test_a_change_of_another_process_waits_until_the_kubelet_shows_the_units(
    simulated: Simulated, tmp_path: Path
) -> None:
    async with shared(simulated("vm-2xV100"), tmp_path) as node:
        assert await node.choose(A) == A
        content = (tmp_path / f"locks/{slot_of(FIRST)}.lock").read_text()
        (line,) = content.splitlines()
        (allocated,) = gaterecord.lines_of(line, 0.0)
        assert allocated.device == UNIT
        assert gaterecord.unsettled([allocated], None, ()) == (allocated,), "no account shows it"
        shown = gaterecord.AccountReading(allocated.at_s + 1, frozenset({UNIT}))
        assert not gaterecord.unsettled([allocated], None, (shown,)), "its units can't be mapped, and refuse"


async def test_a_change_sees_a_share_before_it_is_on_disk(simulated: Simulated, tmp_path: Path) -> None:
    worker = HeldWorker()
    async with shared(simulated("vm-2xV100"), tmp_path, worker) as node:
        async with asyncio.TaskGroup() as group:
            choosing = group.create_task(node.choose(A))
            await worker.waits.wait()
            change, scope = node.change(FIRST)
            with change.under_way(UNGATED), pytest.raises(StalePlanError, match="allocated to pod default/p"):
                change.claim(scope)
            other, free = node.change(SECOND)
            with other.under_way(UNGATED):
                other.claim(free)
            worker.may_run.set()
        assert choosing.result() == A
        assert not node.shares.pending.get()
        with change.under_way(UNGATED), pytest.raises(StalePlanError, match="allocated to pod default/p"):
            change.claim(scope)


async def test_a_share_that_could_not_be_recorded_keeps_no_gpu(simulated: Simulated, tmp_path: Path) -> None:
    async with shared(simulated("vm-2xV100"), tmp_path) as node:
        (tmp_path / "shares.json").mkdir()
        assert await node.choose(A) == ReasonCode.LEDGER_NOT_WRITTEN
        assert not node.shares.records.pods
        change, scope = node.change(FIRST)
        with change.under_way(UNGATED):
            change.claim(scope)


async def test_a_gpu_that_has_left_its_driver_since_the_last_scan_is_no_choice(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("vm-2xV100")
    async with shared(kernel, tmp_path) as node:
        kernel.rebind(FIRST, None)
        assert await node.choose(A) == B


async def test_a_gpu_whose_driver_is_unread_is_no_choice(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("vm-2xV100")
    async with shared(kernel, tmp_path) as node:
        for address in (FIRST, SECOND):
            kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{address}/driver"), errno.EIO)
        assert await node.choose(A) == ReasonCode.UNREAD
        assert not node.shares.records.pods


async def test_a_gpu_that_its_driver_does_not_show_any_more_is_no_choice(simulated: Simulated, tmp_path: Path) -> None:
    async with shared(simulated("vm-2xV100"), tmp_path) as node:
        known = node.shares.state.get().node
        state = node.shares.state.get()
        node.shares.follow(replace(state, node=replace(known, capacity={GONE: Units(1000)})))
        assert await node.choose(GONE) == ReasonCode.GPU_NOT_INITIALIZED
        node.shares.follow(
            replace(node.shares.state.get(), node=replace(known, capacity={GONE: Units(1000), **known.capacity}))
        )
        assert await node.choose(GONE) in {A, B}


async def test_a_container_does_not_start_again_while_its_driver_does_not_show_its_gpu(
    simulated: Simulated, tmp_path: Path
) -> None:
    demand = Demand((ContainerDemand(MAIN, ContainerKind.APP, Units(1000)),))
    record = record_of("default", "p", demand, {MAIN: {GONE: Units(1000)}})
    async with shared(simulated("vm-2xV100"), tmp_path) as node:
        with pytest.raises(AllocationRefusedError, match="GpuNotInitialized"):
            node.choice.claim_again(record, MAIN, UNIT)


async def test_a_gpu_that_is_drained_or_blocked_offers_no_units(simulated: Simulated, tmp_path: Path) -> None:
    async with shared(simulated("vm-2xV100"), tmp_path) as node:
        node.gates.drain("unit", (slot_of(FIRST),), "unbind")
        await node.node.advance(5)
        assert code_of(node.node.view, FIRST) is ReasonCode.UNIT_BUSY
        assert dict(node.node.view.shared.capacity) == {B: 1000}
        node.gates.stop_draining([slot_of(FIRST)])
        await node.node.advance(5)
        assert len(node.node.view.shared.capacity) == 2
        node.node.agent._state.observe_gates(Scope(), {FIRST: "unbind 0000:02:00.0"})
        node.node.agent.decide()
        assert code_of(node.node.view, FIRST) is ReasonCode.WRITE_BLOCKED


async def test_a_gpu_that_the_agent_changes_offers_no_units(simulated: Simulated, tmp_path: Path) -> None:
    async with shared(simulated("vm-2xV100"), tmp_path) as node:
        change, scope = node.change(SECOND)
        with change.under_way(UNGATED):
            change.claim(scope)
            node.node.agent.decide()
            assert dict(node.node.view.shared.capacity) == {A: 1000}
        node.node.agent.decide()
        assert len(node.node.view.shared.capacity) == 2


def offer_of(units: Mapping[GpuId, int]) -> SharedOffer:
    addresses = {A: FIRST, B: SECOND}
    gpus = tuple(SharedGpu(addresses[gpu], gpu, Units(count)) for gpu, count in units.items())
    return SharedOffer(SharedGpus(gpus, is_known=True, enforcement=Enforcement.NONE), minors={A: 0, B: 1})


def test_a_gpu_that_is_no_longer_shared_gets_no_share_while_cdi_specs_cannot_be_read() -> None:
    both, spec = {A: 1000, B: 1000}, parse("nvidia.json", nvidia_spec({A: 0, B: 1}).encode())
    assert spec is not None
    observed = ObservedShares(runtime="containerd://2.1.3", cdi=CdiReading((spec,), None))
    state = decide_shares(observed, ShareState(), offer_of(both))
    assert dict(state.node.capacity) == both
    state = decide_shares(observed, state, offer_of({B: 500}))
    assert dict(state.node.capacity) == {B: 500}
    state = decide_shares(observed, state, offer_of(both))
    assert dict(state.node.capacity) == {B: 500}, "more is offered only once the specs were read again"
    state = decide_shares(replace(observed, cdi=CdiReading((spec,), None)), state, offer_of(both))
    assert dict(state.node.capacity) == both
