"""Why something is not offered, unhealthy, refused or pending: its code, what was seen, and how to mend it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import User
from gpuvirt.model.reasons.reasoncodes import ReasonCode

THERE, ABSENT = "there", "not there"
DEVICES = "/sys/bus/pci/devices"


@dataclass(frozen=True, slots=True)
class Seen:
    """Where something was read, and what stood there."""

    path: str
    """A file, a field, a command or an API; empty where only words are known."""
    value: str = THERE
    joint: ClassVar[str] = ": "

    @classmethod
    def absent(cls, path: str) -> Self:
        """Return that something does not exist."""
        return cls(path, ABSENT)

    @property
    def shown(self) -> str:
        """What stood there."""
        return self.value

    @property
    def text(self) -> str:
        """The place in a line of text: `PATH: VALUE`, `no PATH`, or `PATH` alone."""
        if self.value == ABSENT:
            return f"no {self.path}"
        return self.path if self.value == THERE else f"{self.path}{self.joint if self.path else ''}{self.value}"


class Link(Seen):
    """A link, and what it points to."""

    __slots__ = ()
    joint: ClassVar[str] = " -> "


def device_file(address: str, name: str) -> str:
    """Return the path of a PCI function's attribute."""
    return f"{DEVICES}/{address}/{name}"


def driver_link(address: str, driver: object) -> Seen:
    """Return that a function has a driver, or none."""
    path = device_file(address, "driver")
    return Seen.absent(path) if driver is None else Link(path, str(driver))


def opened_by(users: Sequence[User]) -> tuple[Seen, ...]:
    """Return where it shows that processes have a device open: at the first of them."""
    return tuple(Link(f"/proc/{user.pid}/fd", user.node) for user in users[:1])


def not_read(unread: Unread) -> Seen:
    """Return what was met in place of a value."""
    return Seen(unread.path, unread.said)


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason; its wording is in the modules of this package."""

    code: ReasonCode
    subject: str
    """A PCI address, an mdev, a resource, a file."""
    message: str
    """What is wrong, as words that follow the subject: `is bound to nvidia`."""
    places: tuple[Seen, ...] = ()
    """Where it was seen."""
    fix: str | None = None
    """How to mend it."""
    seen: str | None = field(init=False, default=None)
    """All places in a line of text; JSON has both."""

    def __post_init__(self) -> None:
        """Say the places in words; what an older version has written has words alone."""
        if self.places:
            object.__setattr__(self, "seen", ", ".join(place.text for place in self.places))

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
