"""How long Allocate waits for the removal of ended pods' vGPUs.

The kubelet admits pods one after another, and a refused pod fails for good. A pod is often admitted a moment before the
vGPU of its predecessor is gone. But a full node must not delay each of many pods: once a wait has ended without
room, the pods after it don't wait for a while.
"""

from gpuvirt.clock import Clock, Signal, stopped_s

WAIT_S = 1.5
PAUSE_S = 5.0
"""How long no pod waits after a wait that ended without room."""
RECHECK_S = 0.05


class Patience:
    """The deadline of one node's present wait, or of the last one that ended without room."""

    def __init__(self, clock: Clock) -> None:
        self.begun = Signal()
        """Set when a wait begins."""
        self._clock = clock
        self._until_s: float | None = None

    @property
    def waits(self) -> bool:
        """Whether an allocation waits now."""
        return self._until_s is not None and self._clock.monotonic_s() < self._until_s

    async def wait(self, changed: Signal) -> bool:
        """Wait for a change; return False at the deadline."""
        now_s = self._clock.monotonic_s()
        if self._until_s is None or now_s > self._until_s + PAUSE_S:
            self._until_s = now_s + WAIT_S
            self.begun.set()
        if now_s >= self._until_s:
            return False
        wait_s = min(RECHECK_S, self._until_s - now_s)
        await changed.wait_for(self._clock, wait_s)
        self._until_s += stopped_s(self._clock, now_s + wait_s)  # no vGPU was removed meanwhile, either
        return True

    def end(self) -> None:
        """End a wait that found room: the next one has all its time."""
        self._until_s = None
