"""Who may change what on a node: one agent, and one process at a time for each unit.

An agent's locks are on folders: the kubelet's device-plugins folder of one that offers devices, and that of its own
files. They are what two agents would fight over, and what both see whatever pods they run in. A lock file would not do:
a kubelet that starts deletes files, and a lock on a deleted file keeps nobody out.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpuvirt.errors import AlreadyRunningError, GpuvirtError
from gpuvirt.model.isolation import UnitId


@contextmanager
def only_agent(folder: Path) -> Iterator[None]:
    """Be the one agent that has a folder, or raise AlreadyRunningError; children don't inherit the lock."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AlreadyRunningError(
                f"{folder}: another gpuvirt agent serves this node;"
                " stop it first (two DaemonSets? `kubectl get pods -A --field-selector spec.nodeName=NODE`)"
            ) from error
        yield
    finally:
        os.close(fd)


STEP_BYTES = 4096


class UnitBusyError(GpuvirtError):
    """Another process is changing this unit now."""


class UnitBlockedError(UnitBusyError):
    """The kernel blocks a change of this unit whose process has ended; `step` is the step that it was at."""

    def __init__(self, message: str, step: str) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True, slots=True)
class UnitLock:
    """The lock on a unit."""

    fd: int
    """Whoever has this open holds the lock: the processes that make the writes of a change have it, too."""

    def note(self, step: str) -> None:
        """Write down which step is under way, for whoever finds the lock taken."""
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, step.encode(), 0)


@contextmanager
def unit_locked(folder: Path, unit: UnitId) -> Iterator[UnitLock]:
    """Be the only one on this host who changes a unit, or raise UnitBusyError; `folder` does not outlive a boot.

    Two locks tell a change under way from one that has lost its process. The first ends with the process. Children of
    the change inherit the second and hold it for as long as the kernel blocks them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _opened(folder / f"{unit}.owner") as owner, _opened(folder / f"{unit}.lock") as lock:
        if not _locked(owner):
            raise UnitBusyError(f"{unit}: another process is just changing these functions ({folder}/{unit}.owner)")
        if not _locked(lock):
            step = os.pread(lock, STEP_BYTES, 0).decode(errors="replace") or "an unknown step"
            said = f"{unit}: the kernel blocks a change whose process has ended ({folder}/{unit}.lock): {step}"
            raise UnitBlockedError(said, step)
        os.ftruncate(lock, 0)
        yield UnitLock(lock)


def _locked(fd: int) -> bool:
    """Return whether a lock was free, and is ours now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
