"""Another's programs that offer what this agent carves: when they are to be away, and whether they are.

An agent that carves beside NVIDIA's device plugin can't withdraw what that one offers. It has it taken away instead,
for as long as it carves, and waits until its pods are gone and the kubelet was heard after that to count nothing of
what is to go.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime

from gpuvirt.clock import Clock, Signal
from gpuvirt.model.desired.observed import OperandsObserved
from gpuvirt.model.reasons import Reason, shortfalls
from gpuvirt.node.loops.cell import Cell
from gpuvirt.node.loops.intervals import Intervals

Tell = Callable[[Reason], None]


@dataclass(frozen=True, slots=True)
class Way:
    """What the agent knows of a GPU whose vGPUs are to change."""

    is_needed: Callable[[], bool]
    """Whether it still is to be."""
    unsettled: Callable[[datetime], Reason | None]
    """Why the kubelet may still admit pods by what is to go, as it was heard since a time; None: it does not."""


class Operands:
    """One node's."""

    def __init__(self, clock: Clock, intervals: Intervals) -> None:
        self.to_be_away: Cell[bool] = Cell(False)
        self._clock = clock
        self._intervals = intervals
        self._observed: OperandsObserved | None = None
        self._gone_at: datetime | None = None
        """When they were heard to be gone; None while they are not."""
        self._carving = 0
        """How many GPUs have their vGPUs changed, or wait for that."""
        self._request = Signal()

    def observe(self, observed: OperandsObserved | None) -> None:
        """Take what was heard of them, None where that is not enough to tell."""
        gone = observed is not None and not observed.desired and not observed.pods
        self._observed = observed
        self._gone_at = (self._gone_at or self._clock.now()) if gone else None
        self._request.set()

    def stir(self) -> None:
        """Have whoever waits look again: the kubelet was heard, or something was concluded."""
        self._request.set()

    @asynccontextmanager
    async def away(self, subject: str, way: Way, tell: Tell) -> AsyncIterator[Reason | None]:
        """Have them away while the context lasts; give why they are not, None when they are.

        `tell` takes what is being waited for. They are waited for no longer after a while, or when there is no need.
        """
        self._carving += 1
        self.to_be_away.set(True)
        try:
            yield await self._gone(subject, way, tell)
        finally:
            self._carving -= 1
            if not self._carving:
                self.to_be_away.set(False)

    async def _gone(self, subject: str, way: Way, tell: Tell) -> Reason | None:
        until_s = self._clock.monotonic_s() + self._intervals.operands_s
        while (reason := self._in_the_way(subject, way)) is not None:
            tell(reason)
            left_s = until_s - self._clock.monotonic_s()
            if left_s <= 0 or not way.is_needed():
                return reason
            await self._request.wait_for(self._clock, left_s)
        return None

    def _in_the_way(self, subject: str, way: Way) -> Reason | None:
        if self._gone_at is None:
            return _still_running(subject, self._observed)
        return way.unsettled(self._gone_at)


def _still_running(subject: str, observed: OperandsObserved | None) -> Reason:
    labels, pods = ((), ()) if observed is None else (observed.desired, observed.pods)
    return shortfalls.device_plugin_still_running(subject, labels, pods)
