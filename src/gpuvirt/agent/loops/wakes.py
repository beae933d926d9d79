"""The signals that wake the loops of one agent, at once or later."""

from collections.abc import Callable

from gpuvirt.clock import Clock, Signal, Timer


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


class Wakes:
    """The signals that wake the loops of one agent, at once or later."""

    def __init__(self, clock: Clock, decide_s: float) -> None:
        """`decide_s` is the time from an allocation until the agent decides."""
        self.decide = Signal()
        """Set when decisions may differ from the last ones."""
        self.ask_kubelet = Signal()
        """Set after each allocation and withdrawal: the kubelet is asked for its allocations then."""
        self.operands = Signal()
        """Set when another device plugin may have stopped, for a change that waits for it."""
        self.room = Signal()
        """Set when the host or the allocations may have changed, for an allocation that waits for room."""
        self.decide_again = LaterCall(clock, self.decide.set)
        self._decide_soon = LaterCall(clock, self.decide.set)
        self._decide_s = decide_s

    def allocated(self) -> None:
        """Decide soon, but after the requests that a pod with several containers makes at once."""
        self.ask_kubelet.set()
        self._decide_soon.after(self._decide_s)
