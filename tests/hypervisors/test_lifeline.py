"""A child dies with the process that started it, and when that process's lease ends, whatever state both are in."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import pytest

from gpuvirt.model.workers.connection import DEAD_AFTER_S, HypervisorCredentials
from gpuvirt.model.workers.hypervisor import VmsUnknown
from gpuvirt_schedules.hypervisors import child
from gpuvirt_schedules.hypervisors.messages import BackEndError, Problem, Start
from tests.hypervisors.simulated import CLOCK, PATIENCE_S, connected, is_running
from tests.mount.mounting import until

NOWHERE = HypervisorCredentials("127.0.0.1:1", "no certificate", "user", "password")
PARENT = """
import asyncio, math, sys
from gpuvirt.clock import RealClock
from gpuvirt_schedules.hypervisors.connection import open_hypervisor
from gpuvirt.model.workers.connection import HypervisorCredentials, HypervisorKind

async def main() -> None:
    clock, lease_s = RealClock(), float(sys.argv[1])
    until_s = clock.monotonic_s() + lease_s
    credentials = HypervisorCredentials("127.0.0.1:1", "no certificate", "user", "password")
    hypervisor = await open_hypervisor(HypervisorKind.VSPHERE, credentials, clock, lambda: until_s)
    await hypervisor.read()
    print(hypervisor.pid, until_s, flush=True)
    await asyncio.sleep(math.inf)

asyncio.run(main())
"""


@contextmanager
def parent(lease_s: float) -> Iterator[tuple["subprocess.Popen[str]", int, float]]:
    """Run a process with a child, and yield it with the child's pid and the end of its lease."""
    command = [sys.executable, "-c", PARENT, str(lease_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, until_s = process.stdout.readline().split()
        assert is_running(int(pid))
        try:
            yield process, int(pid), float(until_s)
        finally:
            process.kill()
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def test_a_child_dies_with_its_parent() -> None:
    with parent(lease_s=1000) as (process, child, _):
        process.kill()
        until(lambda: not is_running(child))


def test_a_child_that_is_stopped_dies_with_its_parent() -> None:
    with parent(lease_s=1000) as (process, child, _):
        os.kill(child, signal.SIGSTOP)
        process.kill()
        until(lambda: not is_running(child))


def test_a_child_of_a_stopped_parent_is_dead_when_a_new_leader_may_call() -> None:
    with parent(lease_s=8) as (process, child, ends_s):
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(max(0.0, ends_s + DEAD_AFTER_S - CLOCK.monotonic_s()))  # noqa: TID251  what a new leader waits for
        assert not is_running(child)


async def test_a_child_lives_for_as_long_as_the_lease_is_renewed() -> None:
    ends_s = [CLOCK.monotonic_s() + PATIENCE_S]
    async with connected(NOWHERE, until_s=lambda: ends_s[0]) as hypervisor:
        assert isinstance(await hypervisor.read(), VmsUnknown)
        first = hypervisor.pid
        assert first is not None
        ends_s[0] += PATIENCE_S
        hypervisor._tick()
        child = hypervisor._child
        assert child is not None
        assert child.known_until_s == ends_s[0]
        ends_s[0] = 0.0  # the lease is lost
        hypervisor._tick()
        assert child.known_until_s > 0.0, "it dies at the end that it knows; `close` kills it before"
        assert hypervisor.pid == first
        await hypervisor.close()
        assert not is_running(first)


async def test_a_child_ends_itself_at_the_end_of_a_lease_that_is_not_renewed() -> None:
    ends_s = CLOCK.monotonic_s() + 3.0
    async with connected(NOWHERE, until_s=lambda: ends_s) as hypervisor:
        assert isinstance(await hypervisor.read(), VmsUnknown)
        child = hypervisor.pid
        while child is not None and is_running(child):
            await CLOCK.sleep(0.01)
        reading = await hypervisor.read()
        assert isinstance(reading, VmsUnknown)
        assert reading.code == "LeaseLost"


async def test_a_child_without_requests_ends_and_comes_back() -> None:
    async with connected(NOWHERE) as hypervisor:
        await hypervisor.read()
        first = hypervisor.pid
        assert first is not None
        hypervisor._used_s -= 1000.0
        hypervisor._tick()
        while is_running(first):
            await CLOCK.sleep(0.01)
        assert isinstance(await hypervisor.read(), VmsUnknown)
        assert hypervisor.pid not in {None, first}


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpuvirt_schedules.hypervisors.vsphere.backend", None)
    with pytest.raises(BackEndError) as raised:
        child.opened(Start("vsphere", "vcenter", "CA"))
    assert raised.value.problem is Problem.NOT_INSTALLED


class EndedError(Exception):
    """The child has ended itself."""


@pytest.mark.parametrize(
    ("clock", "timers", "ends"),
    [
        pytest.param((0.0, 0.0), [10.0], False, id="not stopped"),
        pytest.param((0.0, 8.0, 8.0, 8.0), [10.0, 2.0], False, id="stopped within the lease"),
        pytest.param((0.0, 12.0, 12.0), [10.0], True, id="stopped beyond the lease"),
        pytest.param((10.0,), [], True, id="begun too late"),
    ],
)
def test_a_child_that_is_stopped_before_its_timer_runs_ends_with_the_lease(
    monkeypatch: pytest.MonkeyPatch, clock: tuple[float, ...], timers: list[float], *, ends: bool
) -> None:
    seconds, set_timers = iter(clock), list[float]()

    def end() -> None:
        raise EndedError

    monkeypatch.setattr(child, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(child, "end", end)
    monkeypatch.setattr(signal, "setitimer", lambda _, left_s: set_timers.append(left_s))
    with pytest.raises(EndedError) if ends else nullcontext():
        child.live_until(10.0)
    assert set_timers == timers
    assert next(seconds, None) is None
