"""Time, and waiting for it: a Clock that is real or simulated, and a Signal that a waiter may time out on."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from time import monotonic  # noqa: TID251  this is the Clock that others ask
from typing import Protocol


class Timer(Protocol):
    """A call that was asked for at a later time."""

    def cancel(self) -> None:
        """Take the call back; harmless after it ran."""
        ...


class Clock(Protocol):
    """Where the time comes from; everything that waits asks it."""

    def now(self) -> datetime:
        """Wall-clock time, in UTC; for people and files, never for intervals."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that never go back; for intervals."""
        ...

    def call_later(self, delay_s: float, call: Callable[[], None], /) -> Timer:
        """Run `call` on the event loop after `delay_s`."""
        ...

    async def sleep(self, seconds: float, /) -> None:
        """Wait."""
        ...


class RealClock:
    """The machine's own time."""

    def now(self) -> datetime:
        """Wall-clock time, in UTC."""
        return datetime.now(UTC)  # noqa: TID251

    def monotonic_s(self) -> float:
        """Seconds that never go back."""
        return monotonic()

    def call_later(self, delay_s: float, call: Callable[[], None], /) -> Timer:
        """Run `call` on the event loop after `delay_s`."""
        return asyncio.get_running_loop().call_later(delay_s, call)

    async def sleep(self, seconds: float, /) -> None:
        """Wait."""
        await asyncio.sleep(seconds)  # noqa: TID251


def until_tick_s(now_s: float, every_s: float) -> float:
    """Return how long it is to the next whole multiple of `every_s`: who looks equally often wakes at one moment.

    A process that sleeps in between is half as dear as one whose parts wake each by itself.
    """
    left_s = every_s - now_s % every_s
    return left_s if left_s > every_s / 100 else left_s + every_s  # a timer may ring a moment too early


class Signal:
    """Something happened: sets wake whoever waits, and one set before the wait is not lost."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: set[asyncio.Future[bool]] = set()

    def set(self) -> None:
        """Wake all who wait, or the next who comes."""
        asleep = [waiter for waiter in self._waiting if not waiter.done()]
        self._set = not asleep
        for waiter in asleep:
            waiter.set_result(True)

    async def wait(self) -> None:
        """Return once set; that takes the set away."""
        await self._next(None, None)

    async def wait_for(self, clock: Clock, timeout_s: float) -> bool:
        """Return True once set, False when `timeout_s` passed first."""
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
