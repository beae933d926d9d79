"""A clock that runs faster than time, the same in all processes of this computer."""

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta

from gpuvirt.clock import RealClock, Timer

REAL = RealClock()


class FastClock:
    """Real time, some times as fast. Timers that are set run by the rate; `skip` does not touch them."""

    def __init__(self, rate: float, begin: datetime, origin_s: float | None = None) -> None:
        """At the monotonic second `origin_s` of this computer, by default now, the time is `begin`."""
        self.rate = rate
        self.begin = begin
        self.origin_s = REAL.monotonic_s() if origin_s is None else origin_s
        self._skipped_s = 0.0

    def now(self) -> datetime:
        """Return the wall-clock time."""
        return self.begin + timedelta(seconds=self.monotonic_s())

    def monotonic_s(self) -> float:
        """Return the seconds since the begin."""
        return (REAL.monotonic_s() - self.origin_s) * self.rate + self._skipped_s

    def skip(self, to: datetime) -> None:
        """Let the time be later at once, as on a computer that slept."""
        self._skipped_s += (to - self.now()).total_seconds()

    def call_later(self, delay_s: float, call: Callable[[], None], /) -> Timer:
        """Run a function after a delay."""
        return asyncio.get_running_loop().call_later(delay_s / self.rate, call)

    async def sleep(self, seconds: float, /) -> None:
        """Wait for some seconds of this clock."""
        await REAL.sleep(seconds / self.rate)
