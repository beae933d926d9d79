"""A value that many follow: each sees the latest, and nobody waits for the slowest."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from gpuvirt.clock import Signal

T = TypeVar("T")


class Cell(Generic[T]):
    """Holds one value; followers are woken when another takes its place."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._changes = 0
        self._followers: set[Signal] = set()

    def get(self) -> T:
        """Return the value as it is now."""
        return self._value

    def set(self, value: T) -> None:
        """Put another value in."""
        self._value = value
        self._changes += 1
        for follower in self._followers:
            follower.set()

    @contextmanager
    def telling(self, changed: Signal) -> Iterator[None]:
        """Set `changed` at each new value, for as long as the context lasts."""
        self._followers.add(changed)
        try:
            yield
        finally:
            self._followers.discard(changed)

    async def follow(self) -> AsyncIterator[T]:
        """Yield the value as it is, then each that follows; values in between are skipped when they come too fast."""
        changed = Signal()
        with self.telling(changed):
            while True:
                seen = self._changes
                yield self._value
                while self._changes == seen:
                    await changed.wait()
