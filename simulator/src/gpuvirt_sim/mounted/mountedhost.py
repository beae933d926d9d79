"""A simulated host as one file system: the simulated kernel's files, the calls of programs, and a folder on disk."""

import errno
import itertools
import os
from collections.abc import Callable, Iterator

import mfusepy
from typing_extensions import override

from gpuvirt_sim.files.tree import fails
from gpuvirt_sim.mounted.calls import Calls
from gpuvirt_sim.mounted.files import KernelFiles
from gpuvirt_sim.mounted.scratch import Scratch

KERNELS = ("sys", "dev", "proc")
"""The top-level folders that the simulated kernel serves."""


class MountedHost(mfusepy.Operations):
    """Answers file system calls."""

    use_ns = True

    def __init__(self, files: KernelFiles, calls: Calls, scratch: Scratch, ready: Callable[[], None]) -> None:
        """`ready` is called once file system calls no longer fail: they are answered, or wait for their answer."""
        self._files = files
        self._calls = calls
        self._scratch = scratch
        self._ready = ready

    @override
    def init(self, path: str) -> None:
        self._ready()

    @override
    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        if path in self._calls:
            return self._calls.getattr()
        return self._files.getattr(path) if _is_kernels(path) else self._scratch.getattr(path)

    @override
    def readdir(self, path: str, fh: int) -> Iterator[str]:
        names = self._files.readdir(path) if _is_kernels(path) else self._scratch.readdir(path)
        return itertools.chain((".", ".."), KERNELS if path == "/" else (), names)

    @override
    def readlink(self, path: str) -> str:
        return self._files.readlink(path) if _is_kernels(path) else self._scratch.readlink(path)

    @override
    def open(self, path: str, flags: int) -> int:
        if path in self._calls:
            return self._calls.open()
        if not _is_kernels(path):
            return self._scratch.open(path, flags)
        return self._files.open(path, flags, mfusepy.fuse_get_context()[2])

    @override
    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        if path in self._calls:
            return self._calls.read(fh, size, mfusepy.fuse_get_context()[2])
        return self._files.read(path, size, offset, fh) if _is_kernels(path) else self._scratch.read(fh, size, offset)

    @override
    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        if path in self._calls:
            return self._calls.write(fh, data)
        if not _is_kernels(path):
            return self._scratch.write(fh, data, offset)
        return self._files.write(path, data, fh, mfusepy.fuse_get_context()[2])

    @override
    def release(self, path: str, fh: int) -> int:
        if path in self._calls:
            return self._calls.release(fh)
        return self._files.release(fh) if _is_kernels(path) else self._scratch.release(fh)

    @override
    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        ours = _is_kernels(path) or path in self._calls
        return 0 if ours else self._scratch.truncate(path, length)  # a shell's `>` truncates before it writes

    @override
    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        return 0 if _is_kernels(path) else self._scratch.utimens(path, times)

    @override
    def unlink(self, path: str) -> int:
        return self._files.unlink(path) if _is_kernels(path) else self._scratch.unlink(path)

    # The kernel's folders refuse these calls, also from root.

    @override
    def create(self, path: str, mode: int, fi: int | None = None) -> int:
        _refuse_kernels(path, errno.EACCES)
        return self._scratch.open(path, os.O_RDWR | os.O_CREAT, mode)

    @override
    def mkdir(self, path: str, mode: int) -> int:
        _refuse_kernels(path, errno.EPERM)
        return self._scratch.mkdir(path, mode)

    @override
    def rmdir(self, path: str) -> int:
        _refuse_kernels(path, errno.EPERM)
        return self._scratch.rmdir(path)

    @override
    def rename(self, old: str, new: str) -> int:
        _refuse_kernels(old, errno.EPERM)
        _refuse_kernels(new, errno.EPERM)
        return self._scratch.rename(old, new)

    @override
    def symlink(self, target: str, source: str) -> int:
        _refuse_kernels(target, errno.EPERM)
        return self._scratch.symlink(target, source)

    @override
    def chmod(self, path: str, mode: int) -> int:
        _refuse_kernels(path, errno.EPERM)
        return self._scratch.chmod(path, mode)

    @override
    def fsync(self, path: str, datasync: int, fh: int) -> int:
        return 0 if _is_kernels(path) else self._scratch.fsync(fh)


def _is_kernels(path: str) -> bool:
    return path.split("/", 2)[1] in KERNELS


def _refuse_kernels(path: str, number: int) -> None:
    if _is_kernels(path):
        raise fails(number, path)
