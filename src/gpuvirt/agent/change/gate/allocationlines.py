"""The allocations at a slot's lock: the lines that Allocate adds to its file, and the lock while it creates a vGPU."""

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager

import msgspec

from gpuvirt.agent.change.gate import gaterecord
from gpuvirt.agent.change.gate.gaterecord import AllocationLine
from gpuvirt.model.allocation.ledger import SettledAt


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
