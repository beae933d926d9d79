"""Who may change what on a node: one agent, and one process at a time for each unit.

An agent's locks are on folders: the kubelet's device-plugins folder of one that offers devices, and that of its own
files. They are what two agents would fight over, and what both see whatever pods they run in. A lock file would not do:
a kubelet that starts deletes files, and a lock on a deleted file keeps nobody out.
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
