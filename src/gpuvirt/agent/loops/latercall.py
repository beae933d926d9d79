"""A call that is made later, at the time that was named last."""

from collections.abc import Callable

from gpuvirt.clock import Clock, Timer


class LaterCall:
    """Calls a function later, once for each time."""

    def __init__(self, clock: Clock, call: Callable[[], None]) -> None:
        self._clock = clock
        self._call = call
        self._timer: Timer | None = None

    def after(self, delay_s: float) -> None:
        """Call after a delay, and not at the time that was named before."""
        self._cancel()
        self._timer = self._clock.call_later(delay_s, self._call)

    def at(self, at_s: float | None) -> None:
        """Call at a time of the monotonic clock, and not at the time that was named before; None: do not call."""
        if at_s is None:
            self._cancel()
        else:
            self.after(max(at_s - self._clock.monotonic_s(), 0))

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
