"""A reading that all who ask at the same time share: none of them gets one that began before it asked."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedReading(Generic[T]):
    """All who ask while a reading is under way share the next one. It belongs to one event loop."""

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._reading = asyncio.Lock()
        self._last_asked = 0
        """The number of the last request for a reading."""
        self._latest: tuple[int, T] | None = None
        """The last request that came before the last reading began, and that reading."""

    async def read(self) -> T:
        """Return a reading that began after this was called. One that fails does so for the one who began it alone."""
        self._last_asked += 1
        asked = self._last_asked
        async with self._reading:
            if self._latest is None or self._latest[0] < asked:
                last = self._last_asked
                self._latest = last, await self._read()
            return self._latest[1]
