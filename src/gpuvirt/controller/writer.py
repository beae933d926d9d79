"""Makes the controller's writes, several at a time. A failed write is retried by itself; the latest decision counts."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from random import Random

import msgspec

from gpuvirt.clock import Clock, Signal
from gpuvirt.controller.kubevirt.decisions import PatchKubeVirt
from gpuvirt.controller.writes import ApplyGpuNode, ApplyObject, DeleteObject, PatchNode, PatchPolicyStatus, WriteTarget
from gpuvirt.kube.failures import ApiError
from gpuvirt.plain import one_line
from gpuvirt.tasks import backoff_s

MOST_LOGGED = 400
"""The most characters of a write, an error or a reason in the log: a whole line stays below 500."""
_CUT = "..."
_SEEN, _FIX = "; seen: ", "; fix: "


def logged(text: str) -> str:
    """Return a text, such as a reason's, on one line of the log."""
    line = " ".join(text.split())
    problem, seen, rest = line.partition(_SEEN)
    evidence, has_fix, fix = rest.rpartition(_FIX)
    if len(line) <= MOST_LOGGED or not (seen and has_fix):
        return one_line(line, MOST_LOGGED)
    room = MOST_LOGGED - len(problem) - len(_SEEN) - len(_CUT) - len(_FIX) - len(fix)
    shown = f"{_SEEN}{evidence[:room]}{_CUT}" if room > 0 else ""
    return one_line(f"{problem}{shown}{_FIX}{fix}", MOST_LOGGED)


log = logging.getLogger(__name__)

AT_ONCE = 8
"""Concurrent writes: with 8, 500 nodes are labelled in some seconds, at little load for the API server."""
MOST_PAUSE_S = 60.0
STATUS_EVERY_S = 1.0
"""The time between two writes of a policy's status: while nodes change, each decision counts them differently."""

Write = ApplyObject | DeleteObject | PatchNode | ApplyGpuNode | PatchPolicyStatus | PatchKubeVirt


class _Problem(msgspec.Struct):
    """The last error of one object's writes, and when to retry."""

    pauses_s: Iterator[float]
    error: ApiError
    until_s: float


@dataclass(frozen=True, slots=True, order=True)
class _Retry:
    """When to write a target: again after a failure, or some time after its last write."""

    at_s: float
    target: WriteTarget = field(compare=False)


class ObjectWriter:
    """Makes writes with `AT_ONCE` workers, at most one write to an object at a time."""

    def __init__(self, write: Callable[[Write], Awaitable[None]], clock: Clock, random: Random) -> None:
        """Make a writer; `write` makes one write and raises ApiError."""
        self.changed = Signal()
        """Set when a write has succeeded or failed."""
        self.done = 0
        """How many writes have succeeded."""
        self.failed = 0
        self._write = write
        self._clock = clock
        self._random = random
        self._pending: dict[WriteTarget, Write] = {}
        """The writes to make, those of failed targets too."""
        self._fresh = deque[WriteTarget]()
        """The pending targets that need not wait, in the order of the writes."""
        self._retries: list[_Retry] = []
        """A heap of the targets that wait, by their time."""
        self._busy: set[WriteTarget] = set()
        self._problems: dict[WriteTarget, _Problem] = {}
        self._rests_until_s: dict[WriteTarget, float] = {}
        """Until when targets are not written again that were written a moment ago."""
        self._due = Signal()

    @property
    def failures(self) -> tuple[str, ...]:
        """The errors of pending writes that failed when they were last tried."""
        return tuple(str(problem.error) for target, problem in self._problems.items() if target in self._pending)

    def offer(self, writes: Iterable[Write]) -> None:
        """Replace all pending writes; a write that is under way is finished first, and decided again then."""
        self._pending = {write.target: write for write in writes if write.target not in self._busy}
        self._problems = {
            target: problem
            for target, problem in self._problems.items()
            if target in self._pending or target in self._busy
        }
        now_s = self._clock.monotonic_s()
        self._rests_until_s = {target: at_s for target, at_s in self._rests_until_s.items() if at_s > now_s}
        waiting = {target: problem.until_s for target, problem in self._problems.items()}
        waiting |= {target: max(at_s, waiting.get(target, 0.0)) for target, at_s in self._rests_until_s.items()}
        self._fresh = deque(target for target in self._pending if target not in waiting)
        self._retries = [_Retry(at_s, target) for target, at_s in waiting.items() if target in self._pending]
        heapify(self._retries)
        self._due.set()

    async def run(self) -> None:
        """Make pending writes until cancelled."""
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

    def _next(self) -> tuple[WriteTarget | None, float | None]:
        """Return the target to write now; if there is none, the seconds until the first retry, or None.

        The target leaves the queue, so that a write costs the same however many are pending.
        """
        if self._retries:
            left_s = self._retries[0].at_s - self._clock.monotonic_s()
            if left_s <= 0:
                return heappop(self._retries).target, None
            if not self._fresh:
                return None, left_s
        return (self._fresh.popleft() if self._fresh else None), None

    async def _try(self, target: WriteTarget) -> None:
        write = self._pending.pop(target)
        self._busy.add(target)
        if isinstance(write, PatchPolicyStatus):
            self._rests_until_s[target] = self._clock.monotonic_s() + STATUS_EVERY_S
        try:
            await self._write(write)
        except ApiError as error:
            self._fail(write, error)
        else:
            log.info("%s", logged(write.text))
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
        until_s = max(self._clock.monotonic_s() + pause_s, self._rests_until_s.get(write.target, 0.0))
        if problem is None:
            log.warning("%s; the controller retries the write", logged(str(error)))
        self._problems[write.target] = _Problem(pauses_s, error, until_s)
        self._pending[write.target] = write
        heappush(self._retries, _Retry(until_s, write.target))
