"""Where work that touches the host runs: one job after another, in a thread that can be left behind.

A read or write of a device can sleep in the kernel for as long as somebody uses the device, and no signal ends it. The
thread of a lane is a daemon: while it sleeps, the lane is blocked and says so, and everything else goes on, the end of
the process included.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from gpuvirt.errors import GpuvirtError

T = TypeVar("T")


class WorkerBlockedError(GpuvirtError):
    """A job sleeps in the kernel; the lane takes no other until it returns."""


class SerialWorker(Protocol):
    """Runs jobs in turn."""

    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        """Return what `job` returns; raise LaneBlockedError after `timeout_s`, and at once while it still sleeps."""
        ...


class InlineWorker:
    """A lane that runs jobs where it stands, for simulated hosts, which never sleep."""

    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:  # noqa: ARG002
        """Return what `job` returns."""
        return job()


class ThreadWorker:
    """A lane with a thread of its own, started at the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: str | None = None
        self._asleep = False
        """The running job has had its time."""
        self._started = False

    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        """Return what `job` returns, raise what it raises."""
        if self._asleep:
            raise WorkerBlockedError(f"{self._name}: {self._running} has not come back from the kernel yet")
        if not self._started:
            self._started = True
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        outcome: Future[T] = Future()
        self._jobs.put(lambda: self._do(job, name, outcome))
        waiting = asyncio.wrap_future(outcome)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(waiting)
        except TimeoutError as error:
            if waiting.done():  # the job's own
                raise
            self._asleep = True
            outcome.cancel()  # has an effect when it waits behind another that sleeps
            waiting.add_done_callback(lambda late: late.cancelled() or late.exception())
            raise WorkerBlockedError(
                f"{self._name}: {self._running} sleeps in the kernel since {timeout_s:g} s"
            ) from error

    def _work(self) -> None:
        while True:
            self._jobs.get()()

    def _do(self, job: Callable[[], T], name: str, outcome: "Future[T]") -> None:
        if not outcome.set_running_or_notify_cancel():
            self._asleep = False  # it had its time before its turn came, and nothing sleeps
            return
        self._running = name
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001  it belongs to whoever waits for the job
            self._asleep = False
            outcome.set_exception(error)
        else:
            self._asleep = False
            outcome.set_result(result)
