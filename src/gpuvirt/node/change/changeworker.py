"""The serial worker of a change of an isolation unit, and how a job that fails there is reported."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from gpuvirt.loops.serialworker import SerialWorker, WorkerBlockedError
from gpuvirt.model.reasons import Reason, Seen, refusals
from gpuvirt.node.change.gate.gateerrors import UnitBusyError, why_not_passed
from gpuvirt.node.change.steps.changes import Change

T = TypeVar("T")


class ChangeWorker(msgspec.Struct, frozen=True):
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


class JobFailed(msgspec.Struct, frozen=True):
    """Why a job has no result."""

    reason: Reason
    blocked_at: str | None
    """The step that the kernel blocks, also while the worker still waits for it."""


async def attempt(
    subject: str,
    job: Callable[[], T],
    taken: Sequence[str],
    *,
    worker: SerialWorker,
    timeout_s: float,
    blocked_at: str | None = None,
) -> T | JobFailed:
    """Return the result of a job, or why it has none.

    `taken` are the steps that the job has begun. The kernel may block the last one. `blocked_at` is the step that it
    has blocked so far.
    """
    try:
        return await worker.run(job, name="change", timeout_s=timeout_s)
    except WorkerBlockedError as error:
        step = taken[-1] if taken else blocked_at or str(error)
        return JobFailed(refusals.blocked(subject, step), step)
    except UnitBusyError as error:
        return JobFailed(why_not_passed(subject, error), blocked_at)
    except OSError as error:
        return JobFailed(refusals.failed("observe the host", subject, Seen("", str(error))), blocked_at)
