"""Serial workers whose jobs are strands: a job pauses at each point, and other strands continue meanwhile."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from gpuvirt.loops.serialworker import WorkerBlockedError, WorkerBusyError
from tests.explore.loop import ExploredLoop
from tests.explore.scheduler import KilledError, Process, Scheduler, Strand

T = TypeVar("T")


@dataclass(eq=False)
class _Job:
    name: str
    do: Callable[[], None]


class ExploredWorker:
    """A serial worker of a process: it runs one job after another, and can be abandoned with a blocked job."""

    def __init__(
        self, name: str, scheduler: Scheduler, process: Process, loop: ExploredLoop, *, ends: bool = False
    ) -> None:
        """With `ends` the end of each job is a point: other strands may go on before a task has its result."""
        self._ends = ends
        self._name = name
        self._scheduler = scheduler
        self._process = process
        self._loop = loop
        self._jobs: deque[_Job] = deque()
        self._running = ""
        self._busy = False
        self._asleep: str | None = None
        """The job that timed out."""

    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        """Return what `job` returns, raise what it raises."""
        if self._process.dead:
            raise KilledError
        if self._asleep is not None:
            raise WorkerBusyError(f"{self._name}: {self._asleep} has not come back from the kernel yet")
        outcome: asyncio.Future[T] = self._loop.create_future()
        entry = _Job(name, lambda: self._do(job, outcome))
        self._jobs.append(entry)
        if not self._busy:
            self._busy = True
            self._scheduler.spawn(Strand(self._process, f"{self._process.name}'s worker {self._name}", self._work))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(outcome)
        except TimeoutError as error:
            if outcome.done():  # it has ended as its time was over, or the error is its own
                return outcome.result()
            self._asleep = self._running
            if entry in self._jobs:
                self._jobs.remove(entry)  # it waits behind a blocked job
            message = f"{self._name}: {self._running} sleeps in the kernel since {timeout_s:g} s"
            raise WorkerBlockedError(message) from error

    def _work(self) -> None:
        while self._jobs:
            job = self._jobs.popleft()
            self._running = job.name
            self._scheduler.point(job.name)
            job.do()
        self._busy, self._asleep = False, None

    def _do(self, job: Callable[[], T], outcome: "asyncio.Future[T]") -> None:
        try:
            result = job()
            if self._ends:
                self._scheduler.point(f"the end of {self._running}")
        except Exception as error:  # noqa: BLE001  the task that waits for the job gets it
            self._asleep = None
            if not outcome.done():
                outcome.set_exception(error)
                outcome.exception()  # the waiting task may have ended
        else:
            self._asleep = None
            if not outcome.done():
                outcome.set_result(result)
