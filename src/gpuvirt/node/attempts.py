"""When something that was refused or failed is tried again: when what it depends on has changed, and now and then."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuvirt.tasks import backoff_s


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
