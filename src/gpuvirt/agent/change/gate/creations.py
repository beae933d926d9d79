"""The locks of vGPU creations: Allocate creates a vGPU while no other process changes the GPU's slot.

A creation shares the slot's lock with other allocations. Where a change of this process has locked the slot, such as
the removal of another vGPU, the creation borrows that lock. A lock that is borrowed when its change ends stays taken
until the creation has ended, too, so that no other process begins a change meanwhile.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec


class LentLocks(msgspec.Struct, frozen=True):
    """The locks that changes of this process have, by slot, and those that creations have borrowed."""

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
