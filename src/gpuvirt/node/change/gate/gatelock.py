"""The locks of gates: flock on files, with a short wait."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from time import monotonic, sleep  # noqa: TID251  short waits for the locks of other processes

from typing_extensions import override

from gpuvirt.node.change.gate.gateerrors import GateFailedError


def try_lock(fd: int, kind: int, patience_s: float = 0.0) -> bool:
    """Return whether the lock was taken in time; raise GateFailedError if the kernel refuses for another reason."""
    if _takes(fd, kind):
        return True
    deadline_s = monotonic() + patience_s
    while monotonic() < deadline_s:
        sleep(0.002)
        if _takes(fd, kind):
            return True
    return False


def _takes(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise GateFailedError(os.readlink(f"/proc/self/fd/{fd}"), error) from error  # noqa: PTH115  a descriptor's
    return True


def tries(patience_s: float, pause_s: float) -> Iterator[None]:
    """Yield at once, and after each pause until the time is up."""
    deadline_s = monotonic() + patience_s
    yield
    while monotonic() < deadline_s:
        sleep(pause_s)
        yield


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
            return os.open(path, flags, 0o600)
    except OSError as error:
        raise GateFailedError(path, error) from error


def is_current(fd: int, path: str | Path) -> bool:
    """Return whether a path still has the file that is open: a lock on a deleted file excludes no process."""
    try:
        here = os.stat(path)  # noqa: PTH116  a tenth of the time of Path.stat
    except FileNotFoundError:
        return False
    except OSError as error:
        raise GateFailedError(path, error) from error
    return os.path.samestat(here, os.fstat(fd))


class Locks(AbstractContextManager[None]):
    """The open files of several locks, which are closed at the end of the context."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: list[int] = []

    def open(self, path: str) -> int:
        """Open one more file; return its descriptor."""
        fd = open_file(path)
        self._open.append(fd)
        return fd

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
