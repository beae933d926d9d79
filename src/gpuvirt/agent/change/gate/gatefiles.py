"""The files of a host's gates: any process reads each gate's state there, and which allocations are unsettled.

The lock's file of a slot has the lines that Allocate adds, and is lent to Allocate while it creates a vGPU.
"""

import errno
import fcntl
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from time import monotonic  # noqa: TID251  the gate's

import msgspec

from gpuvirt.agent.change.gate import gaterecord
from gpuvirt.agent.change.gate.gatelock import (
    GateFailedError,
    UnitBlockedError,
    UnitBusyError,
    UnitUnsettledError,
    opened,
    try_lock,
)
from gpuvirt.agent.change.gate.gaterecord import (
    ALLOCATABLE,
    AccountReading,
    AllocationLine,
    Damaged,
    Found,
    GateOwner,
    GateRecord,
    GateState,
)
from gpuvirt.agent.store.files import replace_file
from gpuvirt.model.allocation.ledger import SettledAt

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class GateFiles(msgspec.Struct, frozen=True):
    """The files of one host's gates."""

    folder: Path

    def read(self, slot: str) -> Found:
        """Return the record of a slot. Raises GateFailedError, as all methods of a gate do."""
        return gaterecord.decode(_content(self._name_of(slot, "json")), boot_id())

    def write(self, slot: str, record: GateRecord) -> None:
        """Write the record of a slot that this process has locked."""
        path = self.path_of(slot, "json")
        try:
            replace_file(path, gaterecord.encode(record), durable=False)
        except OSError as error:
            raise GateFailedError(path, error) from error

    def state(self, slot: str) -> GateState:
        """Return the state of a gate; this tries both of its locks for a moment."""
        is_locked, has_owner = self._is_taken(slot, "lock"), self._is_taken(slot, "owner")
        if is_locked and not has_owner:  # the change may have ended between the two tries
            is_locked = self._is_taken(slot, "lock")
        return gaterecord.state_of(self.read(slot), is_locked=is_locked, has_owner=has_owner)

    def _is_taken(self, slot: str, kind: str) -> bool:
        with opened(self._name_of(slot, kind)) as fd:
            return not try_lock(fd, fcntl.LOCK_SH)

    def states(self) -> Mapping[str, GateState]:
        """Return the states of all gates that any process has used since boot."""
        return {slot: self.state(slot) for slot in self._slots("lock")}

    def states_by_record(self) -> Mapping[str, GateState]:
        """Return the same as `states`, but try no lock where the record shows no change under way."""
        found = {slot: self.read(slot) for slot in self._slots("json")}
        return {
            slot: record.state if isinstance(record, GateRecord) and record.state in ALLOCATABLE else self.state(slot)
            for slot, record in found.items()
        }

    def _slots(self, kind: str) -> list[str]:
        try:
            names = [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []  # unknown: nothing, no gate was ever used
        except OSError as error:
            raise GateFailedError(self.folder, error) from error
        return sorted(name.removesuffix(f".{kind}") for name in names if name.endswith(f".{kind}"))

    def busy(self, unit: str, slot: str) -> UnitBusyError:
        """Return the error for a gate that another process has locked."""
        found, path = self.read(slot), self.path_of(slot, "owner")
        if isinstance(found, GateRecord) and found.state is GateState.DRAINING:
            return UnitBusyError(f"{unit}: another process waits to change these functions ({path}): {found.intent}")
        return UnitBusyError(
            f"{unit}: another process is changing these functions ({path}), step: {self.step_of(slot)}"
        )

    def blocked_by_kernel(self, unit: str, slot: str) -> UnitBlockedError:
        """Return the error for a gate that stays locked by a blocked step of a process that has ended."""
        step, path = self.step_of(slot), self.path_of(slot, "lock")
        return UnitBlockedError(f"{unit}: the kernel blocks a change whose process has ended ({path}): {step}", step)

    def step_of(self, slot: str) -> str:
        """Return the last step that was begun in a slot."""
        found = self.read(slot)
        return (found.intent if isinstance(found, GateRecord) else None) or "an unknown step"

    def path_of(self, slot: str, kind: str) -> Path:
        """Return the path of a gate's file; `kind` is `lock`, `owner` or `json`."""
        return self.folder / f"{slot}.{kind}"

    def _name_of(self, slot: str, kind: str) -> str:
        """Return the same as text, which takes a tenth of the time: each Allocate needs two for each slot."""
        return f"{self.folder}/{slot}.{kind}"


def _content(path: str) -> bytes | None:
    """Return the content of a file, None where it does not exist."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None  # unknown: nothing, the file does not exist
    except OSError as error:
        raise GateFailedError(path, error) from error


@cache
def boot_id() -> str:
    """Return the id of the current boot."""
    return BOOT_ID.read_text().strip()


@cache
def this_process() -> GateOwner:
    """Return this process as the owner of changes."""
    stat = Path("/proc/self/stat").read_bytes()
    return GateOwner(os.getpid(), int(stat.rpartition(b")")[2].split()[19]))


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


class LentLocks(msgspec.Struct, frozen=True):
    """The locks that changes of this process have, by slot, and those that creations of vGPUs have borrowed.

    A creation shares the slot's lock with other allocations. Where a change of this process has locked the slot, such
    as the removal of another vGPU, the creation borrows that lock. A lock that is borrowed when its change ends stays
    taken until the creation has ended, too, so that no other process begins a change meanwhile.
    """

    ours: dict[str, int] = msgspec.field(default_factory=dict)
    """The descriptors of the locks of slots that a change of this process has."""
    _borrowed: Counter[str] = msgspec.field(default_factory=Counter)
    _left: dict[str, int] = msgspec.field(default_factory=dict)
    """The locks whose changes have ended, and which creations still use."""
    _turn: threading.Lock = msgspec.field(default_factory=threading.Lock)
    """Changes end in threads, while the event loop borrows."""

    def has(self, slot: str) -> bool:
        """Return whether a change of this process has a slot."""
        return slot in self.ours

    @contextmanager
    def taken(self, slot: str, lock: int) -> Iterator[None]:
        """Register a change's lock while the context lasts; its descriptor is closed at the end, or by its borrower."""
        self.ours[slot] = lock
        try:
            yield
        finally:
            with self._turn:
                del self.ours[slot]
                if self._borrowed[slot]:
                    self._left[slot] = lock
                else:
                    os.close(lock)

    @contextmanager
    def borrowed(self, slot: str, otherwise: Callable[[], int]) -> Iterator[int]:
        """Give the lock that a change of this process has, else the one that `otherwise` takes.

        The lock is taken while the context lasts.
        """
        with self._turn:
            lock = self.ours.get(slot, self._left.get(slot))
            if lock is not None:
                self._borrowed[slot] += 1
        if lock is None:
            own = otherwise()
            try:
                yield own
            finally:
                os.close(own)
            return
        try:
            yield lock
        finally:
            with self._turn:
                self._borrowed[slot] -= 1
                if not self._borrowed[slot] and (left := self._left.pop(slot, None)) is not None:
                    os.close(left)


MOST_BYTES = 1 << 14
"""The size of a lock's file above which lines of old allocations are removed from it."""
MEASURED_LINES = 64
"""The number of new lines after which the file is measured."""


class AllocationLines(msgspec.Struct, frozen=True):
    """The lines that one process adds to the files of a host's gates."""

    unmeasured: dict[str, int] = msgspec.field(default_factory=dict)
    """The lines that this process has added to each slot's file since it measured the file."""
    kept: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)
    """The slots whose files have lines, with those of this process that are not settled, by device."""

    def append(self, slot: str, lock: int, lines: Sequence[str]) -> None:
        """Add lines to the file of a lock; no other process writes to it meanwhile. Raises OSError.

        `lock` is the descriptor of the slot's lock.
        """
        added = self.unmeasured.get(slot, MEASURED_LINES)
        self.unmeasured[slot] = added + len(lines)
        if added >= MEASURED_LINES:
            self.unmeasured[slot] = len(lines)
            if (size := os.fstat(lock).st_size) > MOST_BYTES:
                kept = gaterecord.newest(os.pread(lock, size, 0).decode(errors="replace"))
                os.ftruncate(lock, 0)
                os.write(lock, kept.encode())
        self.kept.setdefault(slot, {}).update((line.rstrip("\n").split(" ", 3)[-1], line) for line in lines)
        new = "".join(lines).encode()
        if os.write(lock, new) != len(new):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def keep(self, slot: str, lock: int, settled_s: SettledAt, admitting: AbstractSet[str], damaged_s: float) -> None:
        """Add the lines again that were deleted, or empty the file of a lock if all its lines are settled.

        `settled_s`: the kubelet's accounts show the allocations from before that time. `admitting` are devices whose
        pods only the agent knows to be no ended ones. `damaged_s` is the time of lines that can't be parsed. No other
        process uses the file meanwhile. Raises OSError.
        """
        content = os.pread(lock, os.fstat(lock).st_size, 0).decode(errors="replace")
        found = gaterecord.lines_of(content, damaged_s)
        known = {line.device for line in found}
        deleted = [line for device, line in self.kept.get(slot, {}).items() if device not in known]

        def is_open(line: AllocationLine) -> bool:
            return line.at_s >= settled_s or line.device in admitting

        if lost := [text for text in deleted if any(map(is_open, gaterecord.lines_of(text, 0.0)))]:
            os.write(lock, "".join(["\n" if content[-1:] not in {"", "\n"} else "", *lost]).encode())
        elif not any(map(is_open, found)):
            os.ftruncate(lock, 0)
            self.kept.pop(slot, None)
