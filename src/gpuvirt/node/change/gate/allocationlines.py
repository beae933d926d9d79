"""The lines of allocations in the file of a slot's lock, as Allocate adds them: each is there before it answers."""

import errno
import os
from collections.abc import Sequence

import msgspec

from gpuvirt.node.change.gate import gaterecord

MOST_BYTES = 1 << 14
"""The size of a lock's file above which lines of old allocations are removed from it."""
MEASURED_LINES = 64
"""The number of new lines after which the file is measured."""


class AllocationLines(msgspec.Struct, frozen=True):
    """The lines that one process adds to the files of a host's gates."""

    unmeasured: dict[str, int] = msgspec.field(default_factory=dict)
    """The lines that this process has added to each slot's file since it measured the file."""

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
        new = "".join(lines).encode()
        if os.write(lock, new) != len(new):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
