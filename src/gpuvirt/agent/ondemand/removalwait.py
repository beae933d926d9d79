"""How long Allocate waits for the removal of ended pods' vGPUs.

The kubelet admits pods one after another, and a refused pod fails for good. A pod is often admitted a moment before the
vGPU of its predecessor is gone. But a full node must not delay each of many pods: once a wait has ended without
room, the pods after it don't wait for a while.
"""

from gpuvirt.clock import Clock, Deadline, Signal

WAIT_S = 1.5
PAUSE_S = 5.0
"""How long no pod waits after a wait that ended without room."""
RECHECK_S = 0.05


class RemovalWait:
    """The deadline of one node's present wait, or of the last one that ended without room."""

    def __init__(self, clock: Clock) -> None:
        self.begun = Signal()
        """Set when a wait begins."""
        self._clock = clock
        self._deadline: Deadline | None = None

    @property
    def waits(self) -> bool:
        """Whether an allocation waits now."""
        return self._deadline is not None and self._deadline.left_s > 0

    async def wait(self, changed: Signal, request: Deadline) -> bool:
        """Wait for a change; return False at the deadline, or at the request's own."""
        if self._deadline is None or self._deadline.left_s < -PAUSE_S:
            self._deadline = Deadline(self._clock, WAIT_S)
            self.begun.set()
        if (left_s := min(self._deadline.left_s, request.left_s)) <= 0:
            return False
        await changed.wait_for(self._clock, min(RECHECK_S, left_s))
        return True

    def end(self) -> None:
        """End a wait that found room: the next one has all its time."""
        if self._deadline is not None:
            self._deadline.close()
            self._deadline = None
