"""The agent reports the vGPU scheduler of each GPU: it runs nvidia-smi seldom, and never before it changes vGPUs."""

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from typing_extensions import override

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.vgpu import Scheduler, SchedulerPolicy
from gpuvirt.loops.serialworker import WorkerBlockedError
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import ConfigText, NodeRequest, Observed, StateName
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.offers.view import NodeView, SchedulerView
from gpuvirt.paths import HostPath
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.node.simnode import SimNode, running_node
from tests.inlineworker import InlineWorker
from tests.sim.simulated import Simulated

VGPU = Settings(mode=DesiredMode.VGPU)
FIRST, EMPTY = PciAddress("0000:3b:00.0"), PciAddress("0000:86:00.0")
BEST = SchedulerView(SchedulerPolicy.BEST_EFFORT, None)
EQUAL_4 = SchedulerView(SchedulerPolicy.EQUAL_SHARE, 4)
SHARED = """version: v1
vgpu-configs:
  mine: [{devices: all, vgpu-devices: {T4-4Q: 4}, scheduler: {policy: equal-share, timeslice-ms: 4}}]
"""

T = TypeVar("T")


class HeldWorker(InlineWorker):
    """A worker in which jobs of one name wait until the test releases them."""

    def __init__(self, held: str) -> None:
        self.released = asyncio.Event()
        self.waiting = 0
        self._held = held

    @override
    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        if name == self._held:
            self.waiting += 1
            await self.released.wait()
            self.waiting -= 1
        return job()


class AsleepWorker(InlineWorker):
    """A worker that is blocked for scheduler queries."""

    def __init__(self) -> None:
        self.queries = 0

    @override
    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        if name == "ask for the scheduler":
            self.queries += 1
            raise WorkerBlockedError("it sleeps in the kernel")
        return job()


def scheduler_queries(tools: SimTools) -> Counter[str]:
    """Return how often the agent ran nvidia-smi for each GPU's scheduler."""
    return Counter(command[4] for command in tools.commands if command[:3] == ("nvidia-smi", "vgpu", "-ss"))


def shown(node: SimNode) -> list[SchedulerView | None]:
    return [gpu.scheduler for gpu in node.view.gpus]


def set_by_hand(kernel: SimKernel, gpu: PciAddress, view: SchedulerView) -> None:
    kernel.vfs.carriers[gpu].vgpu_host.scheduler = Scheduler(view.policy, view.timeslice_ms)


async def want(node: SimNode, name: str, text: str | None = None) -> None:
    configs = ConfigText(text, "a ConfigMap") if text is not None else None
    node.agent.observations.take_request(NodeRequest(Observed(name), Observed(configs)))
    await node.advance(2)
    await node.report_account()
    await node.advance(60)


def state(node: SimNode) -> StateName | None:
    queries = node.agent.reports.vgpus.get()
    return queries.name if queries is not None else None


async def test_the_scheduler_is_shown_and_read_again_at_intervals(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    tools = SimTools(kernel)
    async with running_node(kernel, tmp_path, VGPU, tools=tools) as node:
        await want(node, "T4-8Q")
        assert shown(node) == [BEST] * 4
        queries = scheduler_queries(tools)
        set_by_hand(kernel, FIRST, EQUAL_4)
        await node.advance(500)
        assert (node.gpu(FIRST).scheduler, scheduler_queries(tools)) == (BEST, queries)
        await node.advance(200)
        assert shown(node) == [EQUAL_4, BEST, BEST, BEST]
        assert scheduler_queries(tools) - queries == Counter(list(queries))
        written = msgspec.json.decode((tmp_path / "node.json").read_bytes(), type=NodeView)
        assert written.gpus[0].scheduler == EQUAL_4


async def test_the_scheduler_is_shown_without_a_desired_config(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    set_by_hand(kernel, FIRST, EQUAL_4)
    tools = SimTools(kernel)
    async with running_node(kernel, tmp_path, VGPU, tools=tools) as node:
        await node.advance(60)
        assert shown(node) == [EQUAL_4, BEST, BEST, BEST]
        assert set(scheduler_queries(tools).values()) == {1}
        assert len(tools.commands) == 4, "the agent ran no other command"


async def test_the_scheduler_is_read_again_after_a_change_of_vgpus(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, VGPU) as node:
        await want(node, "T4-8Q")
        set_by_hand(kernel, FIRST, EQUAL_4)
        await want(node, "T4-4Q")
        assert shown(node) == [EQUAL_4, BEST, BEST, BEST]


async def test_no_scheduler_is_read_during_a_change_of_vgpus(simulated: Simulated, tmp_path: Path) -> None:
    kernel, worker = simulated("4xT4"), HeldWorker("change")
    tools = SimTools(kernel)
    async with running_node(kernel, tmp_path, VGPU, tools=tools, change_worker=lambda _: worker) as node:
        await want(node, "T4-4Q")
        queries = scheduler_queries(tools)
        await node.advance(700)
        assert worker.waiting > 0
        assert scheduler_queries(tools) == queries
        worker.released.set()
        await node.advance(60)
        assert state(node) is StateName.SUCCESS
        assert shown(node) == [BEST] * 4
        assert set((scheduler_queries(tools) - queries).values()) == {1}, (
            "each once, since the vGPUs of each were changed"
        )


async def test_no_scheduler_is_read_while_a_change_waits_for_the_kubelet(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    tools = SimTools(kernel)
    async with running_node(
        kernel, tmp_path, Settings(mode=DesiredMode.VGPU, vgpu_config="T4-4Q"), tools=tools
    ) as node:
        node.agent.observations.take_request(NodeRequest(Observed("T4-4Q"), Observed(None)))
        await node.settle()
        queries = scheduler_queries(tools)
        await node.advance(700)
        assert scheduler_queries(tools) == queries
        await node.report_account()
        await node.advance(60)
        assert shown(node) == [BEST] * 4


async def test_schedulers_are_read_of_one_gpu_at_a_time(simulated: Simulated, tmp_path: Path) -> None:
    kernel, worker = simulated("4xT4"), HeldWorker("ask for the scheduler")
    async with running_node(kernel, tmp_path, VGPU, change_worker=lambda _: worker) as node:
        await node.advance(60)
        assert (worker.waiting, shown(node)) == (1, [None] * 4)
        worker.released.set()
        await node.advance(60)
        assert shown(node) == [BEST] * 4


async def test_the_scheduler_of_a_config_is_set_and_shown_and_kept(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    tools = SimTools(kernel)
    async with running_node(kernel, tmp_path, VGPU, tools=tools) as node:
        await want(node, "mine", SHARED)
        await node.report_account()
        await node.advance(20)
        assert (state(node), shown(node)) == (StateName.SUCCESS, [EQUAL_4] * 4)
        queries = scheduler_queries(tools)
        await node.advance(500)
        assert scheduler_queries(tools) == queries
        set_by_hand(kernel, FIRST, BEST)
        await node.advance(300)
        assert (state(node), shown(node)) == (StateName.SUCCESS, [EQUAL_4] * 4)
        assert kernel.vfs.carriers[FIRST].vgpu_host.scheduler == Scheduler(SchedulerPolicy.EQUAL_SHARE, 4)


async def test_the_scheduler_that_a_plan_read_is_shown_at_once(simulated: Simulated, tmp_path: Path) -> None:
    kernel, worker = simulated("4xT4"), HeldWorker("ask for the scheduler")
    async with running_node(kernel, tmp_path, VGPU, change_worker=lambda _: worker) as node:
        await want(node, "mine", SHARED)
        await node.report_account()
        await node.advance(20)
        assert shown(node) == [EQUAL_4] * 4


async def test_the_scheduler_is_read_again_after_the_driver_was_rebound(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    set_by_hand(kernel, EMPTY, EQUAL_4)
    async with running_node(kernel, tmp_path, VGPU) as node:
        await node.advance(60)
        assert node.gpu(EMPTY).scheduler == EQUAL_4
        kernel.write(HostPath("/sys/bus/pci/drivers/nvidia/unbind"), EMPTY.encode())
        await node.advance(0.5)
        assert node.gpu(EMPTY).scheduler is None
        await node.report_account()  # the agent gives the GPU to its driver now
        await node.advance(60)
        assert kernel.pci.functions[EMPTY].driver == "nvidia"
        assert node.gpu(EMPTY).scheduler == BEST


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("4xT4", DesiredMode.UNMANAGED),
        ("4xT4", DesiredMode.CONTAINER),
        ("4xT4", DesiredMode.PASSTHROUGH),
        ("2xA30", DesiredMode.VGPU),
        ("2xFlex170", DesiredMode.VGPU),
        ("2xA10", DesiredMode.VGPU),
    ],
)
async def test_no_scheduler_is_read_of_gpus_without_time_sliced_vgpus(
    simulated: Simulated, tmp_path: Path, name: str, mode: DesiredMode
) -> None:
    """The A30 is in MIG mode, or has no VFs for vGPUs; the A10s are bound to vfio-pci at first."""
    kernel = simulated(name)
    tools = SimTools(kernel)
    async with running_node(kernel, tmp_path, Settings(mode=mode), tools=tools) as node:
        await node.advance(30)
        await node.report_account()
        await node.advance(700)
        assert not scheduler_queries(tools)
        assert set(shown(node)) == {None}


async def test_schedulers_are_read_only_of_gpus_with_mode_vgpu(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    tools = SimTools(kernel)
    async with running_node(kernel, tmp_path, Settings(modes={FIRST: DesiredMode.VGPU}), tools=tools) as node:
        await node.advance(60)
        assert set(scheduler_queries(tools)) == {FIRST}
        assert shown(node) == [BEST, None, None, None]


async def test_a_host_without_nvidia_smi_shows_no_scheduler_and_no_error(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    tools = SimTools(kernel, programs=())
    async with running_node(kernel, tmp_path, VGPU, tools=tools) as node:
        await want(node, "T4-4Q")
        assert (state(node), shown(node), node.view.problems) == (StateName.SUCCESS, [None] * 4, ())


async def test_an_unknown_scheduler_is_read_again(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    tools = SimTools(kernel)

    def fail(command: Sequence[str]) -> None:
        raise OSError(errno.EIO, "Input/output error", command[0])

    tools.before = fail
    async with running_node(kernel, tmp_path, VGPU, tools=tools) as node:
        await node.advance(300)
        assert (shown(node), len(tools.commands), node.view.problems) == ([None] * 4, 4, ())
        tools.before = lambda _: None
        await node.advance(400)
        assert shown(node) == [BEST] * 4


async def test_the_scheduler_of_an_unplugged_gpu_is_forgotten(simulated: Simulated, tmp_path: Path) -> None:
    kernel, worker = simulated("4xT4"), HeldWorker("ask for the scheduler")
    async with running_node(kernel, tmp_path, VGPU, change_worker=lambda _: worker) as node:
        await node.advance(10)
        assert worker.waiting == 1
        for gpu in (FIRST, EMPTY):
            kernel.unplug(gpu)
        await node.advance(10)
        worker.released.set()
        await node.advance(30)
        assert shown(node) == [BEST] * 2


async def test_a_blocked_worker_does_not_fail_a_change_of_vgpus(simulated: Simulated, tmp_path: Path) -> None:
    kernel, worker = simulated("4xT4"), AsleepWorker()
    async with running_node(kernel, tmp_path, VGPU, change_worker=lambda _: worker) as node:
        await want(node, "T4-4Q")
        assert (state(node), shown(node), node.view.problems) == (StateName.SUCCESS, [None] * 4, ())
        assert worker.queries == 8, "one for each GPU, before and after the change"
