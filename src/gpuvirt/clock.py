"""Time: a Clock that is real or simulated, a Deadline, and a Signal that a task can wait for with a timeout."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from math import inf
from time import monotonic  # noqa: TID251  this is the Clock that others ask
from typing import Protocol

BEAT_S = 0.1
"""Between two beats of a deadline. A beat that is as late as that was stopped with the process."""


class Timer(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """Cancel the call; without effect after it ran."""
        ...


class Clock(Protocol):
    """The source of time for all code that waits or measures intervals."""

    def now(self) -> datetime:
        """Return the wall-clock time in UTC; for people and files, never for intervals."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds that never go back; for intervals."""
        ...

    def call_later(self, delay_s: float, call: Callable[[], None], /) -> Timer:
        """Run `call` on the event loop after `delay_s`."""
        ...

    async def sleep(self, seconds: float, /) -> None:
        """Wait for a number of seconds."""
        ...


class RealClock:
    """The time of this computer."""

    def now(self) -> datetime:
        """Return the wall-clock time in UTC."""
        return datetime.now(UTC)  # noqa: TID251

    def monotonic_s(self) -> float:
        """Return seconds that never go back."""
        return monotonic()

    def call_later(self, delay_s: float, call: Callable[[], None], /) -> Timer:
        """Run `call` on the event loop after `delay_s`."""
        return asyncio.get_running_loop().call_later(delay_s, call)

    async def sleep(self, seconds: float, /) -> None:
        """Wait for a number of seconds."""
        await asyncio.sleep(seconds)  # noqa: TID251


class Deadline:
    """The end of a wait. The time in which the process was stopped, or its event loop, does not count.

    A late beat shows the stop, and leaves a moment for what was stopped as well. The beats end when the time is over,
    or with `close`. Without that, an agent that was stopped would take a slow creation for one that the kernel blocks,
    and the kubelet would reject the pod for good.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._until_s = clock.monotonic_s() + seconds
        self._due_s = inf
        self._timer: Timer | None = None
        self._beat()

    @property
    def left_s(self) -> float:
        """The time until the deadline; negative after it."""
        now_s = self._clock.monotonic_s()
        if now_s - self._due_s < BEAT_S:
            return self._until_s - now_s
        return max(self._until_s - self._due_s, BEAT_S)

    def close(self) -> None:
        """End the wait; `left_s` means nothing afterwards."""
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        left_s, now_s = self.left_s, self._clock.monotonic_s()
        self._until_s = now_s + left_s
        self._due_s = now_s + BEAT_S if left_s > 0 else inf  # a deadline that has passed stays
        if left_s > 0:
            self._timer = self._clock.call_later(BEAT_S, self._beat)


def until_tick_s(now_s: float, every_s: float) -> float:
    """Return the time until the next multiple of `every_s`, so that tasks with the same interval wake together.

    A process whose tasks wake together uses half the processor time of one whose tasks wake at different moments.
    """
    left_s = every_s - now_s % every_s
    return left_s if left_s > every_s / 100 else left_s + every_s  # a timer may fire a moment too early


class Signal:
    """An event for tasks: a set wakes all waiting tasks; if none waits, the next wait returns at once."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: set[asyncio.Future[bool]] = set()

    def set(self) -> None:
        """Wake all waiting tasks, or let the next wait return at once."""
        asleep = [waiter for waiter in self._waiting if not waiter.done()]
        self._set = not asleep
        for waiter in asleep:
            waiter.set_result(True)

    async def wait(self) -> None:
        """Return once the signal is set, and clear it."""
        await self._next(None, None)

    async def wait_for(self, clock: Clock, timeout_s: float) -> bool:
        """Return True once the signal is set, False when `timeout_s` has passed first."""
        return await self._next(clock, timeout_s)

    async def _next(self, clock: Clock | None, timeout_s: float | None) -> bool:
        if self._set:
            self._set = False
            return True
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def expire() -> None:
            if not waiter.done():
                waiter.set_result(False)

        self._waiting.add(waiter)
        timer = clock.call_later(timeout_s, expire) if clock is not None and timeout_s is not None else None
        try:
            return await waiter
        finally:
            self._waiting.discard(waiter)
            if timer is not None:
                timer.cancel()
