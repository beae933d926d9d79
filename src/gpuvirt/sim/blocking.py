"""What happens to a caller that the kernel would make wait: it waits for real, or is told at once that it would.

A test or a demo that runs in one thread can't wait for what it must do itself. It gets WouldBlock, while the effect
goes on as it would in the kernel, where the sleeping writer is beyond the reach of any signal. A mounted simulator has
one thread for each caller, and those do wait.

Operations that take time on hardware take it in the mounted simulator alone, where its user says so. Others are served
meanwhile: a caller that waits does not hold the lock.
"""

import threading
from collections.abc import Callable

from gpuvirt.sim.durations import Durations, Operation


class WouldBlock(BaseException):
    """The kernel would now keep the caller asleep; no handler of OSError or Exception may take this for an answer."""


class Blocking:
    """Lets callers wait until something in the simulated kernel has come true."""

    def __init__(self, *, wait: bool = False) -> None:
        self.condition = threading.Condition(threading.RLock())
        self.durations: Durations = {}
        """How long operations take where callers wait."""
        self._wait = wait

    def until(self, met: Callable[[], bool], what: str) -> None:
        """Return once `met`; raise WouldBlock at once where nobody else could make it so."""
        if met():
            return
        if not self._wait:
            raise WouldBlock(what)
        self.condition.wait_for(met)

    def spend(self, operation: Operation) -> None:
        """Return when an operation has taken its time; the lock is free meanwhile, so look again at what is there."""
        duration_s = self.durations.get(operation, 0.0)
        if self._wait and duration_s > 0:
            self.condition.wait_for(lambda: False, duration_s)
