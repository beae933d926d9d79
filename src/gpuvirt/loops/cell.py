"""A value with several followers: each gets the latest value, independently of slower followers."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from gpuvirt.clock import Signal

T = TypeVar("T")


class Cell(Generic[T]):
    """Holds one value, and wakes followers when it is replaced."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._changes = 0
        self._followers: set[Signal] = set()

    def get(self) -> T:
        """Return the present value."""
        return self._value

    def set(self, value: T) -> None:
        """Replace the value."""
        self._value = value
        self._changes += 1
        for follower in self._followers:
            follower.set()

    @contextmanager
    def notifying(self, changed: Signal) -> Iterator[None]:
        """Set `changed` at each new value while the context lasts."""
        self._followers.add(changed)
        try:
            yield
        finally:
            self._followers.discard(changed)

    async def follow(self) -> AsyncIterator[T]:
        """Yield the present value, then each later one; values that come too fast are skipped."""
        changed = Signal()
        with self.notifying(changed):
            while True:
                seen = self._changes
                yield self._value
                while self._changes == seen:
                    await changed.wait()
