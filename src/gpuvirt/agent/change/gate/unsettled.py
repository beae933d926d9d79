"""Refuses a slot whose allocations are not known completely: the accounts may lack one, or its record is damaged."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic  # noqa: TID251  the gate's

from gpuvirt.agent.change.gate import gaterecord
from gpuvirt.agent.change.gate.gatefiles import GateFiles, this_process
from gpuvirt.agent.change.gate.gatelock import GateFailedError, UnitUnsettledError
from gpuvirt.agent.change.gate.gaterecord import AccountReading, Damaged

SUFFIX = ".damaged"
NEW_S = 10.0
"""How long a damaged record refuses changes: its process may be about to replace it."""


def is_new(path: Path) -> bool:
    """Return whether a damaged file was first seen a moment ago; raise GateFailedError as `seen_damaged_s`."""
    return monotonic() < seen_damaged_s(path) + NEW_S


def seen_damaged_s(path: Path) -> float:
    """Return when a file was first seen to be damaged, by the host's monotonic clock; now if it was not.

    The file's own time is that of the wall clock, which may have stepped since. So the first sight is noted beside the
    file, with the file's identity, for all processes of this boot.
    Raises GateFailedError if the file can't be examined, or its age can't be noted.
    """
    note, now_s = path.with_name(f"{path.name}{SUFFIX}"), monotonic()
    try:
        found = path.stat()
        identity = f"{found.st_ino} {found.st_mtime_ns} {found.st_size}"
        seen_s = _seen_s(note, identity)
        if seen_s is None or seen_s > now_s:
            note.write_text(f"{identity} {now_s}")
            return now_s
    except OSError as error:
        raise GateFailedError(path, error) from error
    return seen_s


def _seen_s(note: Path, identity: str) -> float | None:
    """Return when a file with this identity was first seen, None if it was not."""
    try:
        noted, _, seen = note.read_text().rpartition(" ")
        return float(seen) if noted == identity else None
    except (FileNotFoundError, ValueError):
        return None  # unknown: the file counts as new, and refuses


Read = Callable[[], Sequence[AccountReading]]
"""Returns the newest readings of the kubelet's two accounts; empty while one of them is unknown."""


def no_readings() -> Sequence[AccountReading]:
    """Return no readings, for a host whose kubelet is not asked."""
    return ()


def refuse_unsettled(gates: GateFiles, unit: str, slot: str, lock: int, readings: Read) -> None:
    """Raise UnitUnsettledError if the kubelet's accounts may lack an allocation, or if a new record is damaged.

    `lock` is the descriptor of the slot's lock, whose file has the allocations. Raises GateFailedError if that file
    can't be read.
    """
    lines = gaterecord.lines_of(content := _lines(gates, slot, lock), 0.0)
    path, owner = gates.path_of(slot, "lock"), this_process()
    if any(line.device == gaterecord.UNREADABLE for line in lines):
        lines = gaterecord.lines_of(content, seen_damaged_s(path))
    read = readings() if gaterecord.unsettled(lines, owner, ()) else ()
    for line in gaterecord.unsettled(lines, owner, read):
        raise UnitUnsettledError(
            f"{unit}: {line.device} was allocated {monotonic() - line.at_s:.1f} s ago by process {line.owner.pid}"
            f" ({path}), and the kubelet may be admitting the pod",
            again_soon=any(reading.settled_s > line.at_s for reading in read),
        )
    refuse_damaged(gates, unit, slot)


def refuse_damaged(gates: GateFiles, unit: str, slot: str) -> None:
    """Raise UnitUnsettledError if the record of a slot is damaged since a short time."""
    found, path = gates.read(slot), gates.path_of(slot, "json")
    if isinstance(found, Damaged) and is_new(path):
        problem = f"{unit}: the gate's record {path} can't be decoded: {found.error}"
        raise UnitUnsettledError(f"{problem}; gpuvirt ignores it {NEW_S:g} s after it was first seen")


def _lines(gates: GateFiles, slot: str, lock: int) -> str:
    try:
        return os.pread(lock, os.fstat(lock).st_size, 0).decode(errors="replace")
    except OSError as error:
        raise GateFailedError(gates.path_of(slot, "lock"), error) from error
