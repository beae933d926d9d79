"""The locks of gates: flock on files, with a short wait, and bytes of `/dev/null`; and the errors of gates."""

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep  # noqa: TID251  short waits for the locks of other processes

import msgspec
from typing_extensions import override

from gpuvirt.errors import GpuvirtError
from gpuvirt.model.inventory.isolation import Slots
from gpuvirt.model.reasons import Reason, refusals

FLOCK = "hhqqi4x"
"""struct flock of 64-bit Linux: type, whence, start, length, pid."""


class Anchor(msgspec.Struct, frozen=True):
    """The host's `/dev/null`, a byte of which for each slot is a lock that no deletion of the gates' files can end.

    A gate's files can be deleted while a change has locked them. The change finds that before its next step, but
    another one could lock new files meanwhile. All processes that change GPUs see the host's `/dev`, in which
    `/dev/null` is one file for all of them, and stays. A lock writes nothing. It belongs to the open file, which a
    change's children inherit.
    """

    path: Path

    def lock(self, stack: ExitStack, unit: str, slots: Slots) -> int:
        """Lock the bytes of slots until the end of a stack; return the descriptor. Raises UnitBusyError."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise GateFailedError(self.path, error) from error
        stack.callback(os.close, fd)
        for slot in slots:
            try:
                # F_SETLK would end with any other descriptor of the file that this process closes.
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, _byte_of(slot), 1, 0))
            except OSError as error:
                if error.errno not in {errno.EAGAIN, errno.EACCES}:
                    raise GateFailedError(self.path, error) from error
                raise UnitBusyError(
                    f"{unit}: another process is changing the functions of {slot}, and its gate's files were deleted"
                ) from error
        return fd


def _byte_of(slot: str) -> int:
    """Return the byte of a slot (`0000:65:00`): its PCI domain, bus and device as one number."""
    domain, bus, device = (int(part, 16) for part in slot.split(":"))
    return domain << 16 | bus << 8 | device


class UnitBusyError(GpuvirtError):
    """Another process is changing this unit."""


class UnitBlockedError(UnitBusyError):
    """The kernel blocks a change of this unit whose process has ended; `step` is the blocked step."""

    def __init__(self, message: str, step: str) -> None:
        super().__init__(message)
        self.step = step


class UnitAllocatingError(UnitBusyError):
    """A device of this unit is being allocated now: allocations share the lock of its slot, and no change has it."""

    def __init__(self, unit: str, path: str | Path) -> None:
        """`path` is the file of the lock."""
        self.path = str(path)
        super().__init__(f"{unit}: a device of its PCI slot is being allocated now ({self.path}); try again")


class UnitUnsettledError(UnitBusyError):
    """A device of this unit was allocated a moment ago, or may have been."""

    def __init__(self, message: str, *, again_soon: bool = False) -> None:
        """`again_soon`: one more reading of the kubelet's accounts may settle it."""
        super().__init__(message)
        self.again_soon = again_soon


class GateFailedError(UnitBusyError):
    """A gate's file can't be opened, locked, read or written, so that nothing passes the gate.

    The error may be that of this process alone (EMFILE, EACCES): other processes may pass the gate meanwhile.
    """

    def __init__(self, path: str | Path, error: OSError) -> None:
        number = error.errno or 0
        self.path = str(path)
        self.problem = f"{errno.errorcode.get(number, 'an unknown error')} ({os.strerror(number)})"
        super().__init__(f"{self.path}: {self.problem}")


def why_not_passed(subject: str, error: UnitBusyError) -> Reason:
    """Return why an allocation or a change of `subject` did not pass a gate."""
    match error:
        case UnitBlockedError():
            return refusals.blocked(subject, error.step)
        case UnitAllocatingError():
            return refusals.changing(subject, f"{error.path}: shared by an allocation", is_allocated=True)
        case UnitUnsettledError():
            return refusals.unsettled(subject, str(error))
        case GateFailedError():
            return refusals.gate_failed(subject, error.path, error.problem)
        case _:
            return refusals.changing(subject, str(error))


def try_lock(fd: int, kind: int, patience_s: float = 0.0) -> bool:
    """Return whether the lock was taken in time; raise GateFailedError if the kernel refuses for another reason."""
    if patience_s == 0.0:  # Allocate: a third of the time of the other
        return _takes(fd, kind)
    return any(_takes(fd, kind) for _ in tries(patience_s, 0.002))


def _takes(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # unknown: nothing, another process has the lock
    except OSError as error:
        raise GateFailedError(os.readlink(f"/proc/self/fd/{fd}"), error) from error  # noqa: PTH115  a descriptor's
    return True


def tries(patience_s: float, pause_s: float) -> Iterator[None]:
    """Yield at once, and after each pause until the time is up.

    The last try follows the deadline: the process may be stopped between a try and the next reading of the clock.
    """
    deadline_s = monotonic() + patience_s
    while True:
        is_last = monotonic() >= deadline_s
        yield
        if is_last:
            return
        sleep(pause_s)


def open_file(path: str | Path) -> int:
    """Open the file of a lock, and create its folder if necessary; raise GateFailedError.

    Child processes don't inherit the descriptor.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    try:
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            return os.open(path, flags, 0o600)  # unknown: nothing, the file is created
    except OSError as error:
        raise GateFailedError(path, error) from error


def is_current(fd: int, path: str | Path) -> bool:
    """Return whether a path still has the file that is open: a lock on a deleted file excludes no process."""
    try:
        here = os.stat(path)  # noqa: PTH116  a tenth of the time of Path.stat
    except FileNotFoundError:
        return False  # unknown: nothing, the file was deleted
    except OSError as error:
        raise GateFailedError(path, error) from error
    return os.path.samestat(here, os.fstat(fd))


MOST_OPENS = 8
"""How often a file may be deleted while it is being locked."""


def take(path: str | Path, lock: Callable[[int], None]) -> int:
    """Return the descriptor of a file that `lock` has locked; raise GateFailedError, or what `lock` raises.

    Another process may delete the file between open and lock. Such a lock excludes no process, so that the present file
    is opened and locked instead.
    """
    for _ in range(MOST_OPENS):
        fd = open_file(path)
        try:
            lock(fd)
            if is_current(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise deleted(path)


def deleted(path: str | Path) -> GateFailedError:
    """Return the error for a file that was deleted although it is locked."""
    return GateFailedError(path, OSError(errno.ESTALE, os.strerror(errno.ESTALE)))


class Locks(AbstractContextManager[None]):
    """The open files of several locks, which are closed at the end of the context."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: list[int] = []

    def take(self, path: str, lock: Callable[[int], None]) -> None:
        """Open and lock one more file; raise GateFailedError, or what `lock` raises."""
        self._open.append(take(path, lock))

    def close(self) -> None:
        """Close all files, which releases their locks."""
        while self._open:
            os.close(self._open.pop())

    @override
    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def opened(path: str | Path) -> Iterator[int]:
    """Keep the file of a lock open while the context lasts; closing it releases the lock."""
    fd = open_file(path)
    try:
        yield fd
    finally:
        os.close(fd)
