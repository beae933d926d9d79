"""The locks of gates: flock on files, with a short wait."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from time import monotonic, sleep  # noqa: TID251  short waits for the locks of other processes

from typing_extensions import override

from gpuvirt.agent.change.gate.gateerrors import GateFailedError


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
