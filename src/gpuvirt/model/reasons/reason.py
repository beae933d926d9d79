"""A reason: a code, a message, the places where the cause was seen, and the fix."""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, Self

import msgspec
from msgspec.structs import force_setattr

from gpuvirt.facts import sysfs
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import OpenDeviceUser
from gpuvirt.model.reasons.reasoncodes import ReasonCode

EXISTS, ABSENT = "there", "not there"


class Seen(msgspec.Struct, frozen=True):
    """A place, and the value that was found there."""

    path: str
    """A file, a field, a command or an API; empty if the value is a text without a place."""
    value: str = EXISTS
    joint: ClassVar[str] = ": "

    @classmethod
    def absent(cls, path: str) -> Self:
        """Return a place that does not exist."""
        return cls(path, ABSENT)

    @property
    def shown(self) -> str:
        """The value."""
        return self.value

    @property
    def text(self) -> str:
        """The place in a line of text: `PATH: VALUE`, `no PATH`, or `PATH` alone."""
        if self.value == ABSENT:
            return f"no {self.path}"
        return self.path if self.value == EXISTS else f"{self.path}{self.joint if self.path else ''}{self.value}"


class Link(Seen, frozen=True):
    """A link, and its target."""

    joint: ClassVar[str] = " -> "


def driver_link(address: str, driver: object) -> Seen:
    """Return a function's link to its driver, or that it has none."""
    path = sysfs.device_path(address, "driver")
    return Seen.absent(path) if driver is None else Link(path, str(driver))


def opened_by(users: Sequence[OpenDeviceUser]) -> tuple[Seen, ...]:
    """Return the open file of the first of these processes."""
    return tuple(Link(f"/proc/{user.pid}/fd", user.node) for user in users[:1])


def not_read(unread: Unread) -> Seen:
    """Return the error, or the malformed value, of something that could not be read."""
    return Seen(unread.path, unread.detail)


class Reason(msgspec.Struct, frozen=True):
    """A reason. The other modules of this package word its message and fix."""

    code: ReasonCode
    subject: str
    """A PCI address, an mdev, a resource, a file."""
    message: str
    """The words that follow the subject: `is bound to nvidia`."""
    places: tuple[Seen, ...] = ()
    """The places where the cause was seen."""
    fix: str | None = None
    """How to remove the cause."""
    seen: str | None = None
    """All places in a line of text. JSON has `places` and `seen`."""

    def __post_init__(self) -> None:
        """Derive `seen` from the places. A reason that an older version has written has `seen` alone."""
        if self.places:
            force_setattr(self, "seen", ", ".join(place.text for place in self.places))

    @property
    def text(self) -> str:
        """The reason as one line."""
        parts = [f"{self.code}: {self.subject} {self.message}"]
        parts += [f"seen: {self.seen}"] if self.seen else []
        parts += [f"fix: {self.fix}"] if self.fix else []
        return "; ".join(parts)


def count_of(number: int, noun: str) -> str:
    """Return a number of things as text: `1 GPU`, `8 GPUs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def with_code(code: str, text: str) -> str:
    """Return a text behind its code; a reason's own text begins with its code already."""
    if not text:
        return code
    return text if text.startswith(f"{code}: ") else f"{code}: {text}"


def joined(reasons: Sequence[Reason]) -> tuple[str, str]:
    """Return the code of the first of some reasons, and the texts of all, as a condition has them."""
    return str(reasons[0].code), reasons_text(reasons)


def without_code(code: str, text: str) -> str:
    """Return a text that follows a code elsewhere: without the code that a reason's own text begins with."""
    return text.removeprefix(f"{code}: ")


def code_in(text: str) -> ReasonCode | None:
    """Return the code that a reason's text begins with, None where it begins with none."""
    return ReasonCode.named(text.partition(":")[0])


def reasons_text(reasons: Sequence[Reason]) -> str:
    """Return several reasons as one line."""
    return " | ".join(reason.text for reason in reasons)


ALSO = "; also: "
"""Before the further subjects of a reason."""
_NEXT_REASON = re.compile(r" \| (?=[A-Z][A-Za-z]+: )")
"""Between two reasons of a line: texts of programs may have the bar, too."""
MOST_SUBJECTS = 3
"""The most further subjects that a line names of a reason that several have."""


def grouped_text(reasons: Sequence[Reason]) -> str:
    """Return several reasons as one line; of those that differ in subjects and places alone, the first in full."""
    groups = defaultdict[tuple[str, str, str | None], list[Reason]](list)
    for reason in reasons:
        groups[reason.code, reason.message, reason.fix].append(reason)
    return " | ".join(_group_text(*group) for group in groups.values())


def reasons_in(text: str) -> list[str]:
    """Return the texts of the reasons that a line has."""
    return [part for part in _NEXT_REASON.split(text) if part]


def _group_text(first: Reason, *others: Reason) -> str:
    subjects = [subject for subject in dict.fromkeys(other.subject for other in others) if subject != first.subject]
    more = f" and {len(subjects) - MOST_SUBJECTS} more" if subjects[MOST_SUBJECTS:] else ""
    return f"{first.text}{ALSO}{', '.join(subjects[:MOST_SUBJECTS])}{more}" if subjects else first.text
