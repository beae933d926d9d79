"""The demo on slow hosts and kubelets."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.clock import RealClock
from gpuvirt_sim.commands import demo
from gpuvirt_sim.kubelet.client import PluginClient

SLOW_S = 0.3


def test_the_demo_waits_for_a_slow_kubelet(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_once = PluginClient.lists

    async def late(self: PluginClient) -> AsyncIterator[pb.ListAndWatchResponse]:
        await RealClock().sleep(SLOW_S)
        async for answer in at_once(self):
            yield answer

    monkeypatch.setattr(PluginClient, "lists", late)
    asyncio.run(demo.play("8xH100", short_path))
    assert "What to try next" in capsys.readouterr().out


@pytest.mark.parametrize("simulated", ["2xA10-sriov", "2xA10-vgpu", "2xA30", "4xL40S", "2xP100"])
def test_the_demo_shows_vgpus_on_a_host_that_supports_vgpus(
    simulated: str, short_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(demo.play(simulated, short_path))
    reported = capsys.readouterr().out
    assert "Nothing can be offered" not in reported
    before, _, after = reported.partition("The label requests other vGPUs")
    assert "Without a label the node has the config `default`" in before
    pending, _, ended = after.partition("The VM ends")
    assert "nvidia.com/vgpu.config.state=pending: VgpuInUse" in pending
    assert "virt-launcher-vm-c" in pending
    assert "nvidia.com/vgpu.config.state=success" in ended
