"""Tries to change one thing of the host: when to try again, what a try comes to, and the notes that it leaves.

What was refused or failed is tried again when what it depends on has changed, and now and then.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gpuvirt.model import refusals
from gpuvirt.model.reasons import Reason
from gpuvirt.node.guard import UnitBusyError
from gpuvirt.node.lane import Lane, LaneBlockedError
from gpuvirt.tasks import backoff_s

HearTrouble = Callable[[str, Reason | None], None]
Job = Callable[[], tuple[Reason, ...]]


def _pauses() -> Iterator[float]:
    return backoff_s(first_s=5.0, most_s=300.0)


@dataclass(slots=True)
class Attempts:
    """What became of one thing's tries so far."""

    tried_on: object = None
    """The state that the last try was made on."""
    pauses_s: Iterator[float] = field(default_factory=_pauses)
    again_at_s: float = 0.0
    running: bool = False
    noted: tuple[str, ...] = ()
    """The names of the notes that the last try has left."""
    asleep_at: str | None = None
    """The step that sleeps in the kernel."""

    def begin(self, state: object, now_s: float) -> bool:
        """Return whether it is to be tried now, and if so take note that it is."""
        news = state != self.tried_on
        if self.running or not (news or now_s >= self.again_at_s):
            return False
        if news:
            self.pauses_s = _pauses()
        self.tried_on = state
        self.running = True
        return True

    def end(self, now_s: float) -> None:
        """Take note that a try has ended."""
        self.running = False
        self.again_at_s = now_s + next(self.pauses_s)

    async def run(
        self, subject: str, job: Job, taken: Sequence[str], *, lane: Lane, name: str, timeout_s: float
    ) -> tuple[Reason, ...]:
        """Return what a job comes to; `taken` are the steps that it has begun, the last of which may sleep."""
        try:
            reasons = await lane.run(job, name=name, timeout_s=timeout_s)
        except LaneBlockedError as error:
            self.asleep_at = taken[-1] if taken else self.asleep_at or str(error)
            return (refusals.blocked(subject, self.asleep_at),)
        except UnitBusyError as error:
            return (refusals.busy(subject, str(error)),)
        except OSError as error:
            return (refusals.failed("look", subject, str(error)),)
        self.asleep_at = None
        return reasons

    def note(self, name: str, reasons: Sequence[Reason], hear: HearTrouble) -> None:
        """Have the reasons of a try be notes of the node, in the place of those of the one before."""
        by_name = {f"{name} {number}": reason for number, reason in enumerate(reasons)}
        for gone in self.noted:
            if gone not in by_name:
                hear(gone, None)
        for one, reason in by_name.items():
            hear(one, reason)
        self.noted = tuple(by_name)
