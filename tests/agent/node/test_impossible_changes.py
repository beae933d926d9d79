"""A change that can't be completed removes no vGPU, and a change that was rolled back is not repeated at once."""

import errno
from collections import Counter
from pathlib import Path

import pytest

from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.snapshot import Facts
from gpuvirt.hardware.access.tools import Program
from gpuvirt.hardware.scan import scan
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed, StateName
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
VGPU = Settings(mode=DesiredMode.VGPU)
SLOW = Intervals(
    nodes_s=150.0, brief_s=150.0, users_s=300.0, suspicious_users_s=150.0, whole_s=300.0, state_file_s=600.0
)
"""The agent scans the host less often, so that simulated hours pass quickly."""


def want(node: SimNode, mode: str) -> None:
    node.agent.observations.take_request(NodeRequest(Observed(None), Observed(None), spec=Observed(GpuNodeSpec(mode))))


async def hours(node: SimNode, count: float) -> None:
    """Let time pass, while the kubelet reports the allocations at intervals."""
    for _ in range(round(count * 12)):
        await node.report_account()
        await node.advance(300)


def vgpus(kernel: SimKernel) -> set[str]:
    return {vgpu.id for host in scan(kernel).vgpu_hosts.values() for vgpu in host.live}


def on_vfio(kernel: SimKernel, *gpus: PciAddress) -> bool:
    return all(kernel.pci.functions[gpu].driver == "vfio-pci" for gpu in gpus)


def notes(node: SimNode) -> list[Reason]:
    return [note for note in node.view.problems if note.code is not ReasonCode.CARRIES_VGPUS]


def writes(kernel: SimKernel) -> Counter[str]:
    """Return how often each kind of attribute was written."""
    return Counter(path.rpartition("/")[2] for path, _ in kernel.writes)


async def with_vgpus(kernel: SimKernel, folder: Path) -> set[str]:
    """Create vGPUs on a host's GPUs and return their ids."""
    async with running_node(kernel, folder, VGPU, watches_gpu_node=True, intervals=SLOW) as node:
        want(node, "vgpu")
        for _ in range(3):
            await node.report_account()
            await node.advance(60)
        assert notes(node) == []
    kernel.writes.clear()
    return vgpus(kernel)


@pytest.mark.parametrize("name", ["2xA10-sriov", "2xA10-vgpu", "4xL40S"])
async def test_vgpus_stay_while_the_program_that_disables_their_vfs_is_missing(
    simulated: Simulated, tmp_path: Path, name: str
) -> None:
    kernel = simulated(name)
    vgpus_before = await with_vgpus(kernel, tmp_path)
    programs = {Program.NVIDIA_SMI}
    tools = SimTools(kernel, programs=programs)
    async with running_node(kernel, tmp_path, VGPU, tools=tools, watches_gpu_node=True, intervals=SLOW) as node:
        want(node, "passthrough")
        await hours(node, 0.75)
        assert (vgpus(kernel), kernel.writes) == (vgpus_before, [])
        assert {note.code for note in notes(node)} == {ReasonCode.PREREQUISITE_MISSING}
        assert "needs sriov-manage" in notes(node)[0].text
        assert "seen: no sriov-manage in /" in notes(node)[0].text
        state = node.agent.reports.workload.get()
        assert state is not None
        assert state.name is StateName.FAILED
        assert "sriov-manage" in state.reason
        programs.add(Program.SRIOV_MANAGE)
        await hours(node, 0.25)
        assert vgpus(kernel) == set()
        assert notes(node) == []


async def test_vgpus_stay_where_the_driver_for_the_whole_gpu_cannot_be_loaded(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("2xA10-sriov")
    vgpus_before = await with_vgpus(kernel, tmp_path)
    kernel.pci.forget_driver("vfio-pci")
    modules = {"nvidia"}
    tools = SimTools(kernel, modules)
    async with running_node(kernel, tmp_path, VGPU, tools=tools, watches_gpu_node=True, intervals=SLOW) as node:
        want(node, "passthrough")
        await hours(node, 0.75)
        assert (vgpus(kernel), kernel.writes, tools.loaded) == (vgpus_before, [], [])
        assert {note.code for note in notes(node)} == {ReasonCode.PREREQUISITE_MISSING}
        assert "vfio-pci" in notes(node)[0].text
        modules.add("vfio-pci")
        await hours(node, 0.25)
        assert on_vfio(kernel, FIRST, SECOND)
        assert tools.loaded == ["vfio-pci"]


async def test_vgpus_stay_while_a_program_of_the_host_keeps_the_gpu_open(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10-sriov")
    vgpus_before = await with_vgpus(kernel, tmp_path)
    job = kernel.start_process("python3", "/dev/nvidia0")
    async with running_node(kernel, tmp_path, VGPU, watches_gpu_node=True, intervals=SLOW) as node:
        want(node, "passthrough")
        await hours(node, 0.75)
        stay = {vgpu for vgpu in vgpus_before if vgpu in vgpus(kernel)}
        assert len(stay) == 2, "the vGPUs of one GPU"
        assert writes(kernel)["remove"] == 2, "the vGPUs of the other GPU are removed"
        assert writes(kernel)["create"] == 0
        assert "is in use by python3" in notes(node)[0].text
        kernel.end_vm(job)
        await hours(node, 0.25)
        assert on_vfio(kernel, FIRST, SECOND)


async def test_vgpus_stay_where_their_gpu_could_not_be_isolated(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10-sriov")
    vgpus_before = await with_vgpus(kernel, tmp_path)
    kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{FIRST}/iommu_group"), errno.ENOENT)
    async with running_node(kernel, tmp_path, VGPU, watches_gpu_node=True, intervals=SLOW) as node:
        want(node, "passthrough")
        await hours(node, 1)
        assert writes(kernel)["create"] == 0
        assert len(vgpus(kernel) & vgpus_before) == 2
        assert ReasonCode.NO_IOMMU_GROUP in {note.code for note in notes(node)}


@pytest.mark.parametrize("writes_node_counts", [False, True])
async def test_a_rollback_does_not_shorten_the_backoff(
    simulated: Simulated, tmp_path: Path, writes_node_counts: bool
) -> None:
    """A snapshot taken during an attempt arrives after the attempt, as from a watcher whose scan was still running."""
    kernel = simulated("2xA10-sriov")
    vgpus_before = await with_vgpus(kernel, tmp_path)
    tools, seen = SimTools(kernel), list[Facts]()

    def fail(command: object) -> None:
        seen.append(scan(kernel))
        raise OSError(errno.EIO, "Input/output error", str(command))

    tools.before = fail
    async with running_node(
        kernel,
        tmp_path,
        VGPU,
        tools=tools,
        watches_gpu_node=True,
        writes_node_counts=writes_node_counts,
        intervals=SLOW,
    ) as node:
        want(node, "passthrough")
        for _ in range(30):
            await node.report_account()
            await node.advance(5)
            while seen:
                node.agent.observations.observe_facts(seen.pop())
                await node.settle()
            await node.advance(115)
        assert vgpus(kernel) == vgpus_before, "the same ids"
        tries = writes(kernel)["remove"] // len(vgpus_before)
        assert writes(kernel) == {"remove": tries * len(vgpus_before), "create": tries * len(vgpus_before)}
        assert 3 <= tries <= 10, "in an hour: after 5 s, 10 s, 20 s ..."
        assert {note.code for note in notes(node)} == {ReasonCode.STEP_FAILED}
        want(node, "vgpu")
        await node.advance(60)
        assert notes(node) == []
        tools.before = lambda _: None
        want(node, "passthrough")
        await node.settle()
        await hours(node, 0.25)
        assert on_vfio(kernel, FIRST, SECOND), "the desired state changed, so the agent tries at once"


async def test_a_driver_change_that_is_rolled_back_is_retried_with_backoff(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("2xA10-sriov")
    await with_vgpus(kernel, tmp_path)
    kernel.pci.functions[FIRST].group = None  # "vfio-pci: probe of 0000:65:00.0 failed with error -22"
    link = HostPath(f"/sys/bus/pci/devices/{FIRST}/driver")
    async with running_node(kernel, tmp_path, VGPU, watches_gpu_node=True, intervals=SLOW) as node:
        want(node, "passthrough")
        for _ in range(30):
            before = len(kernel.writes)
            await node.report_account()
            await node.advance(5)
            if len(kernel.writes) > before:
                kernel.faults.fail(link, errno.ENOENT)
                node.agent.observations.observe_facts(scan(kernel))
                kernel.faults.heal()
                await node.settle()
            await node.advance(115)
        of_first = [path for path, data in kernel.writes if path.endswith("/unbind") and data.decode() == FIRST]
        assert 3 <= len(of_first) <= 10, "in an hour: after 5 s, 10 s, 20 s ..."
        assert (kernel.pci.functions[FIRST].driver, on_vfio(kernel, SECOND)) == ("nvidia", True)
        assert ReasonCode.STEP_FAILED in {note.code for note in notes(node)}
