"""The attempts at one change of the host: when the next one is due, what it results in, and the notes that it leaves.

A change that was refused or has failed is tried again when the circumstances change, and after growing pauses. After
a rollback the host's observed state does not count as a circumstance: the failed attempt itself has changed it. The
pauses grow longer then, too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gpuvirt.model.reasons import Reason, Seen, refusals
from gpuvirt.node.change.gate.gateerrors import UnitBusyError, why_not_passed
from gpuvirt.node.change.steps.changes import Change
from gpuvirt.node.loops.serialworker import SerialWorker, WorkerBlockedError
from gpuvirt.tasks import backoff_s

T = TypeVar("T")
ReportProblem = Callable[[str, Reason | None], None]


MOST_PAUSE_S = 300.0
MOST_PAUSE_AFTER_ROLLBACK_S = 3600.0
"""Each of these attempts removes vGPUs and creates them again."""


@dataclass(frozen=True, slots=True)
class ChangeWorker:
    """The serial worker of a change. A step that the kernel blocks makes the plan outdated and is its last step."""

    worker: SerialWorker
    change: Change

    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        """Return what `job` returns; raise WorkerBlockedError if the kernel blocks it."""
        try:
            return await self.worker.run(job, name=name, timeout_s=timeout_s)
        except WorkerBlockedError:
            self.change.expire()
            raise


def _pauses() -> Iterator[float]:
    return backoff_s(first_s=5.0, most_s=MOST_PAUSE_AFTER_ROLLBACK_S)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What the result of an attempt depends on."""

    desired: object
    users: object = None
    """The processes and pods that use the devices. An attempt changes neither these nor the desired state."""
    observed: object = None
    """The state of the host. An attempt changes it, and restores it in a rollback."""


@dataclass(slots=True)
class Attempts:
    """The attempts at one change so far."""

    tried_on: Circumstances | None = None
    """The circumstances of the last attempt."""
    rolled_back: bool = False
    """Whether the last attempt was rolled back. The host shows traces of its steps for a while."""
    pauses_s: Iterator[float] = field(default_factory=_pauses)
    again_at_s: float = 0.0
    running: bool = False
    noted: tuple[str, ...] = ()
    """The names of the notes that the last attempt has left."""
    blocked_at: str | None = None
    """The step that the kernel blocks."""

    def begin(self, circumstances: Circumstances, now_s: float) -> bool:
        """Return whether an attempt is due now, and if so record that it runs."""
        is_change = self._is_change(circumstances)
        if self.running or not (is_change or now_s >= self.again_at_s):
            return False
        if is_change:
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
        """Record that an earlier agent has tried in vain in the same circumstances."""
        self.tried_on = circumstances
        self.again_at_s = now_s + next(self.pauses_s)

    def forget(self, desired: object = None) -> None:
        """Record that no attempt is due, so that any later circumstances count as a change.

        A rollback is remembered while the same state is `desired`: the host may have been observed half-way.
        """
        if not self.rolled_back or self.tried_on is None or self.tried_on.desired != desired:
            self.tried_on, self.rolled_back = None, False

    def end(self, now_s: float) -> None:
        """Record that the attempt has ended, and when the next one is due."""
        self.running = False
        most_s = MOST_PAUSE_AFTER_ROLLBACK_S if self.rolled_back else MOST_PAUSE_S
        self.again_at_s = now_s + min(next(self.pauses_s), most_s)

    def roll_back(self) -> None:
        """Record that the attempt rolls back its steps."""
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
        """Return the result of a job, or the reason for its failure.

        `taken` are the steps that the job has begun. The kernel may block the last one.
        """
        self.rolled_back = False
        try:
            result = await worker.run(job, name=name, timeout_s=timeout_s)
        except WorkerBlockedError as error:
            self.blocked_at = taken[-1] if taken else self.blocked_at or str(error)
            return refusals.blocked(subject, self.blocked_at)
        except UnitBusyError as error:
            return why_not_passed(subject, error)
        except OSError as error:
            return refusals.failed("observe the host", subject, Seen("", str(error)))
        self.blocked_at = None
        return result

    def note(self, name: str, reasons: Sequence[Reason], observe: ReportProblem) -> None:
        """Report the reasons of an attempt as notes of the node; they replace those of the attempt before."""
        by_name = {f"{name} {number}": reason for number, reason in enumerate(reasons)}
        for old_note in self.noted:
            if old_note not in by_name:
                observe(old_note, None)
        for new_note, reason in by_name.items():
            observe(new_note, reason)
        self.noted = tuple(by_name)
