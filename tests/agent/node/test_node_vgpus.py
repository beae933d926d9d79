"""The agent creates the vGPUs of the node's label: it withdraws a vGPU before it removes it, and waits for VMs."""

from collections import Counter
from pathlib import Path

import pytest

from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.scan import scan
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import ConfigText, NodeRequest, Observed, StateName
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.node.nodewithvgpus import FIRST, T4_4Q, T4_8Q, VGPU, of, types
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

pytestmark = pytest.mark.usefixtures("worker")

NO_FILE = NodeRequest(configs=Observed(None))


def notes(node: SimNode) -> set[ReasonCode]:
    return {note.code for note in node.view.problems}


async def want(node: SimNode, name: str | None) -> None:
    """Set the node's label to the name of a config, without a ConfigMap."""
    node.agent.observations.take_request(NodeRequest(Observed(name), Observed(None)))
    await node.advance(2)
    await node.report_account()
    await node.advance(20)


def state(node: SimNode) -> StateName | None:
    published = node.agent.reports.vgpus.get()
    return published.name if published is not None else None


async def test_the_label_sets_the_vgpus_and_the_offered_resources(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, VGPU) as node:
        await want(node, "T4-4Q")
        assert types(kernel) == {"T4-4Q": 16}
        assert {gpu.desired for gpu in node.view.gpus} == {"vgpu"}, "the desired mode, not the driver that it needs"
        assert {name: len(devices) for name, devices in node.offered.items() if devices} == {T4_4Q: 16}
        assert state(node) is StateName.SUCCESS
        await want(node, "T4-8Q")
        assert types(kernel) == {"T4-8Q": 8}
        assert {name: len(devices) for name, devices in node.offered.items() if devices} == {T4_8Q: 8}
        assert notes(node) == set()
        assert node.agent.telemetry.gpu_changes["vgpus", "done"] == 8


async def test_an_absent_label_means_the_default_and_an_unknown_label_changes_nothing(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    before = types(kernel)
    async with running_node(kernel, tmp_path, VGPU) as node:
        await node.report_account()
        await node.advance(60)
        assert (types(kernel), state(node)) == (before, None)
        await want(node, None)
        assert types(kernel) == {"T4-8Q": 8}
    kernel.writes.clear()
    async with running_node(kernel, tmp_path, VGPU) as node:  # the API server is away
        await node.report_account()
        await node.advance(60)
        assert (kernel.writes, state(node)) == ([], StateName.SUCCESS)


async def test_an_allocated_vgpu_is_replaced_only_after_its_pod_ends(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, VGPU) as node:
        await want(node, "T4-8Q")
        vgpu = of(kernel, FIRST)[0]
        node.allocate(T4_8Q, [vgpu])
        node.hold(T4_8Q, vgpu)
        guest = kernel.start_vm(kernel.mdev.devices[vgpu].group)
        await want(node, "T4-4Q")
        assert of(kernel, FIRST) == [vgpu]
        assert types(kernel) == {"T4-8Q": 1, "T4-4Q": 12}
        assert kernel.vfio.requests == []
        assert state(node) is StateName.PENDING
        assert notes(node) == {ReasonCode.VGPU_IN_USE}
        assert any("pod default/vm-a" in note.text for note in node.view.problems)
        assert node.offered[T4_8Q] == {vgpu: False}, "the vGPU stays listed, and no other pod gets it"
        kernel.end_vm(guest)
        node.free(vgpu)
        await node.report_account()
        await node.report_account()
        await node.advance(30)
        assert types(kernel) == {"T4-4Q": 16}
        assert (state(node), notes(node)) == (StateName.SUCCESS, set())


async def test_no_vgpu_is_removed_while_the_kubelet_still_counts_it(simulated: Simulated, tmp_path: Path) -> None:
    """The kubelet may admit a pod by its old count, whatever list the agent has sent."""
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, VGPU) as node:
        await want(node, "T4-8Q")
        vgpu = of(kernel, FIRST)[0]
        node.agent.observations.take_request(NodeRequest(config=Observed("T4-4Q")))
        await node.advance(60)
        assert types(kernel) == {"T4-8Q": 8}, (
            "the kubelet has not reported the allocations since the agent withdrew the vGPUs"
        )
        assert node.offered[T4_8Q] == {}
        node.count(T4_8Q, vgpu)
        await node.report_account()
        await node.advance(60)
        assert of(kernel, FIRST) == [vgpu]
        assert types(kernel)["T4-4Q"] == 12
        node.count(T4_8Q)
        await node.report_account()
        await node.advance(20)
        assert types(kernel) == {"T4-4Q": 16}


async def test_an_impossible_config_is_reported_and_changes_nothing(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, VGPU) as node:
        await want(node, "T4-8Q")
        kernel.writes.clear()
        for name, text in (
            ("T4-5Q", "but no vGPU config has this name"),
            ("A10-4Q", "selects no GPU of this node"),
        ):
            await want(node, name)
            published = node.agent.reports.vgpus.get()
            assert published is not None
            assert published.name is StateName.FAILED
            assert text in published.reason
        assert kernel.writes == []
        await want(node, "T4-4Q")
        assert state(node) is StateName.SUCCESS


async def test_an_unreadable_config_map_keeps_the_configs_of_before(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")

    async def observe(node: SimNode, text: str | None) -> None:
        observed = Observed(
            ConfigText(text, "ConfigMap gpuvirt/configs, key config.yaml") if text is not None else None
        )
        node.agent.observations.take_request(NodeRequest(Observed("mine"), observed))
        await node.advance(2)
        await node.report_account()
        await node.advance(20)

    good = "version: v1\nvgpu-configs: {mine: [{devices: [0], vgpu-devices: {T4-16Q: 1}}]}\n"
    async with running_node(kernel, tmp_path, VGPU) as node:
        await observe(node, good)
        assert types(kernel)["T4-16Q"] == 1
        await observe(node, good.replace("v1", "v2"))
        assert notes(node) == {ReasonCode.CONFIG_INVALID}
        assert state(node) is StateName.FAILED
        await observe(node, None)
        assert notes(node) == {ReasonCode.CONFIG_INVALID}
    kernel.writes.clear()
    async with running_node(kernel, tmp_path, VGPU) as node:
        await node.report_account()
        await node.advance(60)
        assert (kernel.writes, state(node)) == ([], StateName.FAILED), "the configs are still gone"
        await observe(node, good.replace("T4-16Q: 1", "T4-1Q: 16"))
        assert types(kernel)["T4-1Q"] >= 16
        assert notes(node) == set()


async def test_a_vgpu_that_another_program_removed_is_created_again(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, VGPU) as node:
        await want(node, "T4-4Q")
        before = of(kernel, FIRST)
        kernel.write(HostPath(f"/sys/bus/mdev/devices/{before[0]}/remove"), b"1")
        await node.advance(30)
        assert of(kernel, FIRST) == before


async def test_vgpus_have_the_same_ids_after_a_reboot(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, VGPU) as node:
        await want(node, "T4-4Q")
        before = {gpu: of(kernel, gpu) for gpu in scan(kernel).vgpu_hosts}
        node.allocate(T4_4Q, [before[FIRST][2]])
        node.hold(T4_4Q, before[FIRST][2])
        await node.report_account()
        held = dict(node.held)
    again = simulated("4xT4")
    again.reboot_id()
    for device in list(again.mdev.devices):
        again.write(HostPath(f"/sys/bus/mdev/devices/{device}/remove"), b"1")
    async with running_node(again, tmp_path, VGPU) as node:
        node.held = held
        await node.report_account()
        await node.advance(30)
        assert {gpu: of(again, gpu) for gpu in scan(again).vgpu_hosts} == before
        every = {vgpu: True for vgpus in before.values() for vgpu in vgpus}
        assert node.offered[T4_4Q] == every, "a vGPU that a reboot has taken is no PCI function"


async def test_no_vgpus_are_created_on_gpus_without_mode_vgpu(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, Settings()) as node:
        before = types(kernel)
        await want(node, "T4-4Q")
        assert (types(kernel), state(node)) == (before, None)


async def test_vgpus_and_passthrough_on_gpus_of_the_same_node(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    settings = Settings(modes={FIRST: DesiredMode.VGPU, "0000:86:00.0": DesiredMode.PASSTHROUGH})
    async with running_node(kernel, tmp_path, settings) as node:
        await want(node, "T4-4Q")
        assert len(of(kernel, FIRST)) == 4
        assert kernel.pci.functions[PciAddress("0000:86:00.0")].driver == "vfio-pci"
        assert types(kernel)["T4-1Q"] == 4, "of a GPU that is left alone"


SIZES = """version: v1
vgpu-configs:
  mine:
    - {devices: [1], vgpu-devices: {A10-12Q: 1, A10-4Q: 1}, sizes: mixed, scheduler: equal-share}
"""
PARTS = """version: v1
vgpu-configs:
  mine: [{devices: [1], vgpu-devices: {A30-1-6C: 4}}]
"""


@pytest.mark.parametrize(
    ("name", "text", "then"),
    [("2xA10-vgpu", SIZES, {"A10-12Q": 1, "A10-4Q": 1}), ("2xA30", PARTS, {"A30-1-6C": 4})],
)
async def test_the_mode_of_a_gpu_is_switched_where_a_config_needs_it(
    simulated: Simulated, tmp_path: Path, name: str, text: str, then: dict[str, int]
) -> None:
    kernel = simulated(name)
    tools = SimTools(kernel)
    async with running_node(kernel, tmp_path, VGPU, tools=tools) as node:
        gpu = node.view.gpus[1].address
        node.agent.observations.take_request(NodeRequest(Observed("mine"), Observed(ConfigText(text, "a ConfigMap"))))
        for _ in range(4):
            await node.report_account()
            await node.advance(10)
        assert state(node) is StateName.SUCCESS, node.agent.reports.vgpus.get()
        host = scan(kernel).vgpu_hosts[gpu]
        assert Counter(str(vgpu.type).rpartition(" ")[2] for vgpu in host.live) == then
        asked = len(tools.commands)
        await node.advance(120)
        assert len(tools.commands) == asked, "the agent does not set a mode that the GPU has already"


async def test_a_change_that_is_refused_is_tried_after_growing_pauses(simulated: Simulated, tmp_path: Path) -> None:
    """nvidia-smi is asked again after each attempt: a plan that waits for its answer is no new circumstance."""
    kernel = simulated("2xA10-vgpu")
    gpu = PciAddress("0000:b1:00.0")
    configs = "version: v1\nvgpu-configs:\n  equal: [{devices: all, vgpu-devices: {A10-12Q: 2}, sizes: equal}]\n"
    configs += "  mixed: [{devices: all, vgpu-devices: {A10-12Q: 1, A10-4Q: 2}, sizes: mixed}]\n"
    async with running_node(kernel, tmp_path, VGPU) as node:
        for name in ("equal", "mixed"):
            if name == "mixed":
                assert types(kernel)["A10-12Q"] >= 2
                kernel.open_native(gpu, "python3", kernel.nodes_of(gpu)[0])
            node.agent.observations.take_request(NodeRequest(Observed(name), Observed(ConfigText(configs, "configs"))))
            for _ in range(3 if name == "equal" else 60):
                await node.advance(10)
                await node.report_account()
        assert ReasonCode.IN_USE in notes(node)
        assert node.agent.telemetry.gpu_changes["vgpus", "InUse"] < 12
