"""One agent a node: a lock on the kubelet's device-plugins folder itself.

The folder is what two agents would fight over, and it is the one thing that both see whatever pods they run in. A lock
file in it would not do: a kubelet that starts deletes files there, and a lock on a deleted file keeps nobody out.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuvirt.errors import AlreadyRunningError


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
