"""The demo's story, where things take longer than usual."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpuvirt.cli import demo
from gpuvirt.clock import RealClock
from gpuvirt.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.sim.kubelet.client import PluginClient

SLOW_S = 0.3


def test_a_kubelet_that_reads_the_lists_late(
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
