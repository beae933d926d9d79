"""Findings of checks: the level, where it was seen, why it matters, and the fix; and the report of all checks."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Protocol

import msgspec

from gpuvirt.model.reasons import FindingCode, Reason, Seen
from gpuvirt.model.reasons.codes import Code, Level

VERSION = 1
GRAVITY = tuple(Level)
AS_ROOT = "run this command as root, with the host's own /sys, /proc, /dev, /etc and /lib/modules below --host-root"
NEVER_ABSENT = "gpuvirt treats a value that could not be read as unknown, neither as absent nor as correct"


class Area(StrEnum):
    """The groups of checks, in order from the firmware to the VM."""

    FIRMWARE = "firmware"
    IOMMU = "iommu"
    DRIVERS = "drivers"
    DEVICES = "devices"
    VGPU = "vgpu"
    KUBELET = "kubelet"
    RUNTIME = "runtime"
    KUBEVIRT = "kubevirt"


class Shown(Protocol):
    """A file, a folder or a link that was read."""

    @property
    def path(self) -> str:
        """Its path."""
        ...

    @property
    def shown(self) -> str:
        """Its content in words."""
        ...


class Finding(msgspec.Struct, frozen=True):
    """A result of a check for one subject: a problem, or the confirmation that the subject is in order."""

    level: Level
    subject: str
    message: str
    """The words that follow the subject."""
    code: Code | None = None
    """The code of the problem; None if the subject is in order."""
    seen: tuple[Seen, ...] = ()
    why: str | None = None
    """Why it matters."""
    fix: tuple[str, ...] = ()
    """The steps of the fix, in order: instructions, commands to run, lines to write into a file."""


class CheckResult(msgspec.Struct, frozen=True):
    """The findings of one check."""

    area: Area
    check: str
    findings: tuple[Finding, ...]


class Report(msgspec.Struct, frozen=True):
    """The findings of all checks; its JSON is a contract (docs/reference/json.md): fields are added, never renamed."""

    level: Level
    results: tuple[CheckResult, ...]
    version: int = VERSION


def worst(findings: Iterable[Finding]) -> Level:
    """Return the gravest level among findings."""
    return max((finding.level for finding in findings), key=GRAVITY.index, default=Level.OK)


def seen(*things: Shown) -> tuple[Seen, ...]:
    """Return the paths and the contents that were read."""
    return tuple(Seen(thing.path, thing.shown) for thing in things)


def problem(  # noqa: PLR0913  the fields of a finding
    code: Code,
    subject: str,
    message: str,
    seen: tuple[Seen, ...] = (),
    *,
    why: str | None = None,
    fix: tuple[str, ...] = (),
    level: Level | None = None,
) -> Finding:
    """Return a finding; without a level it has the level of its code."""
    return Finding(level or code.level, subject, message, code, seen, why, fix)


def fine(subject: str, message: str, *things: Shown) -> Finding:
    """Return the finding that a subject is in order."""
    return Finding(Level.OK, subject, message, seen=seen(*things))


def unread(subject: str, message: str, *things: Shown, fix: str = AS_ROOT) -> Finding:
    """Return the finding that a subject could not be read."""
    return problem(FindingCode.NOT_READ, subject, message, seen(*things), why=NEVER_ABSENT, fix=(fix,))


def listed(names: Iterable[str], *, most: int = 10) -> str:
    """Return the first names as a list, and how many more there are."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def of_reason(reason: Reason, level: Level, *steps: str, why: str | None = None) -> Finding:
    """Return a finding with the code, the words and the fix of a reason; `steps` carry the fix out on this host."""
    fix = (*((reason.fix,) if reason.fix else ()), *steps)
    return Finding(level, reason.subject, reason.message, reason.code, reason.places, why, fix)
