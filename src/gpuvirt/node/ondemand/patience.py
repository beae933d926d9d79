"""How long Allocate waits for the removal of ended pods' vGPUs.

The kubelet admits pods one after another, and a refused pod fails for good. A pod is admitted a moment before the vGPU
of its predecessor is gone. But a full node must not delay each of many pods: the pods of one burst share one deadline.
"""

from gpuvirt.clock import Clock, Signal

WAIT_S = 1.5
BURST_S = 5.0
"""After so long without a wait, a burst is over."""
RECHECK_S = 0.05


class Patience:
    """The deadline of one node's present burst."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: float | None = None
        self._last_s = 0.0

    def until_s(self) -> float:
        """Return until when an allocation that begins now may wait, in seconds of the monotonic clock."""
        now_s = self._clock.monotonic_s()
        if self._until_s is None or now_s > max(self._until_s, self._last_s) + BURST_S:
            return now_s + WAIT_S
        return self._until_s

    async def wait(self, changed: Signal, until_s: float) -> bool:
        """Wait for a change; return False at the deadline."""
        now_s = self._clock.monotonic_s()
        self._until_s, self._last_s = until_s, now_s
        if now_s >= until_s:
            return False
        await changed.wait_for(self._clock, min(RECHECK_S, until_s - now_s))
        return True
