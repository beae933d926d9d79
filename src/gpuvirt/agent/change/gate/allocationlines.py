"""The lines of allocations in the file of a slot's lock, as Allocate adds them: each is there before it answers."""

import errno
import os
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import msgspec

from gpuvirt.agent.change.gate import gaterecord
from gpuvirt.agent.change.gate.gaterecord import AllocationLine
from gpuvirt.model.allocation.ledger import SettledAt

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
