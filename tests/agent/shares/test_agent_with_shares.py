"""The whole agent in mode shared on a simulated worker VM with a simulated kubelet."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.agent.agent import Agent
from gpuvirt.agent.cluster.gpunode import status_of
from gpuvirt.agent.cluster.nodelabels import shared_claim
from gpuvirt.agent.process import pages
from gpuvirt.agent.shares.nodeshares import NodeShares
from gpuvirt.facts.ids import PciAddress, PodUid
from gpuvirt.kube.kinds.gpunode import READY, GpuNode, Status
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed
from gpuvirt.model.desired.settings import Enforcement, HamiCore, Settings, ShareSettings
from gpuvirt.model.inventory.inventory import Mode
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.shares.annotations import SHARED_GPUS_ANNOTATION, shared_gpus
from gpuvirt.model.shares.demand import ContainerDemand, ContainerKind, ContainerName, Demand, Units
from gpuvirt.model.shares.node.choice import PodOnNode
from gpuvirt.model.shares.placement import GpuId
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.devices.nvidia import gpu_uuid
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import Pod, SimKubelet, running
from gpuvirt_sim.kubelet.starting import StartError, start_container
from tests.agent.kubelet.kubeletnode import CLOCK, agent_on, options_for, until
from tests.agent.shares.sharednode import ELF, VGPU, nvidia_spec

FIRST, SECOND = (GpuId(gpu_uuid(PciAddress(address))) for address in ("0000:02:00.0", "0000:02:01.0"))
SHARED = Settings(mode=DesiredMode.SHARED)


@asynccontextmanager
async def sharing_vm(
    folder: Path, settings: Settings = SHARED, kernel: SimKernel | None = None
) -> AsyncIterator[tuple[SimKubelet, Agent, NodeShares]]:
    """Run the agent of a VM with two GPUs, only the first of which has a CDI device of NVIDIA."""
    kernel = kernel or build_host(load_host("vm-2xV100"), where="vm-2xV100")
    (folder / "cdi").mkdir()
    (folder / "cdi/nvidia.json").write_text(nvidia_spec({FIRST: 0}))
    options = replace(options_for(kernel, folder, settings), cdi_folder=folder / "cdi")
    async with running(folder, CLOCK) as kubelet, agent_on(options) as agent:
        assert agent.shares is not None
        yield kubelet, agent, agent.shares


def gpunode_status(agent: Agent) -> Status:
    """Return the status of the GpuNode."""
    view = agent.views.get()
    return status_of(view, GpuNode(metadata=Metadata(name="node")), view.at)


def report(pod: Pod, shares: NodeShares) -> None:
    """Have the API server report a pod whose container requests 300 units."""
    demand = Demand((ContainerDemand(ContainerName("main"), ContainerKind.APP, Units(300)),))
    shares.pods.observe({PodUid(pod.uid): PodOnNode(PodUid(pod.uid), "default", "p", demand)})


async def test_the_agent_gives_a_pod_its_gpu_and_shows_what_it_withholds(short_path: Path) -> None:
    async with sharing_vm(short_path) as (kubelet, agent, shares):
        assert VGPU not in kubelet.capacity(), "nothing is offered before the runtime is known to apply CDI"
        shares.observe_node("containerd://2.1.3")
        await until(lambda: kubelet.allocatable().get(VGPU) == 1000)
        await until(lambda: dict(agent.views.get().shared.capacity) == {FIRST: 1000})
        assert any(f"{SECOND} has no CDI device" in note.text for note in agent.views.get().problems)
        pod = await kubelet.run_pod("p", Container("main", {VGPU: 300}))
        report(pod, shares)
        assert (await start_container(kubelet, pod, "main", short_path / "cdi")).env["GPUVIRT_GPUS"] == FIRST
        await until(lambda: gpunode_status(agent).totals.allocated == 1)
        assert {gpu.address: gpu.users for gpu in gpunode_status(agent).gpus} == {
            "0000:02:00.0": ("pod default/p",),
            "0000:02:01.0": (),
        }
        page = str(pages(agent)["/metrics"]().body)
        assert f'gpuvirt_shared_gpu_units{{gpu="{FIRST}"}} 1000' in page
        assert f'gpuvirt_shared_gpu_units{{gpu="{SECOND}"}} 0' in page
        assert f'gpuvirt_shared_gpu_units_used{{gpu="{FIRST}",namespace="default"}} 300' in page
        (short_path / "cdi/other.json").write_text(nvidia_spec({SECOND: 1}))
        await until(lambda: kubelet.allocatable().get(VGPU) == 2000)
        await until(lambda: dict(agent.views.get().shared.capacity) == {FIRST: 1000, SECOND: 1000})
        await until(lambda: not any("CDI device" in note.text for note in agent.views.get().problems))


async def test_no_more_pods_get_units_while_the_driver_is_replaced(short_path: Path) -> None:
    """The pod that has a share keeps it, and is named: NVIDIA's operator waits for it."""
    async with sharing_vm(short_path) as (kubelet, agent, shares):
        shares.observe_node("containerd://2.1.3")
        await until(lambda: kubelet.allocatable().get(VGPU) == 1000)
        pod = await kubelet.run_pod("p", Container("main", {VGPU: 300}))
        report(pod, shares)
        await start_container(kubelet, pod, "main", short_path / "cdi")
        shares.observe_node("containerd://2.1.3", "nvidia.com/gpu-driver-upgrade-state=upgrade-required")
        await until(lambda: kubelet.allocatable().get(VGPU) == 300)
        await until(lambda: any(note.code is ReasonCode.DRIVER_UPGRADE for note in agent.views.get().problems))
        (note,) = (note for note in agent.views.get().problems if note.code is ReasonCode.DRIVER_UPGRADE)
        assert "default/p" in str(note.seen)
        ready = next(condition for condition in gpunode_status(agent).conditions if condition.type == READY)
        assert (ready.status, ready.reason, "default/p" in ready.message) == ("False", "DriverUpgrade", True)
        assert not agent.views.get().shared.capacity
        again = await start_container(kubelet, pod, "main", short_path / "cdi")
        assert again.env["GPUVIRT_GPUS"] == FIRST, "its container may restart"
        shares.observe_node("containerd://2.1.3", "")
        await until(lambda: kubelet.allocatable().get(VGPU) == 1000)
        await until(lambda: not any(note.code is ReasonCode.DRIVER_UPGRADE for note in agent.views.get().problems))


@pytest.mark.parametrize(("memory_mib", "limit"), [({}, "4915m"), ({"Tesla V100-PCIE-16GB": 15_900}, "4770m")])
async def test_the_settings_make_shares_limits(short_path: Path, memory_mib: dict[str, int], limit: str) -> None:
    library = short_path / "libvgpu.so"
    library.write_bytes(ELF)
    shares_by = ShareSettings(
        enforcement=Enforcement.HAMI_CORE, hami_core=HamiCore(library=str(library)), gpu_memory_mib=memory_mib
    )
    async with sharing_vm(short_path, Settings(mode=DesiredMode.SHARED, shares=shares_by)) as (kubelet, agent, shares):
        shares.observe_node("containerd://2.1.3")
        await until(lambda: kubelet.allocatable().get(VGPU) == 1000)
        pod = await kubelet.run_pod("p", Container("main", {VGPU: 300}))
        report(pod, shares)
        started = await start_container(kubelet, pod, "main", short_path / "cdi")
        assert started.env["CUDA_DEVICE_MEMORY_LIMIT_0"] == limit
        assert started.mounts["/usr/local/gpuvirt/libvgpu.so"] == str(library)
        page = str(pages(agent)["/metrics"]().body)
        labels = f'gpu="{FIRST}",namespace="default",pod="p",container="main",enforcement="hami-core"'
        assert f"gpuvirt_share_memory_limit_bytes{{{labels}}}" in page


async def test_refused_shares_are_in_the_metrics(short_path: Path) -> None:
    async with sharing_vm(short_path) as (kubelet, agent, shares):
        shares.observe_node("containerd://2.1.3")
        await until(lambda: kubelet.allocatable().get(VGPU) == 1000)
        pod = await kubelet.run_pod("p", Container("main", {VGPU: 300}))
        (short_path / "cdi/nvidia.json").unlink()
        await until(lambda: not shares.state.get().node.capacity)
        report(pod, shares)
        for _ in range(2):
            with pytest.raises(StartError, match="NoRoom"):
                await start_container(kubelet, pod, "main", short_path / "cdi")
        page = str(pages(agent)["/metrics"]().body)
        assert 'gpuvirt_shares_refused_total{step="pre-start",reason="NoRoom"} 2' in page


async def test_a_gpu_with_shares_stays_shared_until_their_pods_end(short_path: Path) -> None:
    async with sharing_vm(short_path) as (kubelet, agent, shares):
        shares.observe_node("containerd://2.1.3")
        await until(lambda: kubelet.allocatable().get(VGPU) == 1000)
        pod = await kubelet.run_pod("p", Container("main", {VGPU: 300}))
        report(pod, shares)
        await start_container(kubelet, pod, "main", short_path / "cdi")
        agent.observations.take_request(NodeRequest(spec=Observed(GpuNodeSpec(mode="container"))))
        await until(lambda: [gpu.mode for gpu in agent.views.get().gpus] == [Mode.SHARED, Mode.CONTAINER])
        assert agent.views.get().gpus[0].users == ("pod default/p",)
        await until(lambda: kubelet.allocatable().get(VGPU) == 300)
        await start_container(kubelet, pod, "main", short_path / "cdi")
        kubelet.end_pod("p")
        shares.pods.observe({})
        await until(lambda: [gpu.mode for gpu in agent.views.get().gpus] == [Mode.CONTAINER, Mode.CONTAINER])


async def test_units_of_a_pod_stay_listed_while_their_gpu_is_withheld(short_path: Path) -> None:
    async with sharing_vm(short_path) as (kubelet, agent, shares):
        shares.observe_node("containerd://2.1.3")
        await until(lambda: kubelet.allocatable().get(VGPU) == 1000)
        pod = await kubelet.run_pod("p", Container("main", {VGPU: 300}))
        report(pod, shares)
        await start_container(kubelet, pod, "main", short_path / "cdi")
        (short_path / "cdi/nvidia.json").unlink()
        await until(lambda: kubelet.allocatable().get(VGPU) == 300)
        assert not agent.views.get().shared.capacity


async def test_a_node_that_shares_no_gpu_registers_no_units(short_path: Path) -> None:
    async with sharing_vm(short_path, Settings()) as (kubelet, agent, shares):
        shares.observe_node("containerd://2.1.3")
        await until(lambda: agent.host_observed)
        await CLOCK.sleep(0.1)
        assert VGPU not in kubelet.capacity()


async def test_the_nodes_annotation_lacks_what_a_deleted_pod_keeps(short_path: Path) -> None:
    kernel = build_host(load_host("vm-2xV100"), where="vm-2xV100")
    async with sharing_vm(short_path, kernel=kernel) as (kubelet, agent, shares):
        shares.observe_node("containerd://2.1.3")
        await until(lambda: kubelet.allocatable().get(VGPU) == 1000)
        pod = await kubelet.run_pod("p", Container("main", {VGPU: 300}))
        report(pod, shares)
        await start_container(kubelet, pod, "main", short_path / "cdi")
        process = kernel.start_process("pause", pod=pod.uid)
        kubelet.end_pod("p")
        shares.pods.observe({})

        await until(lambda: annotated(agent) == {FIRST: 700, SECOND: 0})
        assert agent.views.get().gpus[0].users == ("pod default/p",)
        assert agent.views.get().gpus[0].units == 1000
        kernel.end_vm(process)
        await until(lambda: annotated(agent) == {FIRST: 1000, SECOND: 0})


@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_gpu_that_fails_stays_in_the_nodes_annotation_without_units(short_path: Path, is_gone: bool) -> None:
    """An extender that starts later then knows where the GPU's pod is, and gives other GPUs of the node to others."""
    kernel = build_host(load_host("vm-2xV100"), where="vm-2xV100")
    async with sharing_vm(short_path, kernel=kernel) as (kubelet, agent, shares):
        (short_path / "cdi/nvidia.json").write_text(nvidia_spec({FIRST: 0, SECOND: 1}))
        shares.observe_node("containerd://2.1.3")
        await until(lambda: kubelet.allocatable().get(VGPU) == 2000)
        pod = await kubelet.run_pod("p", Container("main", {VGPU: 300}))
        report(pod, shares)
        gpu = GpuId((await start_container(kubelet, pod, "main", short_path / "cdi")).env["GPUVIRT_GPUS"])
        address = PciAddress("0000:02:00.0" if gpu == FIRST else "0000:02:01.0")
        if is_gone:
            kernel.unplug(address)
        else:
            kernel.fall_off_bus(address)
        other = SECOND if gpu == FIRST else FIRST
        await until(lambda: annotated(agent) == {gpu: 0, other: 1000})
        assert kubelet.capacity()[VGPU] >= 1000


def annotated(agent: Agent) -> dict[GpuId, int]:
    """Return the units of GPUs in the annotation that the agent keeps on its node."""
    text = shared_claim(agent.views).keys(Metadata(name="node")).annotations.get(SHARED_GPUS_ANNOTATION)
    return {gpu: int(units) for gpu, units in shared_gpus(text).items()} if text else {}
