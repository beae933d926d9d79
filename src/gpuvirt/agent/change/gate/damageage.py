"""The age of damage in a gate's files: how long ago a process has first seen it, by the host's monotonic clock.

The file's own time is that of the wall clock, which may have stepped since. So the first sight is noted beside the
file, with the file's identity, for all processes of this boot.
"""

from pathlib import Path
from time import monotonic  # noqa: TID251  the gate's

from gpuvirt.agent.change.gate.gateerrors import GateFailedError

SUFFIX = ".damaged"
NEW_S = 10.0
"""How long a damaged record refuses changes: its process may be about to replace it."""


def is_new(path: Path) -> bool:
    """Return whether a damaged file was first seen a moment ago; raise GateFailedError as `seen_damaged_s`."""
    return monotonic() < seen_damaged_s(path) + NEW_S


def seen_damaged_s(path: Path) -> float:
    """Return when a file was first seen to be damaged, by the host's monotonic clock; now if it was not.

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
