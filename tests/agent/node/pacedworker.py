"""A serial worker that yields to the event loop at each kernel operation of its jobs, always in the same order.

A job runs in a thread that takes turns with the event loop, so that a label, an Allocate or a process can come between
any two operations of a change. When the worker is cancelled, its job ends at the current operation, as in an agent that
is killed.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TypeVar

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.hardware.access.kernel import ATTRIBUTE_BYTES, Kernel
from gpuvirt.hardware.access.openfiles import OpenFile
from gpuvirt.hardware.access.tools import Program, Tools
from gpuvirt.paths import HostPath

T = TypeVar("T")

OPERATION_S = 0.01
"""How long each operation of a job takes, in simulated time."""


class KilledError(BaseException):
    """The agent of the job was killed."""


class PacedWorker:
    """The worker of one isolation unit."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._idle = asyncio.Lock()
        self._to_loop = threading.Semaphore(0)
        self._to_job = threading.Semaphore(0)
        self._killed = False

    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        """Return the result of `job`; there is no timeout."""
        del timeout_s
        async with self._idle:
            outcome: Future[T] = Future()
            self._killed = False
            thread = threading.Thread(target=self._work, args=(job, outcome), name=name, daemon=True)
            thread.start()
            try:
                while True:
                    self._to_loop.acquire()
                    if outcome.done():
                        return outcome.result()
                    await self._clock.sleep(OPERATION_S)
                    self._to_job.release()
            except asyncio.CancelledError:
                self._killed = True
                self._to_job.release()
                thread.join()
                raise

    def yield_to_loop(self) -> None:
        """Pause the job's thread, and let the event loop continue until it resumes the job."""
        if not self._killed:
            self._to_loop.release()
            self._to_job.acquire()
            if self._killed:
                raise KilledError

    def _work(self, job: Callable[[], T], outcome: "Future[T]") -> None:
        _HERE.worker = self
        try:
            outcome.set_result(job())
        except BaseException as error:  # noqa: BLE001  raised again where the job is awaited
            outcome.set_exception(error)
        self._to_loop.release()


class _Here(threading.local):
    worker: PacedWorker | None = None


_HERE = _Here()


def _yield_to_loop() -> None:
    if _HERE.worker is not None:
        _HERE.worker.yield_to_loop()


class PacedKernel:
    """A kernel whose writes and leases take time in the job of a paced worker."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    @property
    def pids(self) -> frozenset[int]:
        return self._kernel.pids

    def read(self, path: HostPath, /, *, limit: int = ATTRIBUTE_BYTES) -> bytes:
        return self._kernel.read(path, limit=limit)

    def write(self, path: HostPath, data: bytes, /) -> None:
        _yield_to_loop()
        self._kernel.write(path, data)
        _yield_to_loop()

    def listdir(self, path: HostPath, /) -> Sequence[str]:
        return self._kernel.listdir(path)

    def readlink(self, path: HostPath, /) -> str:
        return self._kernel.readlink(path)

    def device_number(self, path: HostPath, /) -> int:
        return self._kernel.device_number(path)

    def lease(self, group: IommuGroup, /) -> AbstractContextManager[None]:
        _yield_to_loop()
        return self._kernel.lease(group)

    def lease_devices(self, names: Sequence[str], /) -> AbstractContextManager[None]:
        _yield_to_loop()
        return self._kernel.lease_devices(names)

    def open_files(self, *, mapped: bool = False) -> Iterator[OpenFile]:
        _yield_to_loop()
        return self._kernel.open_files(mapped=mapped)

    def on_uevent(self, wake: Callable[[], None], /) -> Callable[[], None]:
        return self._kernel.on_uevent(wake)


class PacedTools:
    """Programs that take time in the job of a paced worker."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def modprobe(self, module: str) -> None:
        _yield_to_loop()
        self._tools.modprobe(module)
        _yield_to_loop()

    def sriov_manage(self, address: PciAddress, enable: bool) -> None:
        _yield_to_loop()
        self._tools.sriov_manage(address, enable)
        _yield_to_loop()

    def nvidia_smi(self, *arguments: str) -> str:
        _yield_to_loop()
        output = self._tools.nvidia_smi(*arguments)
        _yield_to_loop()
        return output

    def demand(self, program: Program) -> None:
        self._tools.demand(program)

    def demand_module(self, module: str) -> None:
        self._tools.demand_module(module)
