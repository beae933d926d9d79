"""Serial workers run the jobs that access the host, one after another, in a thread that can be abandoned.

The kernel can block a read or write of a device for as long as a process uses the device, and no signal ends that. The
thread of a worker is a daemon: while the kernel blocks it, the worker accepts no other job and raises an error, and the
rest of the process goes on and can end.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import Protocol, TypeVar

from gpuvirt.clock import Deadline, RealClock
from gpuvirt.errors import GpuvirtError

T = TypeVar("T")


class WorkerBlockedError(GpuvirtError):
    """The kernel blocks a job; the worker accepts no other job until it returns."""


class WorkerBusyError(WorkerBlockedError):
    """The kernel still blocks an earlier job, so that this one was not begun."""


class SerialWorker(Protocol):
    """Runs jobs one after another."""

    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        """Return what `job` returns; raise WorkerBlockedError after `timeout_s`, WorkerBusyError at once."""
        ...


async def _wait(job: asyncio.Future[T], timeout_s: float) -> None:
    """Wait for a job until its time is over; the time in which this process was stopped does not count.

    A stopped process stops the job as well. When both go on, the time is over at once, and the job needs a moment.
    """
    job.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody waits for a late one
    with closing(Deadline(RealClock(), timeout_s)) as deadline:
        while not job.done() and (left_s := deadline.left_s) > 0:
            await asyncio.wait({job}, timeout=left_s)


class ThreadWorker:
    """A serial worker with its own thread, which is started at the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: str | None = None
        self._has_ended: Callable[[], bool] = lambda: True
        """Returns whether the last job that has exceeded its time has ended; the worker is blocked until then."""
        self._started = False

    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        """Return what `job` returns, or raise what it raises; raise WorkerBlockedError."""
        if not self._has_ended():
            raise WorkerBusyError(f"{self._name}: the kernel still blocks an earlier job: {self._running}")
        if not self._started:
            self._started = True
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        outcome: Future[T] = Future()
        self._jobs.put(lambda: self._do(job, name, outcome))
        await _wait(asyncio.wrap_future(outcome), timeout_s)
        if not outcome.done() and not outcome.cancel():  # a job that still waits behind another one is cancelled
            self._has_ended = outcome.done
        if outcome.done() and not outcome.cancelled():
            return outcome.result()
        raise WorkerBlockedError(f"{self._name}: the kernel has blocked this job for {timeout_s:g} s: {self._running}")

    def _work(self) -> None:
        while True:
            self._jobs.get()()

    def _do(self, job: Callable[[], T], name: str, outcome: "Future[T]") -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        self._running = name
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001  the caller of `run` gets it
            outcome.set_exception(error)
        else:
            outcome.set_result(result)
