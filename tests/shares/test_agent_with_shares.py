"""The whole agent with shared GPUs and a simulated kubelet: units are offered, and reasons are in its view."""

from dataclasses import replace
from pathlib import Path

from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.node.choice import Sharing
from gpuvirt.sim.builder import build_host
from gpuvirt.sim.hostspec import load_host
from gpuvirt.sim.kubelet.kubelet import running
from tests.kubeletnode import CLOCK, agent_on, options_for, until
from tests.shares.sharednode import BOTH, GPUS, VGPU, nvidia_spec


async def test_the_agent_offers_units_beside_devices_and_shows_what_it_withholds(short_path: Path) -> None:
    kernel = build_host(load_host("2xA10"), where="2xA10")
    (short_path / "cdi").mkdir()
    (short_path / "cdi/nvidia.json").write_text(nvidia_spec({GPUS[0]: 0}))
    options = replace(options_for(kernel, short_path), cdi_folder=short_path / "cdi")
    async with running(short_path, CLOCK) as kubelet, agent_on(options) as agent:
        await until(lambda: len(kubelet.allocatable()) == 1)
        assert VGPU not in kubelet.capacity(), "a node that shares no GPU registers no units"
        assert agent.shares is not None
        agent.shares.publish(BOTH)
        agent.shares.observe_runtime("containerd://2.1.3")
        await until(lambda: kubelet.allocatable().get(VGPU) == 1000)
        assert agent.shares.why_withheld(GPUS[0]) is None
        assert agent.shares.why_withheld(GPUS[1]) is not None
        await until(lambda: any("GPU-b has no CDI device" in note.text for note in agent.views.get().notes))
        agent.shares.publish(Sharing({GPUS[0]: Units(500)}, minors=BOTH.minors))
        await until(lambda: kubelet.allocatable().get(VGPU) == 500)
        await until(lambda: not any("CDI device" in note.text for note in agent.views.get().notes))
