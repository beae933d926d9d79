"""The whole agent on a worker VM in mode shared, with a simulated kubelet: what it observes is what it offers."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

from gpuvirt.agent.agent import Agent
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.shares.placement import GpuId
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kubelet.kubelet import SimKubelet, running
from tests.agent.kubelet.kubeletnode import CLOCK, agent_on, options_for, until
from tests.agent.shares.sharednode import VGPU, nvidia_spec


@asynccontextmanager
async def worker(
    folder: Path, name: str, mode: DesiredMode = DesiredMode.SHARED
) -> AsyncIterator[tuple[Agent, SimKubelet]]:
    """Run an agent on a simulated worker VM; NVIDIA's CDI specs are written by the test."""
    kernel = build_host(load_host(name), where=name)
    (folder / "cdi").mkdir()
    options = replace(options_for(kernel, folder, Settings(mode=mode)), cdi_folder=folder / "cdi")
    async with running(folder, CLOCK) as kubelet, agent_on(options) as agent:
        yield agent, kubelet


def gpus_of(view: NodeView) -> Mapping[GpuId, int]:
    """Return the shared GPUs with the numbers of their device nodes."""
    return {gpu.id: gpu.minor or 0 for gpu in view.shared.gpus if gpu.id is not None}


async def test_a_worker_with_half_a_card_offers_half_of_its_units(short_path: Path) -> None:
    async with worker(short_path, "vm-V100-8Q") as (agent, kubelet):
        await until(lambda: bool(agent.views.get().shared.gpus))
        (short_path / "cdi/nvidia.json").write_text(nvidia_spec(gpus_of(agent.views.get())))
        assert agent.shares is not None
        agent.shares.observe_node("containerd://2.1.3")
        await until(lambda: kubelet.allocatable().get(VGPU) == 500)
        (gpu,) = agent.views.get().shared.capacity
        assert agent.views.get().shared.capacity == {gpu: 500}


async def test_a_gpu_without_a_cdi_spec_of_nvidia_is_withheld_in_every_output(short_path: Path) -> None:
    async with worker(short_path, "vm-2xV100") as (agent, kubelet):
        await until(lambda: len(agent.views.get().shared.gpus) == 2)
        first, second = agent.views.get().shared.gpus
        assert first.id is not None
        assert second.id is not None
        (short_path / "cdi/nvidia.json").write_text(nvidia_spec({first.id: first.minor or 0}))
        assert agent.shares is not None
        agent.shares.observe_node("containerd://2.1.3")
        await until(lambda: kubelet.allocatable().get(VGPU) == 1000)
        await until(lambda: dict(agent.views.get().shared.capacity) == {first.id: 1000})
        shown = next(gpu for gpu in agent.views.get().gpus if gpu.address == second.address)
        assert [reason.code for reason in shown.reasons] == [ReasonCode.CDI_SPEC_MISSING]
        (short_path / "cdi/nvidia.json").write_text(nvidia_spec(gpus_of(agent.views.get())))
        await until(lambda: kubelet.allocatable().get(VGPU) == 2000)


async def test_no_units_are_offered_before_the_runtime_is_known(short_path: Path) -> None:
    async with worker(short_path, "vm-2xV100") as (agent, kubelet):
        await until(lambda: len(agent.views.get().shared.gpus) == 2)
        (short_path / "cdi/nvidia.json").write_text(nvidia_spec(gpus_of(agent.views.get())))
        await until(
            lambda: (
                {gpu.withheld.code for gpu in agent.views.get().shared.gpus if gpu.withheld is not None}
                == {ReasonCode.API_SERVER_AWAY}
            )
        )
        assert VGPU not in kubelet.capacity()


async def test_a_node_that_shares_no_gpu_registers_no_units(short_path: Path) -> None:
    async with worker(short_path, "vm-2xV100", DesiredMode.CONTAINER) as (agent, kubelet):
        await until(lambda: agent.host_observed)
        assert agent.shares is not None
        agent.shares.observe_node("containerd://2.1.3")
        await until(lambda: bool(agent.views.get().gpus))
        assert VGPU not in kubelet.capacity()
        assert agent.views.get().shared.gpus == ()
