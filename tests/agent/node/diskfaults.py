"""Faults of the files in one folder: the system calls fail as they do on a full or read-only disk."""

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

OF_A_PROCESS = (errno.EMFILE, errno.EACCES)
"""Other processes can open the same files."""
OF_A_DISK = (errno.EROFS, errno.ENOSPC)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

_open, _write, _flock = os.open, os.write, fcntl.flock


class Faults:
    """The faults of a folder; the files that fail may be narrowed down while they last."""

    def __init__(self, folders: Sequence[Path], number: int) -> None:
        self._folders = tuple(map(str, folders))
        self.number = number
        self.only = ""
        """The end of the names of the files that fail; empty for all."""

    def fails(self, path: str) -> bool:
        return path.startswith(self._folders) and path.removesuffix(".new").endswith(self.only)

    def open(self, path: "str | os.PathLike[str]", flags: int, mode: int = 0o777, **more: int) -> int:
        """Fail as the kernel does: a full disk still opens files that exist, a read-only one still reads.

        A file system without locks opens all files.
        """
        name = os.fspath(path)
        if self.fails(name) and self._refuses(name, flags):
            raise OSError(self.number, os.strerror(self.number), name)
        return _open(path, flags, mode, **more)

    def _refuses(self, name: str, flags: int) -> bool:
        match self.number:
            case errno.ENOSPC:
                return bool(flags & os.O_CREAT) and not os.path.exists(name)  # noqa: PTH110
            case errno.EROFS:
                return bool(flags & WRITES)
            case errno.ENOLCK:
                return False
            case _:
                return True

    def write(self, fd: int, data: bytes) -> int:
        if self.number == errno.ENOSPC and self.fails(_name_of(fd)):
            raise OSError(self.number, os.strerror(self.number))
        return _write(fd, data)

    def flock(self, fd: int, operation: int) -> None:
        if self.number == errno.ENOLCK and self.fails(_name_of(fd)):
            raise OSError(self.number, os.strerror(self.number))
        _flock(fd, operation)


@contextmanager
def failing(folder: Path, number: int, *more: Path) -> Iterator[Faults]:
    """Let the files of folders fail with an errno for as long as the context lasts."""
    faults = Faults((folder, *more), number)
    before = os.open, os.write, fcntl.flock
    setattr(os, "open", faults.open)  # noqa: B010
    setattr(os, "write", faults.write)  # noqa: B010
    if number == errno.ENOLCK:
        setattr(fcntl, "flock", faults.flock)  # noqa: B010
    try:
        yield faults
    finally:
        os.open, os.write, fcntl.flock = before


def _name_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115  a descriptor's
