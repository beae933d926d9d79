"""The calls to one hypervisor in one term as the leader: made with the lease, read after each unknown outcome."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.model.workers.connection import DEAD_AFTER_S
from gpuvirt.model.workers.hypervisor import (
    Abilities,
    Answer,
    Call,
    Hypervisor,
    OutcomeUnknown,
    VmKey,
    VmsReading,
    VmsUnknown,
)
from gpuvirt.model.workers.observed import LastCall
from gpuvirt_schedules.controller.schedulemetrics import ScheduleTelemetry

ANSWER_S = 60.0
"""How long an answer is awaited. Without one the connection is closed, so that its request comes to nothing later."""
NO_ANSWER = "HypervisorUnknown"

Connect = Callable[[], Awaitable[Hypervisor | VmsUnknown]]
"""Opens a connection; what it needs may be missing."""

T = TypeVar("T")


class _Made(msgspec.Struct, frozen=True):
    call: Call
    answer: Answer
    at_s: float


class VmCalls:
    """The connection to a hypervisor, opened when it is needed, and the latest call for each VM."""

    def __init__(
        self,
        connect: Connect,
        clock: Clock,
        may_write: Callable[[], bool],
        since_s: float,
        telemetry: ScheduleTelemetry | None = None,
    ) -> None:
        """`since_s` is the monotonic second at which this term as the leader began."""
        self._connect = connect
        self._clock = clock
        self._may_write = may_write
        self._since_s = since_s
        self._telemetry = telemetry if telemetry is not None else ScheduleTelemetry()
        self._connection: Hypervisor | None = None
        self._asking = asyncio.Lock()
        """A switch takes over a connection whose first reading may be under way."""
        self._made: dict[VmKey, _Made] = {}

    @property
    def latest(self) -> Mapping[VmKey, LastCall]:
        """The latest call for each VM."""
        now_s = self._clock.monotonic_s()
        return {key: LastCall(made.call.action, made.answer, now_s - made.at_s) for key, made in self._made.items()}

    async def read(self) -> VmsReading:
        """Return all VMs of the hypervisor; never raises for what the hypervisor does."""
        return await self._asked(lambda connection: connection.read())

    async def check(self, vms: Iterable[VmKey]) -> Mapping[VmKey, Abilities] | VmsUnknown:
        """Return what can be done with each of these VMs; never raises for what the hypervisor does."""
        return await self._asked(lambda connection: connection.check(vms))

    async def _asked(self, ask: Callable[[Hypervisor], Awaitable[T | VmsUnknown]]) -> T | VmsUnknown:
        async with self._asking:
            connection = await self._open()
            if isinstance(connection, VmsUnknown):
                return connection
            try:
                async with asyncio.timeout(ANSWER_S):
                    return await ask(connection)
            except TimeoutError:
                await self.close()
                return VmsUnknown(NO_ANSWER, f"no answer came within {ANSWER_S:.0f} s")

    async def call(self, call: Call) -> Answer | None:
        """Make a call, and return its answer; None if it was not made, because it must not be made now.

        After an answer that says nothing, the next round reads the VM before it decides on a call.
        """
        connection = await self._open()
        if isinstance(connection, VmsUnknown) or not self.is_leader():
            return None
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await connection.call(call)
        except TimeoutError:
            answer = OutcomeUnknown(NO_ANSWER, f"no answer came within {ANSWER_S:.0f} s")
        self._telemetry.observe_call(call, answer)
        self._made[call.vm] = _Made(call, answer, self._clock.monotonic_s())
        if isinstance(answer, OutcomeUnknown):
            await self.close()
        return answer

    def is_leader(self) -> bool:
        """Return whether this process has the lease at this moment: a hypervisor has no precondition."""
        return self._may_write()

    @property
    def alone_in_s(self) -> float:
        """The time until each connection of an earlier leader is dead, which could still deliver its call."""
        return max(0.0, self._since_s + DEAD_AFTER_S - self._clock.monotonic_s())

    async def close(self) -> None:
        """End the connection. A call whose answer has not come is never delivered later."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _open(self) -> Hypervisor | VmsUnknown:
        if self._connection is None:
            opened = await self._connect()
            if isinstance(opened, VmsUnknown):
                return opened
            self._connection = opened
        return self._connection
