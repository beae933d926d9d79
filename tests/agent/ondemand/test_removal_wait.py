"""The wait for room on a full node: its time runs while the agent runs."""

import asyncio
from contextlib import closing

import pytest

from gpuvirt.agent.ondemand.ondemandallocator import ALLOCATE_S, PAUSE_S, RECHECK_S, WAIT_S, RemovalWait
from gpuvirt.clock import Deadline, Signal
from tests.stoppedclock import StoppedClock


async def look(removal_wait: RemovalWait, clock: StoppedClock, stopped_s: float = 0.0) -> bool:
    """Wait for a change that does not come, in a new request; the process is stopped meanwhile."""
    with closing(Deadline(clock, ALLOCATE_S)) as request:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(removal_wait.wait(Signal(), request))
            await clock.settle()
            clock.stop(stopped_s)
            await clock.advance(RECHECK_S)
    return waiting.result()


@pytest.mark.parametrize(
    ("in_wait_s", "between_s"), [(0.0, 0.0), (100.0, 0.0), (0.0, 100.0)], ids=["no stop", "in a wait", "between waits"]
)
async def test_the_time_in_which_the_agent_was_stopped_does_not_count(in_wait_s: float, between_s: float) -> None:
    """vGPUs of ended pods are removed by the agent itself: a pod would be refused for good, and room comes at once."""
    clock = StoppedClock()
    removal_wait = RemovalWait(clock)
    assert await look(removal_wait, clock, in_wait_s)
    clock.stop(between_s)
    looks, waits = 1, removal_wait.waits
    while await look(removal_wait, clock):
        looks += 1
    assert looks == pytest.approx(WAIT_S / RECHECK_S, abs=3)
    assert (waits, removal_wait.waits) == (True, False)
    assert not await look(removal_wait, clock), "the pods after it don't wait"
    await clock.advance(PAUSE_S)
    assert await look(removal_wait, clock)
    removal_wait.end()
    assert (removal_wait.waits, clock.next_s) == (False, None)


async def test_a_wait_that_is_given_up_ends_at_its_deadline() -> None:
    """The kubelet has closed the connection, for example."""
    clock = StoppedClock()
    removal_wait = RemovalWait(clock)
    assert await look(removal_wait, clock)
    await clock.advance(WAIT_S)
    assert not removal_wait.waits
    await clock.advance(1.0)
    assert clock.next_s is None


async def test_a_request_waits_until_its_own_deadline_only() -> None:
    """The kernel has taken most of its time."""
    clock = StoppedClock()
    removal_wait = RemovalWait(clock)
    with closing(Deadline(clock, RECHECK_S)) as request:
        async with asyncio.TaskGroup() as group:
            group.create_task(removal_wait.wait(Signal(), request))
            await clock.settle()
            await clock.advance(RECHECK_S)
        assert not await removal_wait.wait(Signal(), request)
    assert await look(removal_wait, clock), "the next request has a deadline of its own"
    removal_wait.end()
