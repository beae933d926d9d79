"""Schedules with the same hypervisor and account share a child, and none is held up by a request of another."""

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from typing_extensions import override

from gpuvirt.model.workers.connection import HypervisorCredentials, HypervisorKind
from gpuvirt.model.workers.hypervisor import (
    Accepted,
    Action,
    Answer,
    Call,
    Hypervisor,
    OutcomeUnknown,
    Refused,
    VmProof,
    VmsReading,
    VmsUnknown,
)
from gpuvirt_schedules.hypervisors import connection
from gpuvirt_schedules.hypervisors.childprocess import ChildProcess
from gpuvirt_schedules.hypervisors.connection import ChildHypervisor, FairQueue, SharedHypervisors
from gpuvirt_schedules.hypervisors.messages import Order, Read
from tests.hypervisors.simulated import CLOCK, Center, center, connected, is_running, key
from tests.web.certificates import Authority

pytestmark = pytest.mark.ring("vsphere")
SUSPEND = [Call(VmProof(key(number)), Action.SUSPEND) for number in range(4)]
HANGS_S = 4.0


@pytest.fixture(name="center")
def _center(tmp_path: Path, authority: Authority) -> Iterator[Center]:
    with center(tmp_path, authority) as running:
        yield running


class Sent:
    """The children that were started, and the orders that each was sent."""

    def __init__(self) -> None:
        self.orders: dict[ChildProcess, list[Order]] = {}

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self.orders if child.pid is not None]

    def count(self, kind: type) -> int:
        return sum(isinstance(order, kind) for orders in self.orders.values() for order in orders)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    found = Sent()

    class Noted(ChildProcess):
        @override
        def send(self, order: Order) -> None:
            found.orders.setdefault(self, []).append(order)
            super().send(order)

    monkeypatch.setattr(connection, "ChildProcess", Noted)
    return found


@asynccontextmanager
async def sharing(*credentials: HypervisorCredentials) -> AsyncIterator[list[Hypervisor]]:
    """Provide a schedule's connection for each of these credentials."""
    shared = SharedHypervisors()
    users = [await shared.open(HypervisorKind.VSPHERE, each, CLOCK, lambda: math.inf) for each in credentials]
    yield users
    for user in users:
        await user.close()
    assert not shared._opened


def code(answer: Answer | VmsReading) -> str:
    assert isinstance(answer, Refused | OutcomeUnknown | VmsUnknown), answer
    return str(answer.code)


async def test_schedules_of_one_account_share_a_child_until_the_last_ends(center: Center, sent: Sent) -> None:
    other = replace(center.credentials, password="another")  # noqa: S106  of no server
    async with sharing(*[center.credentials] * 20, other) as users:
        readings = await asyncio.gather(*(user.read() for user in users))
        assert [len(reading) for reading in readings[:-1] if not isinstance(reading, VmsUnknown)] == [5] * 20
        assert code(readings[-1]) == "WrongCredentials"
        (pid,) = sent.pids
        for user in users[1:]:
            await user.close()
            await user.close()
        assert is_running(pid)
        assert not isinstance(await users[0].read(), VmsUnknown)
        await users[0].close()
        assert not is_running(pid)


async def test_readings_that_are_asked_for_during_one_are_one(center: Center, sent: Sent) -> None:
    async with sharing(*[center.credentials] * 30) as users, asyncio.TaskGroup() as group:
        center.vsphere.command(delays={"CreateContainerView": 300})
        first = group.create_task(users[0].read())
        while not sent.count(Read):
            await CLOCK.sleep(0.01)
        later = [group.create_task(user.read()) for user in users]
        await CLOCK.sleep(0.01)
        later[0].cancel()  # the one that would have made the next one
        readings = [await reading for reading in later[1:]]
        assert sent.count(Read) == 2
        assert all(reading is readings[0] for reading in readings), "each is in memory once"
        assert await first is not readings[0], "which had begun before they asked"


async def test_a_slow_call_of_one_delays_no_other(center: Center, sent: Sent) -> None:
    async with sharing(*[center.credentials] * 2) as (slow, other), asyncio.TaskGroup() as group:
        await slow.read()
        center.vsphere.command(delays={"SuspendVM_Task": round(1000 * HANGS_S)})
        calls = [group.create_task(slow.call(suspend)) for suspend in SUSPEND]
        began_s = CLOCK.monotonic_s()
        assert not isinstance(await other.read(), VmsUnknown)
        assert await other.call(Call(VmProof(key(3)), Action.SHUT_DOWN)) == Accepted()
        assert await other.check([key(1)])
        assert not any(call.done() for call in calls)
        assert CLOCK.monotonic_s() - began_s < HANGS_S
        assert len(sent.pids) == 1


async def test_a_killed_child_fails_only_the_calls_under_way_and_says_so(center: Center, sent: Sent) -> None:
    async with sharing(*[center.credentials] * 3) as (first, second, third), asyncio.TaskGroup() as group:
        await first.read()
        center.vsphere.command(delays={"SuspendVM_Task": 60_000, "CreateContainerView": 2000})
        calls = [group.create_task(user.call(call)) for user, call in zip((first, second), SUSPEND, strict=False)]
        reading = group.create_task(third.read())
        while sent.count(Read) < 2:
            await CLOCK.sleep(0.01)
        await CLOCK.sleep(0.2)
        (pid,) = sent.pids
        os.kill(pid, signal.SIGKILL)
        assert [code(await call) for call in calls] == ["HypervisorConnectionEnded"] * 2
        assert not isinstance(await reading, VmsUnknown), "it was read again by another child"
        assert sent.pids not in ([], [pid])


async def test_a_call_that_hangs_ends_the_child_and_the_others_have_the_reason(center: Center, sent: Sent) -> None:
    async with connected(center.credentials, request_s=1.0) as hypervisor, asyncio.TaskGroup() as group:
        hypervisor._request_s = 60.0
        await hypervisor.read()
        center.vsphere.command(delays={"SuspendVM_Task": 60_000})
        other = group.create_task(hypervisor.call(SUSPEND[1], "other"))
        await CLOCK.sleep(0.2)
        hypervisor._request_s = 1.0
        assert code(await hypervisor.call(SUSPEND[0], "hangs")) == "HypervisorSilent"
        answer = await other
        assert isinstance(answer, OutcomeUnknown)
        assert "no answer within 1 s to another call" in answer.text
        assert len(sent.orders) == 1


async def test_a_call_that_is_given_up_comes_to_nothing_later(center: Center, sent: Sent) -> None:
    async with sharing(*[center.credentials] * 2) as (first, second), asyncio.TaskGroup() as group:
        await first.read()
        center.vsphere.command(delays={"SuspendVM_Task": 60_000})
        call = group.create_task(first.call(SUSPEND[0]))
        await CLOCK.sleep(0.2)
        (pid,) = sent.pids
        call.cancel()
        while is_running(pid):
            await CLOCK.sleep(0.01)
        await asyncio.wait([call])
        assert call.cancelled()
        assert not isinstance(await second.read(), VmsUnknown)


async def test_a_call_whose_outcome_is_unknown_ends_its_child(center: Center, sent: Sent) -> None:
    async with sharing(*[center.credentials] * 2) as (first, second):
        await first.read()
        center.vsphere.command(fault={"method": "SuspendVM_Task", "every": 1, "most": 1, "kind": "system"})
        answer = await first.call(SUSPEND[0])
        assert isinstance(answer, OutcomeUnknown), answer
        assert sent.pids == []
        assert not isinstance(await second.read(), VmsUnknown)


async def test_a_check_that_hangs_fails_no_call(center: Center, sent: Sent) -> None:
    async with connected(center.credentials) as hypervisor, asyncio.TaskGroup() as group:
        await hypervisor.read()
        center.vsphere.command(delays={"SuspendVM_Task": round(3000 * HANGS_S)})
        call = group.create_task(hypervisor.call(SUSPEND[0], "other"))
        await CLOCK.sleep(0.5)
        center.vsphere.command(delays={"FindByUuid": 60_000})
        hypervisor._request_s = 1.0
        found = await hypervisor.check([key(1)], "hangs")
        assert isinstance(found, VmsUnknown)
        assert code(found) == "HypervisorSilent"
        (child,) = hypervisor._retired
        hypervisor._request_s = 60.0
        assert not isinstance(await hypervisor.read(), VmsUnknown), "by another child"
        assert len(sent.orders) == 2
        sent.orders[child].clear()
        child.known_until_s = 0.0
        hypervisor._tick()
        assert sent.orders[child], "it is told of the lease until its call is answered"
        assert await call == Accepted()
        assert not hypervisor._retired
        assert child.is_gone


@pytest.mark.parametrize("ask", ["call", "check"])
async def test_a_request_whose_turn_does_not_come_was_certainly_not_made(
    center: Center, sent: Sent, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    monkeypatch.setattr(connection, "TURN_S", 0.2)
    async with connected(center.credentials) as hypervisor:
        assert isinstance(hypervisor, ChildHypervisor)
        hypervisor._queues = dict.fromkeys(hypervisor._queues, FairQueue(0))
        answer = await (hypervisor.call(SUSPEND[0]) if ask == "call" else hypervisor.check([key(0)]))
        assert isinstance(answer, Refused | VmsUnknown)
        assert code(answer) == "HypervisorSilent"
        assert "1 requests wait" in answer.text
        assert not sent.orders, "nor was a child started"
