"""A queue of requests for one of some places: those of several owners come in turn, those of one in order."""

import asyncio
from collections import deque


class FairQueue:
    """Some places, for requests of several owners. It belongs to one event loop."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: dict[object, deque[asyncio.Future[None]]] = {}
        """The requests that wait, by owner; the owner whose turn is next comes first."""

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._waiting.values()))

    async def take(self, owner: object) -> None:
        """Wait for a place, which is the caller's until `leave`."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            else:
                self._forget(owner, turn)
            raise

    def leave(self) -> None:
        """Give a place to the next request that waits."""
        if not self._waiting:
            self._free += 1
            return
        owner = next(iter(self._waiting))
        turns = self._waiting.pop(owner)
        turns.popleft().set_result(None)
        if turns:
            self._waiting[owner] = turns

    def _forget(self, owner: object, turn: asyncio.Future[None]) -> None:
        turns = self._waiting[owner]
        turns.remove(turn)
        if not turns:
            del self._waiting[owner]
