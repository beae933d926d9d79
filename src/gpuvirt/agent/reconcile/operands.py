"""The device plugin of another project that offers this agent's vGPUs: when it must be stopped, and whether it is.

An agent that creates vGPUs beside NVIDIA's device plugin can't withdraw the devices that this plugin offers. Instead
it has the plugin stopped while it changes vGPUs. It waits until the plugin's pods are gone, and until the kubelet no
longer counts the vGPUs that will be removed.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.clock import Clock, Signal
from gpuvirt.loops.cell import Cell
from gpuvirt.model.desired.observed import OperandsObserved
from gpuvirt.model.reasons import Reason, ReasonCode, Seen

ReportWait = Callable[[Reason], None]


class PendingChange(msgspec.Struct, frozen=True):
    """A change of vGPUs that waits until the operands are stopped."""

    is_needed: Callable[[], bool]
    """Returns whether the change is still to be made."""
    unsettled: Callable[[float], Reason | None]
    """Returns why the kubelet may still admit pods by vGPUs that will be removed, None if it does not.

    The argument is when the operands were gone, by the monotonic clock: only later answers of the kubelet count.
    """


class Operands:
    """The operands of another project on one node, which offer the agent's vGPUs."""

    def __init__(self, clock: Clock, intervals: Intervals, check: Signal) -> None:
        """`check` is set when waiting changes are to check again."""
        self.to_be_away: Cell[bool] = Cell(False)
        """Whether the operands must be stopped."""
        self._clock = clock
        self._intervals = intervals
        self._observed: OperandsObserved | None = None
        self._gone_at_s: float | None = None
        """When the operands were observed to be gone; None while they are not."""
        self._changes = 0
        """The number of changes under way or waiting."""
        self._check = check

    def observe(self, observed: OperandsObserved | None) -> None:
        """Record the observed state of the operands, None if it is unknown."""
        gone = observed is not None and not observed.desired and not observed.pods
        self._observed = observed
        if not gone:
            self._gone_at_s = None
        elif self._gone_at_s is None:
            self._gone_at_s = self._clock.monotonic_s()
        self._check.set()

    @asynccontextmanager
    async def away(self, subject: str, change: PendingChange, report: ReportWait) -> AsyncIterator[Reason | None]:
        """Keep the operands stopped while the context lasts; it gives why they are not stopped, None if they are.

        `report` is called with the reason why the change waits. The wait ends after a while, or when the change is not
        needed any more.
        """
        self._changes += 1
        self.to_be_away.set(True)
        try:
            yield await self._wait(subject, change, report)
        finally:
            self._changes -= 1
            if not self._changes:
                self.to_be_away.set(False)

    async def _wait(self, subject: str, change: PendingChange, report: ReportWait) -> Reason | None:
        until_s = self._clock.monotonic_s() + self._intervals.operands_s
        while (reason := self._why_waiting(subject, change)) is not None:
            report(reason)
            left_s = until_s - self._clock.monotonic_s()
            if left_s <= 0 or not change.is_needed():
                return reason
            await self._check.wait_for(self._clock, left_s)
        return None

    def _why_waiting(self, subject: str, change: PendingChange) -> Reason | None:
        if self._gone_at_s is None:
            return _still_running(subject, self._observed)
        return change.unsettled(self._gone_at_s)


def _still_running(subject: str, observed: OperandsObserved | None) -> Reason:
    labels, pods = ((), ()) if observed is None else (observed.desired, observed.pods)
    return Reason(
        ReasonCode.DEVICE_PLUGIN_STILL_RUNNING,
        subject,
        "waits until the device plugin and the validator of the other operator have left this node",
        (*(Seen("label", label) for label in labels), *(Seen("pod", pod) for pod in pods))
        or (Seen("", "neither the node's labels nor its pods have been reported yet"),),
        "no action needed: their operator removes them by the labels; if a pod stays, see why it does not end",
    )
