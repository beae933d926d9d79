"""A clock that a test advances: it simulates hours of an agent's life in a moment, always in the same order."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)

TURNS = 20
"""Turns of the event loop after which every task waits."""


class SimTimer:
    """A call at a later time."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Cancel the call."""
        self._call = None

    @property
    def is_cancelled(self) -> bool:
        """Whether the call was cancelled."""
        return self._call is None

    def ring(self) -> None:
        """Make the call, unless it was cancelled."""
        if self._call is not None:
            self._call()


class SimClock:
    """A clock that stands still until `advance`."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._stepped_s = 0.0
        """How far the wall clock was set forward, or back."""
        self._timers: list[tuple[float, int, SimTimer]] = []
        self._order = itertools.count()

    def now(self) -> datetime:
        """Return the simulated wall-clock time, in UTC."""
        return BEGINNING + timedelta(seconds=self._now_s + self._stepped_s)

    def step(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an administrator or NTP does; no time passes."""
        self._stepped_s += seconds

    def monotonic_s(self) -> float:
        """Return the simulated seconds since the start."""
        return self._now_s

    def call_later(self, delay_s: float, call: Callable[[], None], /) -> SimTimer:
        """Call `call` after this delay."""
        timer = SimTimer(call)
        heapq.heappush(self._timers, (self._now_s + delay_s, next(self._order), timer))
        return timer

    async def sleep(self, seconds: float, /) -> None:
        """Wait until this much time has passed."""
        passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self.call_later(seconds, lambda: None if passed.done() else passed.set_result(None))
        try:
            await passed
        finally:
            timer.cancel()

    @property
    def next_s(self) -> float | None:
        """The time of the next call in seconds; None where no call is due."""
        while self._timers and self._timers[0][2].is_cancelled:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def ring_next(self) -> None:
        """Advance to the next call, and make it."""
        at_s, _, timer = heapq.heappop(self._timers)
        self._now_s = max(self._now_s, at_s)
        timer.ring()

    async def advance(self, seconds: float) -> None:
        """Advance the time, and run everything that waits for it."""
        end_s = self._now_s + seconds
        await self.settle()
        while self._timers and self._timers[0][0] <= end_s:
            self.ring_next()
            await self.settle()
        self._now_s = end_s
        await self.settle()

    async def settle(self) -> None:
        """Run all tasks as far as they can go while the time stands still."""
        for _ in range(TURNS):
            await asyncio.sleep(0)  # noqa: TID251  a turn of the loop, not a wait
