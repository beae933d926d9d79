"""The handling of a caller that the kernel would block: it waits, or it gets WouldBlock at once.

A test or a demo that runs in one thread can't wait for an event that the same thread must cause. It gets WouldBlock,
and the operation continues without it, as it does in the kernel, where no signal reaches the sleeping writer. A mounted
simulator has one thread for each caller, so its callers wait.

Only the mounted simulator lets operations take the time that they take on hardware, and only on request. A waiting
caller does not hold the lock, so other callers are served meanwhile.
"""

import threading
from collections.abc import Callable

from gpuvirt_sim.files.durations import Durations, Operation


class WouldBlock(BaseException):
    """The kernel would now keep the caller asleep. No handler of OSError or Exception may catch this."""


class Blocking:
    """Makes callers wait for conditions of the simulated kernel."""

    def __init__(self, *, wait: bool = False) -> None:
        self.condition = threading.Condition(threading.RLock())
        self._durations: Durations = {}
        """How long each operation takes, where callers wait."""
        self._wait = wait

    def last(self, durations: Durations) -> None:
        """Make operations take so long from now on."""
        self._durations = durations

    def until(self, met: Callable[[], bool], what: str) -> None:
        """Return once `met`; where callers don't wait, raise WouldBlock at once instead of waiting."""
        if met():
            return
        if not self._wait:
            raise WouldBlock(what)
        self.condition.wait_for(met)

    def spend(self, operation: Operation) -> None:
        """Wait as long as an operation takes; the lock is free meanwhile, so the caller must check the state again."""
        duration_s = self._durations.get(operation, 0.0)
        if self._wait and duration_s > 0:
            self.condition.wait_for(lambda: False, duration_s)
