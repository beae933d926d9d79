"""The workload label sets the mode of a node's GPUs; pods keep their GPUs, and the node reports the progress."""

from pathlib import Path

import pytest

from gpuvirt.agent.cluster.nodelabels import OF_WORKLOAD, state_labels
from gpuvirt.facts.ids import PciAddress, ResourceName
from gpuvirt.hardware.scan import scan
from gpuvirt.kube.labels import STATE_LABEL, WORKLOAD_STATE_LABEL
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed, StateName
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.offers.view import Registration
from gpuvirt.model.reasons import ReasonCode
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

pytestmark = pytest.mark.usefixtures("worker")

FOLLOWS = Settings(workload_label=True)
T4 = [PciAddress(f"0000:{bus}:00.0") for bus in ("3b", "5e", "86", "af")]
WHOLE, T4_8Q = "nvidia.com/TU104GL_TESLA_T4", "nvidia.com/GRID_T4-8Q"


def drivers(kernel: SimKernel) -> list[str | None]:
    return [kernel.pci.functions[gpu].driver for gpu in T4]


def vgpus(kernel: SimKernel) -> list[int]:
    hosts = scan(kernel).vgpu_hosts
    return [len(hosts[gpu].live) if gpu in hosts else 0 for gpu in T4]


def state(node: SimNode) -> tuple[StateName | None, str]:
    published = node.agent.reports.workload.get()
    assert published is not None
    return published.name, published.reason


def notes(node: SimNode) -> set[ReasonCode]:
    return {note.code for note in node.view.problems}


def vgpu_state(node: SimNode) -> str | None:
    """Return the value that the node's label of the vGPU config's state gets."""
    return state_labels(node.agent.reports.vgpus.get()).labels[STATE_LABEL]


async def label(node: SimNode, value: str | None) -> None:
    """Label the node, and give the agent the time to change the GPUs."""
    node.agent.observations.take_request(NodeRequest(Observed(None), Observed(None), Observed(value)))
    for _ in range(5):
        await node.advance(5)
        await node.report_account()
    await node.advance(5)


async def test_gpus_follow_the_workload_label(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, FOLLOWS) as node:
        await label(node, "vm-passthrough")
        assert drivers(kernel) == ["vfio-pci"] * 4
        assert state(node) == (StateName.SUCCESS, "")
        assert len(node.offered[WHOLE]) == 4
        await label(node, "vm-vgpu")
        assert (drivers(kernel), vgpus(kernel)) == (["nvidia"] * 4, [2] * 4)
        assert state(node) == (StateName.SUCCESS, "")
        assert {name: len(devices) for name, devices in node.offered.items() if devices} == {T4_8Q: 8}
        assert vgpu_state(node) == "success"
        await label(node, "container")
        assert (drivers(kernel), vgpus(kernel)) == (["nvidia"] * 4, [0] * 4)
        assert vgpu_state(node) is None, "no vGPUs are desired any more, so the label goes"
        await label(node, "vm-passthrough")
        assert drivers(kernel) == ["vfio-pci"] * 4
        assert notes(node) == set()


async def test_the_state_of_vgpus_stays_while_it_is_not_known_whether_any_are_desired(
    simulated: Simulated, tmp_path: Path
) -> None:
    async with running_node(simulated("4xT4"), tmp_path, FOLLOWS) as node:
        await node.advance(5)
        assert node.agent.reports.vgpus.get() is None, "the node's labels were not observed yet"
        await label(node, "vm-vgpus")
        assert node.agent.reports.vgpus.get() is None, "the modes from before the restart are not known"
        await label(node, "vm-passthrough")
        assert vgpu_state(node) is None


async def test_a_pods_gpu_keeps_its_driver_and_the_state_names_the_pod(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, FOLLOWS) as node:
        await label(node, "vm-passthrough")
        node.allocate(WHOLE, [T4[1]])
        node.hold(WHOLE, T4[1])
        group = kernel.pci.functions[T4[1]].group
        assert group is not None
        guest = kernel.start_vm(group)
        await label(node, "vm-vgpu")
        assert drivers(kernel) == ["nvidia", "vfio-pci", "nvidia", "nvidia"]
        assert vgpus(kernel) == [2, 0, 2, 2]
        assert state(node)[0] is StateName.PENDING
        assert "pod default/vm-a" in state(node)[1]
        await label(node, "vm-passthrough")
        assert drivers(kernel) == ["vfio-pci"] * 4
        assert state(node) == (StateName.SUCCESS, "")
        await label(node, "container")
        kernel.end_vm(guest)
        node.free(T4[1])
        await label(node, "container")
        await node.advance(60)
        assert drivers(kernel) == ["nvidia"] * 4
        assert kernel.vfio.requests == []
        assert state(node) == (StateName.SUCCESS, "")


async def test_an_unknown_label_value_is_reported_and_changes_nothing(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, FOLLOWS) as node:
        await label(node, "vm-passthrough")
        kernel.writes.clear()
        await label(node, "kata")
        assert kernel.writes == []
        assert state(node)[0] is StateName.FAILED
        assert "is 'kata', so the node keeps its modes" in state(node)[1]
        assert notes(node) == {ReasonCode.CONFIG_INVALID}
        await label(node, "container")
        assert drivers(kernel) == ["nvidia"] * 4
        assert (state(node), notes(node)) == ((StateName.SUCCESS, ""), set())


async def test_an_unknown_label_changes_nothing_and_a_restart_uses_the_label_on_disk(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, Settings(workload_label=True, mode=DesiredMode.PASSTHROUGH)) as node:
        await node.report_account()
        await node.advance(60)
        assert kernel.writes == []
        await label(node, None)
        assert drivers(kernel) == ["vfio-pci"] * 4, "the settings' mode holds where there is no label"
        await label(node, "container")
    kernel.writes.clear()
    async with running_node(kernel, tmp_path, FOLLOWS) as node:  # the API server is away
        await node.report_account()
        await node.advance(60)
        assert (kernel.writes, state(node)) == ([], (StateName.SUCCESS, ""))
        kernel.rebind(T4[0], "vfio-pci")
        await node.advance(5)
        await node.report_account()
        await node.advance(30)
        assert drivers(kernel) == ["nvidia"] * 4, "the agent corrects drift by the desired state on disk"


async def test_modes_for_single_gpus_take_precedence_over_the_label(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    settings = Settings(workload_label=True, modes={T4[3]: DesiredMode.VGPU, T4[0]: DesiredMode.UNMANAGED})
    async with running_node(kernel, tmp_path, settings) as node:
        before = vgpus(kernel)
        await label(node, "vm-passthrough")
        assert drivers(kernel) == ["nvidia", "vfio-pci", "vfio-pci", "nvidia"]
        assert vgpus(kernel) == [before[0], 0, 0, 2]
        kernel.writes.clear()
        await label(node, "container")
        assert kernel.writes == [], "containers and vGPUs can't be on one node"
        assert "the settings set modes for single GPUs" in state(node)[1]


async def test_the_label_is_ignored_unless_the_settings_enable_it(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, Settings()) as node:
        await label(node, "vm-passthrough")
        assert kernel.writes == []
        assert node.agent.reports.workload.get() is None


async def test_no_gpu_returns_to_its_native_driver_before_allocatable_is_corrected(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, FOLLOWS, writes_node_counts=True) as node:
        await label(node, "vm-passthrough")
        node.agent.reports.registration(ResourceName(WHOLE), Registration(registered=True))
        node.agent.observations.observe_node_counts({name: len(devices) for name, devices in offered(node).items()})
        await node.settle()
        kernel.writes.clear()
        node.agent.observations.take_request(NodeRequest(workload=Observed("container")))
        await node.settle()
        await node.report_account()
        await node.advance(2)
        assert len(node.offered[WHOLE]) == 4
        assert kernel.writes == []
        await node.advance(2)
        assert len(node.offered[WHOLE]) == 0
        await node.report_account()
        await node.advance(20)
        assert drivers(kernel) == ["nvidia"] * 4


async def spec(node: SimNode, desired: GpuNodeSpec | None) -> None:
    """Set the spec of the node's GpuNode, and give the agent the time to change the GPUs."""
    node.agent.observations.take_request(NodeRequest(spec=Observed(desired)))
    for _ in range(6):
        await node.advance(5)
        await node.report_account()


async def test_the_spec_takes_precedence_and_the_label_waits_until_the_spec_is_known(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, FOLLOWS, watches_gpu_node=True) as node:
        await label(node, "vm-passthrough")
        assert kernel.writes == [], "an unknown spec may have another mode"
        await spec(node, None)
        assert drivers(kernel) == ["vfio-pci"] * 4
        await spec(node, GpuNodeSpec("vgpu", {T4[0]: "passthrough"}, "T4-4Q"))
        assert (drivers(kernel), vgpus(kernel)) == (["vfio-pci", *["nvidia"] * 3], [0, 4, 4, 4])
        assert notes(node) == set()
        kernel.writes.clear()
        await spec(node, GpuNodeSpec("whole"))
        assert kernel.writes == []
        assert notes(node) == {ReasonCode.CONFIG_INVALID}
    async with running_node(kernel, tmp_path, FOLLOWS, watches_gpu_node=True) as node:  # the API server is away
        await node.report_account()
        await node.advance(60)
        assert kernel.writes == []
        await spec(node, GpuNodeSpec("unmanaged"))
        await spec(node, None)
        assert drivers(kernel) == ["vfio-pci"] * 4, "without a spec the label counts again"


def offered(node: SimNode) -> dict[ResourceName, list[str]]:
    found = node.offered.items()
    return {ResourceName(name): [device for device, well in devices.items() if well] for name, devices in found}


async def test_the_progress_of_a_spec_is_reported_without_a_workload_label(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, Settings(), watches_gpu_node=True) as node:
        await spec(node, GpuNodeSpec("passthrough"))
        assert state(node) == (StateName.SUCCESS, "")
        await spec(node, GpuNodeSpec("whole"))
        assert state(node)[0] is StateName.FAILED
        await spec(node, None)
        assert state_labels(node.agent.reports.workload.get(), OF_WORKLOAD).labels == {WORKLOAD_STATE_LABEL: None}


async def test_a_change_from_passthrough_to_vgpus_is_never_reported_as_failed(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, FOLLOWS) as node:
        await label(node, "vm-passthrough")
        published: list[StateName | None] = []
        node.agent.observations.take_request(NodeRequest(Observed(None), Observed(None), Observed("vm-vgpu")))
        for _ in range(120):
            await node.advance(0.25)
            if (now := node.agent.reports.vgpus.get()) is not None:
                published.append(now.name)
            await node.report_account()
        assert published[-1] is StateName.SUCCESS
        assert StateName.FAILED not in published


async def test_a_node_for_containers_keeps_the_vfs_of_amd_and_intel(simulated: Simulated, tmp_path: Path) -> None:
    """AMD's and Intel's VFs are separate GPUs for containers, and an administrator creates them."""
    kernel = simulated("2xFlex170")
    with_vfs = {gpu: function.virtfns for gpu, function in scan(kernel).functions.items() if function.virtfns}
    assert with_vfs
    for vf in (vf for vfs in with_vfs.values() for vf in vfs):
        kernel.rebind(vf, None)
    async with running_node(kernel, tmp_path, FOLLOWS) as node:
        await label(node, "container")
        functions = scan(kernel).functions
    assert {gpu: functions[gpu].virtfns for gpu in with_vfs} == with_vfs
