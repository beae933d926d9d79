"""Calls that libvirt answers only when they are done: each has a thread and a connection until then."""

import threading
from collections.abc import Callable

import libvirt

from gpuvirt.model.workers.hypervisor import Call, VmKey
from gpuvirt_schedules.hypervisors.libvirt.session import is_open, problem_of
from gpuvirt_schedules.hypervisors.messages import BackEndError, Problem


class RunningCall:
    """One call that is under way. Its thread dies with the child: libvirt continues the call that it has received."""

    def __init__(self, call: Call, connection: libvirt.virConnect, make: Callable[[], object]) -> None:
        """Begin it."""
        self.call = call
        self.unreported: BackEndError | None = None
        """The error of a call that has failed after it was accepted."""
        self._connection, self._make = connection, make
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether libvirt has answered."""
        return self._ended.is_set()

    def ends_within(self, seconds: float) -> bool:
        """Wait for the answer, and return whether it has come; raises the BackEndError with which the call failed."""
        if not self._ended.wait(seconds):
            return False
        error, self.unreported = self.unreported, None
        if error is not None:
            raise error
        return True

    def _run(self) -> None:
        try:
            self._make()
        except Exception as error:  # noqa: BLE001  raised by the thread that waits
            self.unreported = problem_of(error, is_certain=False, is_alive=is_open(self._connection))
        finally:
            self._ended.set()


class Running:
    """The calls of one client that are under way; several threads use it at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[RunningCall] = []

    def begin(self, call: Call, connection: libvirt.virConnect, make: Callable[[], object]) -> RunningCall:
        """Begin a call on a connection of its own."""
        begun = RunningCall(call, connection, make)
        with self._lock:
            self._calls = [*(other for other in self._calls if not other.has_ended or other.unreported), begun]
        return begun

    def failure(self, call: Call) -> BackEndError | None:
        """Return once why the same call failed after it was accepted; None if it did not, or its connection broke."""
        with self._lock:
            for earlier in self._calls:
                error = earlier.unreported
                if earlier.call == call and earlier.has_ended and error is not None:
                    earlier.unreported = None
                    return error if error.problem is not Problem.UNREACHABLE else None
        return None

    def has(self, vm: VmKey) -> bool:
        """Return whether a call for this VM is under way."""
        with self._lock:
            return any(other.call.vm == vm and not other.has_ended for other in self._calls)
