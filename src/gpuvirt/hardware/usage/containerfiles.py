"""Reads a file of a container's own file systems through a process of it, without following where the container leads.

A container may replace each folder on the way by a link, which would be followed on the host, and the file by a pipe or
a device. So each part of the path is opened by itself, without links, and what is opened has to be a file.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


@contextmanager
def opened(proc: Path, pid: int, path: Sequence[str]) -> Iterator[int]:
    """Open the file with these parts of its path below the root folder of a process; raise OSError.

    ELOOP or ENOTDIR: a part is a link; EINVAL: it is no file.
    """
    folder = os.open(proc / str(pid) / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in path[:-1]:
            inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        # A look before the file is opened: opening a device may have an effect.
        if not stat.S_ISREG(os.stat(path[-1], dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path[-1])
        file = os.open(path[-1], _FILE, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path[-1])
        yield file
    finally:
        os.close(file)
