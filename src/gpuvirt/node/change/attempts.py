"""Tries to change one thing of the host: when to try again, what a try comes to, and the notes that it leaves.

What was refused or failed is tried again when what it depends on has changed, and now and then. A try that has undone
its own steps is tried again only when something else than these steps has changed, and more and more rarely.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gpuvirt.model.reasons import Reason, Seen, refusals
from gpuvirt.node.change.changes import Change
from gpuvirt.node.change.gate.gate import UnitBlockedError, UnitBusyError, UnitUnsettledError
from gpuvirt.node.loops.serialworker import SerialWorker, WorkerBlockedError
from gpuvirt.tasks import backoff_s

T = TypeVar("T")
ReportProblem = Callable[[str, Reason | None], None]


MOST_PAUSE_S = 300.0
MOST_PAUSE_AFTER_ROLLBACK_S = 3600.0
"""Each of these tries removes devices and makes them again."""


@dataclass(frozen=True, slots=True)
class ChangeWorker:
    """The lane of a change: the plan of one that sleeps in the kernel is old, and the step that sleeps is its last."""

    worker: SerialWorker
    change: Change

    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        """Return what `job` returns; raise LaneBlockedError as the lane does."""
        try:
            return await self.worker.run(job, name=name, timeout_s=timeout_s)
        except WorkerBlockedError:
            self.change.expire()
            raise


def _pauses() -> Iterator[float]:
    return backoff_s(first_s=5.0, most_s=MOST_PAUSE_AFTER_ROLLBACK_S)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a try depends on."""

    desired: object
    users: object = None
    """Who is in the way of it. A try changes neither that nor what is desired."""
    observed: object = None
    """What the host shows: a try changes it, and changes it back when it fails."""


@dataclass(slots=True)
class Attempts:
    """What became of one thing's tries so far."""

    tried_on: Circumstances | None = None
    """The circumstances of the last try."""
    rolled_back: bool = False
    """Whether the last try has undone its own steps: the host shows their traces for a while."""
    pauses_s: Iterator[float] = field(default_factory=_pauses)
    again_at_s: float = 0.0
    running: bool = False
    noted: tuple[str, ...] = ()
    """The names of the notes that the last try has left."""
    asleep_at: str | None = None
    """The step that sleeps in the kernel."""

    def begin(self, circumstances: Circumstances, now_s: float) -> bool:
        """Return whether it is to be tried now, and if so take note that it is."""
        request = self._is_change(circumstances)
        if self.running or not (request or now_s >= self.again_at_s):
            return False
        if request:
            self.pauses_s = _pauses()
        self.tried_on = circumstances
        self.running = True
        return True

    def _is_change(self, circumstances: Circumstances) -> bool:
        before = self.tried_on
        if before is None or (circumstances.desired, circumstances.users) != (before.desired, before.users):
            return True
        return not self.rolled_back and circumstances.observed != before.observed

    def resume(self, circumstances: Circumstances, now_s: float) -> None:
        """Take note that an agent before has tried in vain on the same circumstances."""
        self.tried_on = circumstances
        self.again_at_s = now_s + next(self.pauses_s)

    def forget(self, desired: object = None) -> None:
        """Take note that nothing is to be tried now, so that what comes next is news.

        A rollback is remembered for as long as the same is `desired`: the host may have shown its middle.
        """
        if not self.rolled_back or self.tried_on is None or self.tried_on.desired != desired:
            self.tried_on, self.rolled_back = None, False

    def end(self, now_s: float) -> None:
        """Take note that a try has ended."""
        self.running = False
        most_s = MOST_PAUSE_AFTER_ROLLBACK_S if self.rolled_back else MOST_PAUSE_S
        self.again_at_s = now_s + min(next(self.pauses_s), most_s)

    def roll_back(self) -> None:
        """Take note that the try begins to undo its own steps."""
        self.rolled_back = True

    async def run(
        self,
        subject: str,
        job: Callable[[], T],
        taken: Sequence[str],
        *,
        worker: SerialWorker,
        name: str,
        timeout_s: float,
    ) -> T | Reason:
        """Return what a job comes to, or why it came to nothing.

        `taken` are the steps that it has begun, the last of which may sleep.
        """
        self.rolled_back = False
        try:
            result = await worker.run(job, name=name, timeout_s=timeout_s)
        except WorkerBlockedError as error:
            self.asleep_at = taken[-1] if taken else self.asleep_at or str(error)
            return refusals.blocked(subject, self.asleep_at)
        except UnitBlockedError as error:
            return refusals.blocked(subject, error.step)
        except UnitUnsettledError as error:
            return refusals.unsettled(subject, str(error))
        except UnitBusyError as error:
            return refusals.busy(subject, str(error))
        except OSError as error:
            return refusals.failed("look", subject, Seen("", str(error)))
        self.asleep_at = None
        return result

    def note(self, name: str, reasons: Sequence[Reason], observe: ReportProblem) -> None:
        """Have the reasons of a try be notes of the node, in the place of those of the one before."""
        by_name = {f"{name} {number}": reason for number, reason in enumerate(reasons)}
        for gone in self.noted:
            if gone not in by_name:
                observe(gone, None)
        for one, reason in by_name.items():
            observe(one, reason)
        self.noted = tuple(by_name)
