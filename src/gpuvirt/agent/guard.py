"""Lets only one agent run on a node.

An agent locks folders: the folder of its own files and, if it offers devices, the kubelet's device-plugins folder. Two
agents would conflict in these folders, and both can see them from their pods. A lock file would not work: the kubelet
deletes files in its folder when it starts, and a lock on a deleted file excludes no process. Commands that change
devices while no agent runs share the lock on the agent's own folder, and so keep agents from starting.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuvirt.errors import AlreadyRunningError


@contextmanager
def only_agent(folder: Path) -> Iterator[None]:
    """Lock a folder for this agent; raise AlreadyRunningError. Child processes don't inherit the lock."""
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
