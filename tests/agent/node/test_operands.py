"""An agent changes vGPUs beside NVIDIA's device plugin: the plugin is stopped during a change, and only then."""

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

from gpuvirt.agent.agent import Agent
from gpuvirt.facts.ids import NodeName, PciAddress
from gpuvirt.hardware.scan import scan
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import NodeRequest, Observed, OperandsObserved, StateName
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.node.desirednode import RequestTerms
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import HostSpec, SlotSpec, load_host
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import SimKubelet, running
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import change_host_in
from tests.agent.kubelet.kubeletnode import CLOCK, agent_on, options_for, until
from tests.agent.node.nodewithvgpus import FIRST, T4_4Q, T4_8Q, VGPU, of, types
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

SECOND = PciAddress("0000:5e:00.0")
PLUGIN = "nvidia.com/gpu.deploy.sandbox-device-plugin"
POD = "gpu-operator/nvidia-sandbox-device-plugin-daemonset-7xk2q"
RUNNING, ENDING, GONE = OperandsObserved((PLUGIN,), (POD,)), OperandsObserved((), (POD,)), OperandsObserved()


def state(agent: Agent) -> tuple[StateName | None, str]:
    published = agent.reports.vgpus.get()
    assert published is not None
    return published.name, published.reason


@asynccontextmanager
async def vgpu_host(kernel: SimKernel, folder: Path, vgpus: int = 8) -> AsyncIterator[SimNode]:
    """Run an agent that only changes vGPUs, and has created the desired vGPUs of T4-8Q."""
    async with running_node(kernel, folder, VGPU, vgpus_only=True) as node:
        node.agent.observations.observe_operands(GONE)
        await want(node, "T4-8Q")
        assert types(kernel) == {"T4-8Q": vgpus}
        assert not node.agent.observations.operands_away.get()
        node.agent.observations.observe_operands(RUNNING)
        await node.advance(20)
        kernel.writes.clear()
        yield node


async def want(node: SimNode, name: str) -> None:
    node.agent.observations.take_request(NodeRequest(Observed(name), Observed(None)))
    for _ in range(3):
        await node.advance(2)
        await node.report_account()
    await node.advance(20)


async def test_an_agent_for_vgpus_only_offers_no_resource_and_changes_no_driver(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("2xA10")
    drivers = {function.address: function.driver for function in scan(kernel).functions.values()}
    async with running_node(kernel, tmp_path, VGPU, vgpus_only=True) as node:
        node.agent.observations.observe_operands(GONE)
        await want(node, "default")
        assert node.offered == {}
        assert {gpu.desired for gpu in node.view.gpus} == {None}
    assert {function.address: function.driver for function in scan(kernel).functions.values()} == drivers


async def test_no_vgpu_is_changed_before_the_plugin_has_stopped_and_the_kubelet_counts_no_vgpu(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    async with vgpu_host(kernel, tmp_path) as node:
        node.count(T4_8Q, *(vgpu for gpu in scan(kernel).vgpu_hosts for vgpu in of(kernel, gpu)))
        await want(node, "T4-4Q")
        for observed in (RUNNING, ENDING, None):
            node.agent.observations.observe_operands(observed)
            await node.report_account()
            await node.advance(5)
            assert node.agent.observations.operands_away.get()
            assert state(node.agent)[0] is StateName.PENDING
            assert "DevicePluginStillRunning" in state(node.agent)[1]
        node.agent.observations.observe_operands(GONE)
        await node.report_account()
        await node.advance(1)
        assert "AllocationsUnknown" in state(node.agent)[1], (
            "a single reading may be older than the plugin's last answer"
        )
        await node.advance(4)
        await node.report_account()
        assert "StillAllocatable" in state(node.agent)[1]
        assert kernel.writes == []
        node.count(T4_8Q)
        await node.report_account()
        await node.advance(5)
        assert types(kernel) == {"T4-4Q": 16}
        assert not node.agent.observations.operands_away.get()
        assert state(node.agent) == (StateName.SUCCESS, "")


async def test_no_vgpu_is_changed_while_the_kubelet_counts_one_of_another_gpu_of_the_unit(tmp_path: Path) -> None:
    slots = tuple(SlotSpec(at=gpu, board="T4", group=31, numa=0) for gpu in (FIRST, SECOND))
    kernel = build_host(HostSpec(about="two T4 in one group", slots=slots))
    async with vgpu_host(kernel, tmp_path, vgpus=4) as node:
        node.agent.observations.observe_operands(GONE)
        node.count(T4_8Q, *of(kernel, SECOND))
        for _ in range(3):
            await want(node, "T4-4Q")
        assert "StillAllocatable" in state(node.agent)[1]
        assert kernel.writes == []


async def test_the_plugin_is_not_stopped_for_a_change_that_is_known_to_fail(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    async with vgpu_host(kernel, tmp_path) as node:
        for vgpu in kernel.mdev.devices:
            kernel.faults.fail(HostPath(f"/sys/bus/mdev/devices/{vgpu}/iommu_group"), errno.EIO)
        node.count(T4_8Q, *kernel.mdev.devices)
        node.agent.observations.take_request(NodeRequest(Observed("T4-4Q"), Observed(None)))
        away = set[bool]()
        for _ in range(120):
            await node.report_account()
            await node.advance(1)
            away.add(node.agent.observations.operands_away.get())
        assert away == {False}
        assert state(node.agent)[0] is StateName.FAILED
        assert "Unread" in state(node.agent)[1]
        assert kernel.writes == []


async def test_a_plugin_that_does_not_stop_may_start_again_and_is_stopped_later(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    async with vgpu_host(kernel, tmp_path) as node:
        await want(node, "T4-4Q")
        node.agent.observations.observe_operands(ENDING)
        away = []
        for _ in range(60):
            await node.report_account()
            await node.advance(10)
            away.append(node.agent.observations.operands_away.get())
        assert set(away) == {True, False}, "the plugin may start again for a while, and is then asked to stop again"
        assert state(node.agent)[0] is StateName.PENDING
        assert POD in state(node.agent)[1]
        assert kernel.writes == []
        node.agent.observations.observe_operands(GONE)
        for _ in range(40):
            await node.report_account()
            await node.advance(10)
        assert types(kernel) == {"T4-4Q": 16}
        assert not node.agent.observations.operands_away.get()


async def test_the_plugin_may_start_again_once_no_change_is_needed(simulated: Simulated, tmp_path: Path) -> None:
    async with vgpu_host(simulated("4xT4"), tmp_path) as node:
        await want(node, "T4-4Q")
        assert node.agent.observations.operands_away.get()
        await want(node, "T4-8Q")
        assert not node.agent.observations.operands_away.get()


async def test_the_plugin_starts_again_while_the_rest_of_a_change_waits_for_a_vm(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    async with vgpu_host(kernel, tmp_path) as node:
        vgpu = of(kernel, FIRST)[0]
        node.hold(T4_8Q, vgpu)
        guest = kernel.start_vm(kernel.mdev.devices[vgpu].group)
        node.agent.observations.observe_operands(GONE)
        await want(node, "T4-4Q")
        assert types(kernel) == {"T4-8Q": 1, "T4-4Q": 12}
        assert not node.agent.observations.operands_away.get(), "the rest waits for the VM, which may run for weeks"
        assert state(node.agent)[0] is StateName.PENDING
        assert "VgpuInUse" in state(node.agent)[1]
        kernel.end_vm(guest)
        node.free(vgpu)
        await node.report_account()
        await node.report_account()
        await node.advance(30)
        assert types(kernel) == {"T4-4Q": 16}


async def test_a_restarted_agent_without_a_change_to_make_lets_the_plugin_start(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    async with vgpu_host(kernel, tmp_path) as node:
        await want(node, "T4-4Q")
        assert node.agent.observations.operands_away.get()
    async with running_node(kernel, tmp_path, VGPU, vgpus_only=True) as node:
        node.agent.observations.observe_operands(ENDING)
        await want(node, "T4-8Q")
        assert not node.agent.observations.operands_away.get()
        assert kernel.writes == []


class Operator:
    """NVIDIA's operator, as far as it stops and starts its device plugin."""

    def __init__(self, vgpu_host: Agent, kernel: SimKernel, kubelet: SimKubelet, folder: Path) -> None:
        self.vgpu_host = vgpu_host
        self.kernel = kernel
        self.kubelet = kubelet
        self.runs = False
        self.written_beside_it = 0
        """The number of writes to the host while the plugin ran."""
        self._options = replace(options_for(kernel, kubelet.paths.root), ledger=folder / "plugin/ledger.json")

    async def run(self) -> None:
        while True:
            before = len(self.kernel.writes)
            async with agent_on(self._options) as plugin:
                self.vgpu_host.observations.observe_operands(RUNNING)
                await until(
                    lambda: (
                        plugin.host_observed and all(resource.registered for resource in plugin.views.get().resources)
                    )
                )
                self.runs = True
                await until(self.vgpu_host.observations.operands_away.get)
                self.written_beside_it += len(self.kernel.writes) - before
                self.runs = False
                self.vgpu_host.observations.observe_operands(ENDING)
            self.vgpu_host.observations.observe_operands(GONE)
            await until(lambda: not self.vgpu_host.observations.operands_away.get())


async def test_a_config_changes_the_nodes_resources_beside_a_plugin_and_a_kubelet(
    short_path: Path, tmp_path: Path
) -> None:
    kernel = build_host(load_host("4xT4"), where="4xT4")
    options = options_for(kernel, short_path, Settings(mode=DesiredMode.VGPU, vgpu_config="T4-8Q"))
    options = replace(
        options,
        ledger=tmp_path / "ledger.json",
        change_host=change_host_in(tmp_path, kernel, SimTools(kernel)),
        node_name=NodeName("node01"),
        terms=replace(options.terms, vgpus_only=True, request=RequestTerms(in_cluster=True)),
        config_file=tmp_path / "config.yaml",
    )
    async with running(short_path, CLOCK) as kubelet, agent_on(options) as agent, asyncio.TaskGroup() as group:
        operator = Operator(agent, kernel, kubelet, tmp_path)
        task = group.create_task(operator.run())
        agent.observations.take_request(NodeRequest(config=Observed(None)))
        await until(lambda: operator.runs and kubelet.allocatable().get(T4_8Q) == 8)
        pod = await kubelet.run_pod("vm", Container("compute", {T4_8Q: 1}))
        agent.observations.take_request(NodeRequest(config=Observed("T4-4Q")))
        await until(lambda: operator.runs and kubelet.allocatable().get(T4_4Q) == 12)
        await until(lambda: kubelet.allocatable()[T4_8Q] == 1)
        assert pod.held[0].devices[0] in types_by_id(kernel)
        kubelet.end_pod("vm")
        await until(lambda: operator.runs and kubelet.allocatable().get(T4_4Q) == 16)
        (tmp_path / "config.yaml").write_text(
            "version: v1\nvgpu-configs: {mine: [{devices: all, vgpu-devices: {T4-16Q: 1}}]}\n"
        )
        agent.observations.take_request(NodeRequest(config=Observed("mine")))
        await until(lambda: operator.runs and kubelet.allocatable().get("nvidia.com/GRID_T4-16Q") == 4)
        assert operator.written_beside_it == 0
        await until(lambda: state(agent)[0] is StateName.SUCCESS)
        assert [note.code for note in agent.views.get().problems] == []
        task.cancel()


def types_by_id(kernel: SimKernel) -> dict[str, str]:
    return {vgpu.id: str(vgpu.type) for host in scan(kernel).vgpu_hosts.values() for vgpu in host.live}
