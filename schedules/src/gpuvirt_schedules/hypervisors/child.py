"""The child of a connection: it has the credentials, the hypervisor's library and the connections to the hypervisor.

`connection` starts `python -m gpuvirt_schedules.hypervisors.child PARENT`. Orders come on standard input, answers go to
standard output, in any order. The connection says how many requests are under way at once.

The child ends with the process that started it, and with the lease of that process. The kernel does both, so that
nothing in either process has to run for it: neither Python while a library holds its lock, nor a parent that is
stopped. The death closes the child's connections, which `resets` makes a reset.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic  # noqa: TID251  the kernel's clock, by which the parent names the end of the lease

from gpuvirt_schedules.hypervisors.messages import (
    MOST_CALLS,
    MOST_CHECKS,
    ORDERS,
    Answer,
    BackEnd,
    BackEndError,
    Checked,
    CheckVms,
    Failed,
    Made,
    Make,
    Problem,
    Read,
    Renew,
    Request,
    Start,
    Vms,
    line,
)

THREADS = MOST_CALLS + MOST_CHECKS + 1
"""One more for a reading. A thread is only begun for a request that finds none at rest."""
STOPPED_S = 0.5
"""So long between two lines shows that this process was stopped."""
TEXT_CHARACTERS = 400
"""A hypervisor's words go into conditions and events, which have room for some hundred characters."""

PR_SET_PDEATHSIG = 1
"""include/uapi/linux/prctl.h. The signal is sent when the thread that started the child ends: the parent's main one."""


def tie_to(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; end it now if that has happened already."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        end()


def live_until(until_s: float | None) -> None:
    """Let the kernel end this process at a monotonic second; None: no end. A later call replaces the time."""
    if until_s is None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        return
    while True:
        left_s = until_s - monotonic()
        if left_s <= 0:
            end()
        signal.setitimer(signal.ITIMER_REAL, left_s)
        if until_s - monotonic() > left_s - STOPPED_S:
            return  # otherwise this process was stopped before the timer ran, which would end too late


def end() -> None:
    """End this process at once, without cleaning up: its connections are reset."""
    os.kill(os.getpid(), signal.SIGKILL)


class Child:
    """Answers the requests of one connection."""

    def __init__(self, output: int) -> None:
        """`output` is the file descriptor for answers."""
        self._output = output
        self._writing = threading.Lock()
        self._opening = threading.Lock()
        self._workers = ThreadPoolExecutor(THREADS)
        self._start: Start | None = None
        self._back_end: BackEnd | None = None

    def serve(self, lines: Iterable[bytes]) -> None:
        """Take orders until they end."""
        for text in lines:
            match ORDERS.decode(text):
                case Start() as start:
                    self._start = start
                case Renew(until_s):
                    live_until(until_s)
                case Read() | Make() | CheckVms() as request:
                    self._workers.submit(self._answer, request)

    def _answer(self, request: Request) -> None:
        try:
            answer = self._answered(request)
        except BackEndError as error:
            answer = Failed(request.id, error.problem, self._shown(error.text), error.is_certain)
        except Exception as error:  # noqa: BLE001  a defect: the call may have been sent
            answer = Failed(request.id, Problem.FAILED, self._shown(f"{type(error).__name__}: {error}"), False)
        data = line(answer)
        with self._writing:
            while data:
                data = data[os.write(self._output, data) :]

    def _answered(self, request: Request) -> Answer:
        back_end = self._opened()
        match request:
            case Read(number):
                return Vms(number, tuple(back_end.read()))
            case Make(number, call):
                back_end.make(call)
                return Made(number)
            case CheckVms(number, vms):
                return Checked(number, tuple(back_end.check(vms)))

    def _opened(self) -> BackEnd:
        with self._opening:
            if self._back_end is None:
                if self._start is None:
                    raise BackEndError(Problem.FAILED, "the first order was no start", is_certain=True)
                self._back_end = opened(self._start)
            return self._back_end

    def _shown(self, text: str) -> str:
        """Return a text without the password, should a library or the hypervisor repeat it."""
        password = self._start.password if self._start is not None else ""
        return (text.replace(password, "***") if password else text)[:TEXT_CHARACTERS]


def opened(start: Start) -> BackEnd:
    """Load the library of a hypervisor, and return its client; raises BackEndError where it is not installed."""
    try:
        if start.kind == "libvirt":
            from gpuvirt_schedules.hypervisors.libvirt.backend import Libvirt  # noqa: PLC0415  this process alone loads it

            return Libvirt(start.server, start.ca, start.certificate, start.key)
        from gpuvirt_schedules.hypervisors.vsphere.backend import VSphere  # noqa: PLC0415  this process alone loads it
    except ImportError as error:
        raise BackEndError(Problem.NOT_INSTALLED, f"{error}: {start.kind}", is_certain=True) from error
    return VSphere(start.server, start.ca, start.user, start.password)


if __name__ == "__main__":
    tie_to(int(sys.argv[1]))
    Child(sys.stdout.fileno()).serve(sys.stdin.buffer)
    end()
