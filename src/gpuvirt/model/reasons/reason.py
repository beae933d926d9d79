"""Why something is not offered, unhealthy, refused or pending: its code, what was seen, and how to mend it."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuvirt.model.reasons.reasoncodes import ReasonCode


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason."""

    code: ReasonCode
    subject: str
    """What it is about: a PCI address, an mdev, a resource, a file."""
    message: str
    """What is the matter, as a sentence that follows the subject: `is bound to nvidia`."""
    seen: str | None = None
    """Where it was seen and what stood there: `/sys/bus/pci/devices/0000:65:00.0/driver -> nvidia`."""
    fix: str | None = None
    """What to do about it."""

    @property
    def text(self) -> str:
        """The whole as one line."""
        parts = [f"{self.code}: {self.subject} {self.message}"]
        parts += [f"seen: {self.seen}"] if self.seen else []
        parts += [f"fix: {self.fix}"] if self.fix else []
        return "; ".join(parts)


def code_in(text: str) -> ReasonCode | None:
    """Return the code that a reason's text begins with, None where it begins with none."""
    return ReasonCode.named(text.partition(":")[0])


def in_words(reasons: Sequence[Reason]) -> str:
    """Return several reasons as one line."""
    return " | ".join(reason.text for reason in reasons)
