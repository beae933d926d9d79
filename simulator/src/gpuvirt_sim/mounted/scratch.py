"""The rest of a mounted host's `/`, beside the kernel's folders: a folder on disk, where an agent keeps its files."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

FIELDS = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")
TIMES = ("atime", "mtime", "ctime")


class Scratch:
    """Passes file system calls to a folder. Every call raises OSError as that folder's file system does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def local(self, path: str) -> Path:
        """Return the path on disk of a path in the mount."""
        return self._folder / path.lstrip("/")

    def getattr(self, path: str) -> dict[str, int]:
        """Return the `stat` of a path."""
        found = self.local(path).lstat()
        times = {f"st_{name}": getattr(found, f"st_{name}_ns") for name in TIMES}
        return {name: getattr(found, name) for name in FIELDS} | times

    def readdir(self, path: str) -> Sequence[str]:
        """Return the names in a folder."""
        return [entry.name for entry in self.local(path).iterdir()]

    def readlink(self, path: str) -> str:
        """Return where a link points."""
        return str(self.local(path).readlink())

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        """Open a file."""
        return os.open(self.local(path), flags | os.O_CLOEXEC, mode)

    def read(self, handle: int, size: int, offset: int) -> bytes:
        """Read from a file."""
        return os.pread(handle, size, offset)

    def write(self, handle: int, data: bytes, offset: int) -> int:
        """Write to a file."""
        return os.pwrite(handle, data, offset)

    def release(self, handle: int) -> int:
        """Close a file for the last time."""
        os.close(handle)
        return 0

    def fsync(self, handle: int) -> int:
        """Wait until a file is on disk."""
        os.fsync(handle)
        return 0

    def truncate(self, path: str, length: int) -> int:
        """Truncate a file, or extend it."""
        os.truncate(self.local(path), length)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        """Set the mode of a file."""
        self.local(path).chmod(mode)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None) -> int:
        """Set the times of a file."""
        now = time.time_ns()
        os.utime(self.local(path), ns=times or (now, now), follow_symlinks=False)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        """Create a folder."""
        self.local(path).mkdir(mode)
        return 0

    def rmdir(self, path: str) -> int:
        """Delete an empty folder."""
        self.local(path).rmdir()
        return 0

    def unlink(self, path: str) -> int:
        """Delete a file."""
        self.local(path).unlink()
        return 0

    def rename(self, old: str, new: str) -> int:
        """Move a file, in place of an existing one."""
        self.local(old).replace(self.local(new))
        return 0

    def symlink(self, path: str, target: str) -> int:
        """Create a symbolic link."""
        self.local(path).symlink_to(target)
        return 0
