"""Who may change what on a node: one agent, and one process at a time for each unit.

The agent's lock is on the kubelet's device-plugins folder: the folder is what two agents would fight over, and the one
thing that both see whatever pods they run in. A lock file in it would not do: a kubelet that starts deletes files
there, and a lock on a deleted file keeps nobody out.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuvirt.errors import AlreadyRunningError, GpuvirtError
from gpuvirt.model.isolation import UnitId


@contextmanager
def only_agent(folder: Path) -> Iterator[None]:
    """Be this node's agent, or raise AlreadyRunningError when another is; children don't inherit the lock."""
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


class UnitBusyError(GpuvirtError):
    """Somebody else is changing this unit now."""


@contextmanager
def unit_locked(folder: Path, unit: UnitId) -> Iterator[None]:
    """Be the only one on this host who changes a unit, or raise UnitBusyError; `folder` does not outlive a boot."""
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / f"{unit}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UnitBusyError(
                f"{unit}: another process is just changing these functions ({folder}/{unit}.lock)"
            ) from error
        yield
    finally:
        os.close(fd)
