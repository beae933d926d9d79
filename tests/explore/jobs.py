"""Serial workers whose jobs are strands: a job stands still at each point, and others go on meanwhile."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from explore.loop import ExploredLoop
from explore.scheduler import KilledError, Process, Scheduler, Strand
from gpuvirt.node.lane import LaneBlockedError

T = TypeVar("T")


class ExploredWorker:
    """One serial worker of a process: it runs one job after another, and can be left behind with one that sleeps."""

    def __init__(self, name: str, scheduler: Scheduler, process: Process, loop: ExploredLoop) -> None:
        self._name = name
        self._scheduler = scheduler
        self._process = process
        self._loop = loop
        self._jobs: deque[tuple[str, Callable[[], None]]] = deque()
        self._busy = False
        self._asleep: str | None = None
        """The job that has had its time."""

    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        """Return what `job` returns, raise what it raises."""
        if self._process.dead:
            raise KilledError
        if self._asleep is not None:
            raise LaneBlockedError(f"{self._name}: {self._asleep} has not come back from the kernel yet")
        outcome: asyncio.Future[T] = self._loop.create_future()
        self._jobs.append((name, lambda: self._do(job, outcome)))
        if not self._busy:
            self._busy = True
            self._scheduler.spawn(Strand(self._process, f"{self._process.name}'s worker {self._name}", self._work))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(outcome)
        except TimeoutError as error:
            if outcome.done():  # the job's own
                raise
            self._asleep = name
            outcome.cancel()
            raise LaneBlockedError(f"{self._name}: {name} sleeps in the kernel since {timeout_s:g} s") from error

    def _work(self) -> None:
        while self._jobs:
            name, job = self._jobs.popleft()
            self._scheduler.point(name)
            job()
        self._busy = False

    def _do(self, job: Callable[[], T], outcome: "asyncio.Future[T]") -> None:
        if outcome.cancelled():
            return
        try:
            result = job()
        except Exception as error:  # noqa: BLE001  it belongs to whoever waits for the job
            self._end(outcome, error=error)
        else:
            self._end(outcome, result=[result])

    def _end(
        self, outcome: "asyncio.Future[T]", *, result: list[T] | None = None, error: Exception | None = None
    ) -> None:
        self._asleep = None
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
            outcome.exception()  # whoever has waited may be gone
        elif result is not None:
            outcome.set_result(result[0])
