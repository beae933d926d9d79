"""An agent that carves beside another's device plugin: that one is away meanwhile, and at no other time."""

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from gpuvirt.facts.ids import NodeName
from gpuvirt.hardware.scan import scan
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import NodeRequest, Observed, OperandsObserved, StateName
from gpuvirt.model.desired.settings import Settings
from gpuvirt.node.agent import Agent
from gpuvirt.node.change.site import Site
from gpuvirt.paths import HostPath
from gpuvirt.sim.builder import build_host
from gpuvirt.sim.hostspec import load_host
from gpuvirt.sim.kernel import SimKernel
from gpuvirt.sim.kubelet.kubelet import Container, SimKubelet, running
from gpuvirt.sim.tools import SimTools
from tests.kubeletnode import CLOCK, agent_on, options_for, until
from tests.nodewithvgpus import FIRST, T4_4Q, T4_8Q, VGPU, of, types
from tests.simnode import SimNode, running_node
from tests.simulated import Simulated

PLUGIN = "nvidia.com/gpu.deploy.sandbox-device-plugin"
POD = "gpu-operator/nvidia-sandbox-device-plugin-daemonset-7xk2q"
RUNNING, ENDING, GONE = OperandsObserved((PLUGIN,), (POD,)), OperandsObserved((), (POD,)), OperandsObserved()


def state(agent: Agent) -> tuple[StateName, str]:
    told = agent.vgpu_states.get()
    assert told is not None
    return told.name, told.reason


@asynccontextmanager
async def vgpu_host(kernel: SimKernel, folder: Path) -> AsyncIterator[SimNode]:
    """Run an agent that only changes vGPUs, and has created what is desired: 8 vGPUs of T4-8Q."""
    async with running_node(kernel, folder, VGPU, vgpus_only=True) as node:
        node.agent.observe_operands(GONE)
        await want(node, "T4-8Q")
        assert types(kernel) == {"T4-8Q": 8}
        assert not node.agent.operands_away.get()
        node.agent.observe_operands(RUNNING)
        await node.advance(20)
        kernel.writes.clear()
        yield node


async def want(node: SimNode, name: str) -> None:
    node.agent.take_request(NodeRequest(Observed(name), Observed(None)))
    for _ in range(3):
        await node.advance(2)
        await node.report_account()
    await node.advance(20)


async def test_nothing_is_offered_and_nothing_moved(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10")
    drivers = {one.address: one.driver for one in scan(kernel).functions.values()}
    async with running_node(kernel, tmp_path, VGPU, vgpus_only=True) as node:
        node.agent.observe_operands(GONE)
        await want(node, "default")
        assert node.offered == {}
        assert {gpu.desired for gpu in node.view.gpus} == {None}
    assert {one.address: one.driver for one in scan(kernel).functions.values()} == drivers


async def test_nothing_is_with_vgpus_before_the_plugin_is_gone_and_the_kubelet_says_so(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    async with vgpu_host(kernel, tmp_path) as node:
        node.count(T4_8Q, *(one for gpu in scan(kernel).vgpu_hosts for one in of(kernel, gpu)))
        await want(node, "T4-4Q")
        for observed in (RUNNING, ENDING, None):
            node.agent.observe_operands(observed)
            await node.report_account()
            await node.advance(5)
            assert node.agent.operands_away.get()
            assert state(node.agent)[0] is StateName.PENDING
            assert "DevicePluginStillRunning" in state(node.agent)[1]
        node.agent.observe_operands(GONE)
        await node.report_account()
        await node.advance(1)
        assert "AllocationsUnknown" in state(node.agent)[1], "one reading may be older than the plugin's last answer"
        await node.advance(4)
        await node.report_account()
        assert "StillAllocatable" in state(node.agent)[1]
        assert kernel.writes == []
        node.count(T4_8Q)
        await node.report_account()
        await node.advance(5)
        assert types(kernel) == {"T4-4Q": 16}
        assert not node.agent.operands_away.get()
        assert state(node.agent) == (StateName.SUCCESS, "")


async def test_a_plugin_is_not_taken_away_for_what_is_known_to_fail(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with vgpu_host(kernel, tmp_path) as node:
        for vgpu in kernel.mdev.devices:
            kernel.faults.fail(HostPath(f"/sys/bus/mdev/devices/{vgpu}/iommu_group"), errno.EIO)
        node.count(T4_8Q, *kernel.mdev.devices)
        node.agent.take_request(NodeRequest(Observed("T4-4Q"), Observed(None)))
        away = set[bool]()
        for _ in range(120):
            await node.report_account()
            await node.advance(1)
            away.add(node.agent.operands_away.get())
        assert away == {False}
        assert state(node.agent)[0] is StateName.FAILED
        assert "NoIommuGroup" in state(node.agent)[1]
        assert kernel.writes == []


async def test_a_plugin_that_does_not_go_comes_back_and_is_asked_again_later(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    async with vgpu_host(kernel, tmp_path) as node:
        await want(node, "T4-4Q")
        node.agent.observe_operands(ENDING)
        away = []
        for _ in range(60):
            await node.report_account()
            await node.advance(10)
            away.append(node.agent.operands_away.get())
        assert set(away) == {True, False}, "it is let back for a while, and then asked again"
        assert state(node.agent)[0] is StateName.PENDING
        assert POD in state(node.agent)[1]
        assert kernel.writes == []
        node.agent.observe_operands(GONE)
        for _ in range(40):
            await node.report_account()
            await node.advance(10)
        assert types(kernel) == {"T4-4Q": 16}
        assert not node.agent.operands_away.get()


async def test_what_a_pod_has_keeps_no_plugin_away(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with vgpu_host(kernel, tmp_path) as node:
        mine = of(kernel, FIRST)[0]
        node.hold(T4_8Q, mine)
        guest = kernel.start_vm(kernel.mdev.devices[mine].group)
        node.agent.observe_operands(GONE)
        await want(node, "T4-4Q")
        assert types(kernel) == {"T4-8Q": 1, "T4-4Q": 12}
        assert not node.agent.operands_away.get(), "the rest waits for the VM, which may run for weeks"
        assert state(node.agent)[0] is StateName.PENDING
        assert "VgpuInUse" in state(node.agent)[1]
        kernel.end_vm(guest)
        node.free(mine)
        await node.report_account()
        await node.report_account()
        await node.advance(30)
        assert types(kernel) == {"T4-4Q": 16}


async def test_an_agent_that_restarts_lets_the_plugin_back_where_nothing_is_to_be_done(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    async with vgpu_host(kernel, tmp_path) as node:
        await want(node, "T4-4Q")
        assert node.agent.operands_away.get()
    async with running_node(kernel, tmp_path, VGPU, vgpus_only=True) as node:
        node.agent.observe_operands(ENDING)
        await want(node, "T4-8Q")
        assert not node.agent.operands_away.get()
        assert kernel.writes == []


class Operator:
    """NVIDIA's operator, as far as it takes its device plugin away and brings it back."""

    def __init__(self, vgpu_host: Agent, kernel: SimKernel, kubelet: SimKubelet, folder: Path) -> None:
        self.vgpu_host = vgpu_host
        self.kernel = kernel
        self.kubelet = kubelet
        self.runs = False
        self.written_beside_it = 0
        """What was written to the host while the plugin ran."""
        self._options = replace(options_for(kernel, kubelet.paths.root), ledger=folder / "plugin/ledger.json")

    async def run(self) -> None:
        while True:
            before = len(self.kernel.writes)
            async with agent_on(self._options) as plugin:
                self.vgpu_host.observe_operands(RUNNING)
                await until(lambda: plugin.looked and all(one.registered for one in plugin.views.get().resources))
                self.runs = True
                await until(self.vgpu_host.operands_away.get)
                self.written_beside_it += len(self.kernel.writes) - before
                self.runs = False
                self.vgpu_host.observe_operands(ENDING)
            self.vgpu_host.observe_operands(GONE)
            await until(lambda: not self.vgpu_host.operands_away.get())


async def test_beside_a_plugin_and_a_kubelet_the_resources_of_the_node_change(short_path: Path, tmp_path: Path) -> None:
    kernel = build_host(load_host("4xT4"), where="4xT4")
    options = replace(
        options_for(kernel, short_path, Settings(mode=DesiredMode.VGPU, vgpu_config="T4-8Q")),
        ledger=tmp_path / "ledger.json",
        moves=Site(kernel, SimTools(kernel), tmp_path / "drivers.json", tmp_path / "locks"),
        node_name=NodeName("node01"),
        vgpus_only=True,
        config_file=tmp_path / "config.yaml",
    )
    async with running(short_path, CLOCK) as kubelet, agent_on(options) as agent, asyncio.TaskGroup() as group:
        operator = Operator(agent, kernel, kubelet, tmp_path)
        task = group.create_task(operator.run())
        agent.take_request(NodeRequest(config=Observed(None)))
        await until(lambda: operator.runs and kubelet.allocatable().get(T4_8Q) == 8)
        pod = await kubelet.run_pod("vm", Container("compute", {T4_8Q: 1}))
        folder = short_path / "pods" / pod.uid
        folder.mkdir(parents=True)
        agent.take_request(NodeRequest(config=Observed("T4-4Q")))
        await until(lambda: operator.runs and kubelet.allocatable().get(T4_4Q) == 12)
        await until(lambda: kubelet.allocatable()[T4_8Q] == 1)
        assert pod.held[0].devices[0] in types_by_id(kernel)
        kubelet.end_pod("vm")
        folder.rmdir()
        await until(lambda: operator.runs and kubelet.allocatable().get(T4_4Q) == 16)
        (tmp_path / "config.yaml").write_text(
            "version: v1\nvgpu-configs: {mine: [{devices: all, vgpu-devices: {T4-16Q: 1}}]}\n"
        )
        agent.take_request(NodeRequest(config=Observed("mine")))
        await until(lambda: operator.runs and kubelet.allocatable().get("nvidia.com/GRID_T4-16Q") == 4)
        assert operator.written_beside_it == 0
        await until(lambda: state(agent)[0] is StateName.SUCCESS)
        assert [note.code for note in agent.views.get().notes] == []
        task.cancel()


def types_by_id(kernel: SimKernel) -> dict[str, str]:
    return {one.id: str(one.type) for host in scan(kernel).vgpu_hosts.values() for one in host.live}
