"""The wait for room on a full node: its time runs while the agent runs."""

import asyncio
import threading

import pytest

from gpuvirt.clock import RealClock, Signal
from gpuvirt.node.ondemand import patience as patience_module
from gpuvirt.node.ondemand.patience import Patience


async def looks(patience: Patience, stopped_s: float) -> int:
    """Return how often a wait looked for room; the process is stopped once in it."""
    changed, found = Signal(), 0

    def stop() -> None:
        assert threading.Event().wait(stopped_s) is False

    asyncio.get_running_loop().call_soon(stop)
    while await patience.wait(changed):
        found += 1
    return found


async def test_the_time_in_which_the_agent_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """vGPUs of ended pods are removed by the agent itself: a pod would be refused for good, and room comes at once."""
    monkeypatch.setattr(patience_module, "WAIT_S", 0.6)
    monkeypatch.setattr(patience_module, "RECHECK_S", 0.2)
    patience = Patience(RealClock())
    assert await looks(patience, stopped_s=1.2) >= 2
    assert not await patience.wait(Signal()), "the pods after it don't wait"
