"""One agent on a node.

An agent's locks are on folders: the kubelet's device-plugins folder of one that offers devices, and that of its own
files. They are what two agents would fight over, and what both see whatever pods they run in. A lock file would not do:
a kubelet that starts deletes files, and a lock on a deleted file keeps nobody out. A command that changes devices
while no agent runs shares the lock on the agent's own folder with other commands, and keeps agents from starting.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuvirt.errors import AlreadyRunningError


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
                " stop it first (two DaemonSets? `kubectl get pods -A --field-selector spec.nodeName=NODE`);"
                " or a gpuvirt command is changing devices: the agent starts when that has ended"
            ) from error
        yield
    finally:
        os.close(fd)
