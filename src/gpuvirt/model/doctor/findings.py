"""What a check finds: how grave it is, where it was seen, why it matters, and what mends it; and the report of all."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from gpuvirt.model.reasons import FindingCode, Reason, Seen
from gpuvirt.model.reasons.codes import Code, Level

VERSION = 1


GRAVITY = tuple(Level)


class Area(StrEnum):
    """The parts of the way from firmware to virtual machine, in its order."""

    FIRMWARE = "firmware"
    IOMMU = "iommu"
    DRIVERS = "drivers"
    DEVICES = "devices"
    VGPU = "vgpu"
    KUBELET = "kubelet"
    RUNTIME = "runtime"
    KUBEVIRT = "kubevirt"


class Shown(Protocol):
    """Something that was looked at."""

    @property
    def path(self) -> str:
        """Where."""
        ...

    @property
    def shown(self) -> str:
        """What stood there, in words."""
        ...


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check has to say."""

    level: Level
    subject: str
    message: str
    """What is so, as words that follow the subject."""
    code: Code | None = None
    """What is wrong, in one word; None where nothing is."""
    seen: tuple[Seen, ...] = ()
    why: str | None = None
    """Why it matters."""
    fix: tuple[str, ...] = ()
    """What to do about it, in its order: words, commands to give, lines to write."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one check found."""

    area: Area
    check: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What all checks found; its JSON is a contract (docs/reference.md): fields are added to, and not renamed."""

    level: Level
    results: tuple[Result, ...]
    version: int = VERSION


def worst(findings: Iterable[Finding]) -> Level:
    """Return the gravest level among findings."""
    return max((finding.level for finding in findings), key=GRAVITY.index, default=Level.OK)


def seen(*things: Shown) -> tuple[Seen, ...]:
    """Return what was looked at."""
    return tuple(Seen(thing.path, thing.shown) for thing in things)


def problem(  # noqa: PLR0913  what a finding says: what, where, why, the fix
    code: Code,
    subject: str,
    message: str,
    seen: tuple[Seen, ...] = (),
    *,
    why: str | None = None,
    fix: tuple[str, ...] = (),
    level: Level | None = None,
) -> Finding:
    """Return a finding; its level is that of its code where the case at hand is not milder."""
    return Finding(level or code.level, subject, message, code, seen, why, fix)


def fine(subject: str, message: str, *things: Shown) -> Finding:
    """Return that something is as it should be."""
    return Finding(Level.OK, subject, message, seen=seen(*things))


def unread(subject: str, message: str, *things: Shown) -> Finding:
    """Return that something could not be told."""
    return problem(
        FindingCode.NOT_READ,
        subject,
        message,
        seen(*things),
        why="what could not be read is not taken for absent, nor for well",
        fix=("run it as root, with the host's own /sys, /proc, /dev, /etc and /lib/modules below --host-root",),
    )


def listed(names: Iterable[str], *, most: int = 10) -> str:
    """Return names in a row, each whole: the first ones, and how many more there are."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def of_reason(reason: Reason, level: Level) -> Finding:
    """Return a reason as a finding, with the same code and words."""
    return Finding(
        level,
        reason.subject,
        reason.message,
        reason.code,
        reason.places,
        fix=(reason.fix,) if reason.fix else (),
    )
