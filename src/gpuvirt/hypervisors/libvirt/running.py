"""Calls that libvirt answers only when they are done: each has a thread and a connection until then."""

import threading
from collections.abc import Callable

import libvirt

from gpuvirt.hypervisors.backend import BackEndError
from gpuvirt.hypervisors.libvirt.faults import problem_of
from gpuvirt.model.schedules.hypervisor import VmKey


class RunningCall:
    """One call that is under way. Its thread dies with the child: libvirt goes on with what it has received."""

    def __init__(self, vm: VmKey, connection: libvirt.virConnect, call: Callable[[], object]) -> None:
        """Begin it."""
        self.vm = vm
        self._connection, self._call = connection, call
        self._ended = threading.Event()
        self._error: BackEndError | None = None
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether libvirt has answered."""
        return self._ended.is_set()

    def ends_within(self, seconds: float) -> bool:
        """Wait for the answer, and return whether it has come; raises the BackEndError with which the call failed."""
        if not self._ended.wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:  # noqa: BLE001  raised by the thread that waits
            is_alive = is_open(self._connection)
            self._error = problem_of(error, is_certain=False, is_alive=is_alive)
        finally:
            self._ended.set()


class Running:
    """The calls of one client that are under way; several threads use it at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[RunningCall] = []

    def begin(self, vm: VmKey, connection: libvirt.virConnect, call: Callable[[], object]) -> RunningCall:
        """Begin a call on a connection of its own."""
        begun = RunningCall(vm, connection, call)
        with self._lock:
            self._calls = [*(other for other in self._calls if not other.has_ended), begun]
        return begun

    def has(self, vm: VmKey) -> bool:
        """Return whether a call for this VM is under way."""
        with self._lock:
            return any(call.vm == vm and not call.has_ended for call in self._calls)


def is_open(connection: libvirt.virConnect) -> bool:
    """Return whether a connection has not ended yet."""
    try:
        return connection.isAlive() == 1
    except libvirt.libvirtError:
        return False
