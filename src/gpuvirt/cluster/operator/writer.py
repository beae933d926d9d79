"""Writes what was decided, some objects at a time; one that fails waits by itself, and the latest decision counts."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from random import Random

from gpuvirt.clock import Clock, Signal
from gpuvirt.cluster.failures import ApiError
from gpuvirt.cluster.operator.kubevirt.decisions import PatchKubeVirt
from gpuvirt.cluster.operator.writes import (
    ApplyGpuNode,
    ApplyObject,
    DeleteObject,
    PatchNode,
    PatchPolicyStatus,
    Target,
)
from gpuvirt.tasks import backoff_s

log = logging.getLogger(__name__)

AT_ONCE = 8
"""Writes under way: 500 nodes are labelled in some seconds, and an API server hardly notices."""
MOST_PAUSE_S = 60.0

Write = ApplyObject | DeleteObject | PatchNode | ApplyGpuNode | PatchPolicyStatus | PatchKubeVirt


@dataclass(slots=True)
class _Problem:
    """What is wrong with one object's writes."""

    pauses_s: Iterator[float]
    error: ApiError
    until_s: float


class Writer:
    """Has one worker a write that is under way."""

    def __init__(self, write: Callable[[Write], Awaitable[None]], clock: Clock, random: Random) -> None:
        """`write` does one; raises ApiError."""
        self.changed = Signal()
        """Set when a write was done, or begins or ceases to fail."""
        self.done = 0
        """Writes that succeeded."""
        self.failed = 0
        self._write = write
        self._clock = clock
        self._random = random
        self._pending: Mapping[Target, Write] = {}
        self._busy: set[Target] = set()
        self._problems: dict[Target, _Problem] = {}
        self._due = Signal()

    @property
    def failures(self) -> tuple[str, ...]:
        """What could not be written when it was last tried, and is still to be."""
        return tuple(str(one.error) for target, one in self._problems.items() if target in self._pending)

    def offer(self, writes: Iterable[Write]) -> None:
        """Take all that is to be written now; what was offered before and is not there any more is not written."""
        self._pending = {one.target: one for one in writes if one.target not in self._busy}
        self._problems = {target: one for target, one in self._problems.items() if target in self._pending}
        self._due.set()

    async def run(self) -> None:
        """Write for ever."""
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            target, wait_s = self._next()
            if target is None:
                await (self._due.wait_for(self._clock, wait_s) if wait_s is not None else self._due.wait())
                continue
            await self._try(target)

    def _next(self) -> tuple[Target | None, float | None]:
        """Return what to write now; where there is nothing, in how many seconds there may be."""
        now_s, soonest_s = self._clock.monotonic_s(), None
        for target in self._pending:
            if target in self._busy:
                continue
            left_s = self._problems[target].until_s - now_s if target in self._problems else 0.0
            if left_s <= 0:
                return target, None
            soonest_s = left_s if soonest_s is None else min(soonest_s, left_s)
        return None, soonest_s

    async def _try(self, target: Target) -> None:
        write = self._pending[target]
        self._pending = {at: one for at, one in self._pending.items() if at != target}
        self._busy.add(target)
        try:
            await self._write(write)
        except ApiError as error:
            self._fail(write, error)
        else:
            log.info("%s", write.text)
            self.done += 1
            self._problems.pop(target, None)
        finally:
            self._busy.discard(target)
            self.changed.set()
            self._due.set()

    def _fail(self, write: Write, error: ApiError) -> None:
        self.failed += 1
        problem = self._problems.get(write.target)
        pauses_s = problem.pauses_s if problem is not None else backoff_s(most_s=MOST_PAUSE_S)
        pause_s = max(next(pauses_s) * (0.5 + 0.5 * self._random.random()), error.retry_after_s)
        until_s = self._clock.monotonic_s() + pause_s
        if problem is None:
            log.warning("%s; it is tried again", error)
        self._problems[write.target] = _Problem(pauses_s, error, until_s)
        self._pending = {write.target: write, **self._pending}
