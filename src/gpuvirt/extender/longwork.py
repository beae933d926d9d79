"""Work on many nodes in one request: done in short parts, between which the extender does everything else.

kube-scheduler asks about one pod at a time, but several schedulers, and other clients, may ask at once. So long works
take turns, and in one turn of the event loop at most one of them does a part. The lease, the watches and the requests
that need no search never wait for more.
"""

import asyncio
from collections.abc import Generator
from typing import TypeVar

from gpuvirt.clock import Clock
from gpuvirt.model.shares.steps import Steps

T = TypeVar("T")

PART = 500
"""The steps of a part, about half a millisecond; a part ends with the search that exceeds them."""


class LongWork:
    """The turns of the works of one process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()
        """Given in the order of the requests for it."""

    async def result(self, work: Generator[None, None, T], steps: Steps) -> T:
        """Return the result of work that yields wherever it may be interrupted, and counts its `steps`.

        Work of fewer steps than a part is done at once.
        """
        done = _part(work, steps)
        while not done:
            async with self._turn:
                await self._clock.sleep(0)
                done = _part(work, steps)
        return done[0]


def _part(work: Generator[None, None, T], steps: Steps) -> tuple[T] | tuple[()]:
    """Do a part of some work; return its result, or an empty tuple while more is to be done."""
    until = steps.left - PART
    while steps.left > until:
        try:
            next(work)
        except StopIteration as done:
            return (done.value,)
    return ()
