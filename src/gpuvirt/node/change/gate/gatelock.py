"""The locks of gates: flock on files, with a short wait."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep  # noqa: TID251  short waits for the locks of other processes


def try_lock(fd: int, kind: int, patience_s: float = 0.0, is_ours: Callable[[], bool] = lambda: False) -> bool:
    """Return whether the lock was taken in time, or this process has it by another descriptor (`is_ours`)."""
    deadline_s = monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if is_ours():
                return True
            if monotonic() >= deadline_s:
                return False
            sleep(0.002)
        else:
            return True


def tries(patience_s: float, pause_s: float) -> Iterator[None]:
    """Yield at once, and after each pause until the time is up."""
    deadline_s = monotonic() + patience_s
    yield
    while monotonic() < deadline_s:
        sleep(pause_s)
        yield


def open_file(path: Path) -> int:
    """Open the file of a lock, and create its folder if necessary. Child processes don't inherit the descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.open(path, flags, 0o600)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Keep the file of a lock open while the context lasts; closing it releases the lock."""
    fd = open_file(path)
    try:
        yield fd
    finally:
        os.close(fd)
