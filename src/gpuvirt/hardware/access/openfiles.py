"""The device nodes and the VFIO devices that processes have open or mapped, read from a `/proc`.

A walk reads `/proc/PID/fd`, and with mappings `/proc/PID/maps`: a process keeps a device by a mapping after it has
closed its descriptor. The type and the number of each open file tell whether it is a node, and of what. Its path does
not: a container may have the device as `/opt/gpu`. A walk is no snapshot. It does not see descriptors on their way
through a unix socket, files that io_uring has registered, descriptors of a thread with a table of its own beside its
process's, and what is opened behind it.
"""

import ctypes
import errno
import os
import re
import stat
import struct
from collections.abc import Iterator
from typing import Final

import msgspec

from gpuvirt.paths import HostPath

VFIO_NODE = re.compile(r"/vfio/(?:[0-9]+|noiommu-[0-9]+|devices/vfio[0-9]+)(?: \(deleted\))?\Z")
"""The end of a VFIO node's path in any `/dev`: the host sees a node of a container as `/vfio/12`."""

VFIO_DEVICE = HostPath("anon_inode:[vfio-device]")
"""The link target of a device file descriptor that a process got through the device's group
(vfio_device_open_file)."""

_GONE: Final = frozenset({errno.ENOENT, errno.ESRCH, errno.ENOTDIR})
"""The errors of the kernel for a process, or a file descriptor of one, that no longer exists."""

_MAPPING: Final = re.compile(
    rb"^(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) \S+ \S+ (?P<file>(?P<major>[0-9a-f]+):(?P<minor>[0-9a-f]+) [0-9]+) +"
    rb"(?P<path>/[^\n]*|anon_inode:\[vfio-device\])$",
    re.MULTILINE,
)
"""A line of `/proc/PID/maps` that names a file (Documentation/filesystems/proc.rst)."""
_READINGS: Final = 10
"""How often the mappings of a process are read while it changes them."""
_MOUNT: Final = re.compile(rb"^mnt_id:\s+([0-9]+)$", re.MULTILINE)
_MOUNT_ID, _MOUNT_DEVICE, _MOUNT_OPTIONS = 0, 2, 5
"""Fields of a line of `/proc/PID/mountinfo` (proc_pid_mountinfo(5))."""
_CHUNK_BYTES: Final = 1 << 20

_AT_FDCWD: Final = -100
_AT_STATX_DONT_SYNC: Final = 0x4000
_TYPE_AND_INODE: Final = 0x101
"""STATX_TYPE | STATX_INO"""
_STATX: Final = struct.Struct("=28xH2xQ88x4I112x")
"""stx_mode, stx_ino, stx_rdev_major, stx_rdev_minor, stx_dev_major, stx_dev_minor of `struct statx` (linux/stat.h)."""
_PLAIN: Final = frozenset({stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK})


class OpenFile(msgspec.Struct, frozen=True):
    """A device node, or a VFIO device, that a process has open or mapped.

    `path` is that of the process. `device` is the node's device number; 0 for `VFIO_DEVICE`, which has no node, and for
    a node that this computer does not have, in a copy of a host in files.
    """

    pid: int
    path: HostPath
    device: int


class _Status:
    """Reads the types and the device numbers of open files by statx(2), without asking a file server.

    stat(2) of a file on NFS or FUSE hangs while the server is dead. A link of `/proc` leads to the open file itself, so
    no folder is looked up, and with AT_STATX_DONT_SYNC the clients of NFS, FUSE, Ceph, SMB and AFS answer from memory:
    the type and the number of an open file never change. An O_PATH descriptor of the link needs the same lookup, and
    `/proc/PID/fdinfo` has no device number. What remains: NFS asks about an open file that another client has deleted
    (nfs_weak_revalidate), and file systems that ignore the flag, as 9p does, may wait for their server.
    """

    def __init__(self) -> None:
        self._statx = ctypes.CDLL(None, use_errno=True).statx  # Python has os.statx from 3.15 on
        self._buffer = ctypes.create_string_buffer(_STATX.size)
        self.plain: set[bytes] = set()
        """Mapped files that are no nodes, as `maps` names them: most processes map the same libraries."""

    def type_of(self, link: str, folder: int = _AT_FDCWD) -> int:
        """Return the type of the file that a link leads to (S_IFMT), 0 for an anonymous inode; raise OSError."""
        if self._statx(folder, os.fsencode(link), _AT_STATX_DONT_SYNC, _TYPE_AND_INODE, self._buffer):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), link)
        return stat.S_IFMT(_STATX.unpack_from(self._buffer)[0])

    @property
    def device(self) -> int:
        """The device number of the file that `type_of` was asked for last."""
        return os.makedev(*_STATX.unpack_from(self._buffer)[2:4])

    @property
    def file(self) -> bytes:
        """The device number of the file system, and the inode, of that file: `fd:00 1234`.

        Most file systems have the same ones in `/proc/PID/maps`. btrfs has not: files of several subvolumes share them.
        """
        _, inode, _, _, major, minor = _STATX.unpack_from(self._buffer)
        return b"%02x:%02x %d" % (major, minor, inode)


def read_open_files(proc: str, *, mapped: bool) -> Iterator[OpenFile]:
    """Yield the nodes that the processes of `proc` (`/proc`) have open, and with `mapped` also those they have mapped.

    Raises OSError where the files of a process may not be read.
    """
    status = _Status()
    for name in os.listdir(proc):  # noqa: PTH208  thousands of processes: no Path objects
        if name.isascii() and name.isdigit():
            process, pid = f"{proc}/{name}", int(name)
            opened = _opened(process, pid, status)
            yield from opened or ()
            if mapped:
                yield from _mapped(process, pid, status)
            if opened is None:
                yield from _of_other_threads(process, pid, status, mapped=mapped)


def _of_other_threads(process: str, pid: int, status: _Status, *, mapped: bool) -> Iterator[OpenFile]:
    """Yield the nodes of a process that shows no descriptors.

    It may have none, as a thread of the kernel has none, or its first thread has ended: `/proc/PID/fd` and
    `/proc/PID/maps` are those of that thread, while other threads run on with the same files and memory.
    """
    for thread in _names(f"{process}/task"):
        if int(thread) == pid:
            continue
        folder = f"{process}/task/{thread}"
        yield from _opened(folder, pid, status) or ()
        if mapped:
            yield from _mapped(folder, pid, status)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise


def _opened(process: str, pid: int, status: _Status) -> list[OpenFile] | None:
    """Return the nodes that a process has open, None where it shows no descriptors."""
    try:
        folder = os.open(f"{process}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    try:
        numbers = os.listdir(folder)  # noqa: PTH208  an open folder shortens the lookup of each link
        found = [_opened_node(process, folder, number, pid, status) for number in numbers]
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    finally:
        os.close(folder)
    return [node for node in found if node is not None] if numbers else None


def _opened_node(process: str, folder: int, number: str, pid: int, status: _Status) -> OpenFile | None:
    """Return the node that a descriptor leads to, None for any other file."""
    try:
        kind, refused = status.type_of(number, folder), None
    except OSError as error:
        kind, refused = 0, error
    if kind in _PLAIN:
        return None
    try:
        target = os.readlink(f"{process}/fd/{number}")  # noqa: PTH115
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    if target == VFIO_DEVICE:
        return OpenFile(pid, VFIO_DEVICE, 0)
    if kind:
        return OpenFile(pid, HostPath(target), status.device)
    if refused is None or target[:1] != "/":
        return None
    return _unexamined(process, number, HostPath(target), refused, pid)


def _unexamined(process: str, number: str, target: HostPath, refused: OSError, pid: int) -> OpenFile | None:
    """Return the node that a descriptor leads to, None if it can lead to none; raise OSError where that is unknown."""
    if refused.errno in _GONE:  # a copy of a host in files, whose links lead to nodes of this computer
        return OpenFile(pid, target, 0)
    mount = _MOUNT.search(_content(f"{process}/fdinfo/{number}"))
    if mount is not None and _has_no_nodes(process, _MOUNT_ID, mount[1]):
        return None
    raise OSError(refused.errno, refused.strerror, f"{process}/fd/{number}")


def _mapped(process: str, pid: int, status: _Status) -> Iterator[OpenFile]:
    """Yield the nodes that a process has mapped.

    A mapping that is split, joined or moved loses its name in `map_files`, and the file may still be mapped.
    """
    seen: set[tuple[bytes, bytes]] = set()
    for reading in range(1, _READINGS + 1):
        changed = False
        for mapping in _MAPPING.finditer(_content(f"{process}/maps")):
            if mapping["file"] in status.plain or (file := (mapping["file"], mapping["path"])) in seen:
                continue
            try:
                node = _mapped_node(process, mapping, pid, status)
            except FileNotFoundError:  # unknown: the last reading raises
                if reading == _READINGS:
                    raise
                changed = True
                continue
            seen.add(file)
            if node is not None:
                yield node
        if not changed:
            return


def _mapped_node(process: str, mapping: re.Match[bytes], pid: int, status: _Status) -> OpenFile | None:
    """Return the node that a mapping is of, None for any other file; raise FileNotFoundError if it has changed."""
    target = HostPath(os.fsdecode(mapping["path"]))
    if target == VFIO_DEVICE:
        return OpenFile(pid, VFIO_DEVICE, 0)
    link = f"{process}/map_files/{int(mapping['start'], 16):x}-{int(mapping['end'], 16):x}"  # without leading zeros
    try:
        kind = status.type_of(link)
    except FileNotFoundError:
        os.readlink(link)  # noqa: PTH115
        return OpenFile(pid, target, 0)  # unknown: a user by the path alone, in a copy of a host in files
    except OSError:
        mount = b"%d:%d" % (int(mapping["major"], 16), int(mapping["minor"], 16))
        if _has_no_nodes(process, _MOUNT_DEVICE, mount):
            return None  # unknown: a mount with nodev has no device that is in use
        raise
    if kind and kind not in _PLAIN:
        return OpenFile(pid, target, status.device)
    if status.file == mapping["file"]:
        status.plain.add(mapping["file"])
    return None


def _has_no_nodes(process: str, field: int, mount: bytes) -> bool:
    """Return whether no device can be opened through a mount of a process, since it is mounted with `nodev`.

    FUSE refuses root a look at the files of other users' mounts, which are `nodev` (fusermount3(1)).
    """
    try:
        lines = [line.split(b" ") for line in _content(f"{process}/mountinfo").splitlines()]
    except OSError:  # unknown: EINVAL: the process has just ended
        return False
    options = [line[_MOUNT_OPTIONS].split(b",") for line in lines if line[field] == mount]
    return bool(options) and all(b"nodev" in each for each in options)


def _content(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _GONE:
            return b""
        raise
    try:
        parts: list[bytes] = []
        while part := os.read(fd, _CHUNK_BYTES):
            parts.append(part)
    except ProcessLookupError:  # unknown: the process has ended
        return b""
    else:
        return b"".join(parts)
    finally:
        os.close(fd)
