"""The lock that an agent has on its folders, which a command shares to keep agents from starting.

It imports little: a guest with bare Python makes changes under it in the tests.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuvirt.agent.change.gate.gatelock import GateFailedError, try_lock
from gpuvirt.errors import AlreadyRunningError


@contextmanager
def only_agent(folder: Path) -> Iterator[None]:
    """Lock a folder for this agent; raise AlreadyRunningError. Child processes don't inherit the lock.

    An agent locks the folder of its own files and, if it offers devices, the kubelet's device-plugins folder. Two
    agents would conflict in these folders, and both can see them from their pods. A lock file would not work: the
    kubelet deletes files in its folder when it starts, and a lock on a deleted file excludes no process. Commands that
    change devices while no agent runs share the lock on the agent's own folder, and so keep agents from starting.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AlreadyRunningError(
                f"{folder}: another gpuvirt agent serves this node;"
                " stop it first (two DaemonSets? `kubectl get pods -A --field-selector spec.nodeName=NODE`);"
                " or a gpuvirt command is changing devices: the agent can start when that command has ended"
            ) from error
        yield
    finally:
        os.close(fd)


@contextmanager
def no_agent(folder: Path) -> Iterator[bool]:
    """Return whether no agent runs. If so, no agent can start while the context lasts; other commands can."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _shared(folder) as is_free:
        yield is_free


@contextmanager
def no_plugin(device_plugins: Path) -> Iterator[bool]:
    """Return whether no agent offers devices. If so, none can begin to while the context lasts.

    Every agent that offers devices has the lock on the kubelet's folder, whatever its version.
    """
    with _shared(device_plugins) as is_free:
        yield is_free


@contextmanager
def _shared(folder: Path) -> Iterator[bool]:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise GateFailedError(folder, error) from error
    try:
        yield try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)
