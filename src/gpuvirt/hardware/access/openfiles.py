"""The nodes under `/dev` and the VFIO devices that processes have open or mapped, read from a `/proc`.

A walk reads `/proc/PID/fd`, and with mappings `/proc/PID/maps`: a process keeps a device by a mapping after it has
closed its descriptor. A walk is no snapshot. It does not see descriptors on their way through a unix socket, files that
io_uring has registered, descriptors of a thread with a table of its own beside its process's, and what is opened
behind it.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from gpuvirt.paths import HostPath

VFIO_NODE = re.compile(r"/vfio/(?:[0-9]+|noiommu-[0-9]+|devices/vfio[0-9]+)(?: \(deleted\))?\Z")
"""The end of a VFIO node's path in any `/dev`: the host sees a node of a container as `/vfio/12`."""

VFIO_DEVICE = HostPath("anon_inode:[vfio-device]")
"""The link target of a device file descriptor that a process got through the device's group
(vfio_device_open_file)."""

_NODE: Final = re.compile(
    r"/(?:vfio/(?:(?:noiommu-)?[0-9]+|devices/vfio[0-9]+)|nvidia[0-9]+|nvidia-caps/[\w-]+|dri/(?:card|renderD)[0-9]+"
    r"|accel/accel[0-9]+|snd/\w+|bus/usb/[0-9]+/[0-9]+|i2c-[0-9]+|input/event[0-9]+|hidraw[0-9]+)(?: \(deleted\))?\Z"
)
"""The end of a GPU node's path in any `/dev`."""

_GONE: Final = frozenset({errno.ENOENT, errno.ESRCH, errno.ENOTDIR})
"""The errors of the kernel for a process, or a file descriptor of one, that no longer exists."""

_MAPPING: Final = re.compile(
    rb"^([0-9a-f]+-[0-9a-f]+) \S+ \S+ (\S+ [0-9]+) +(/[^\n]*|anon_inode:\[vfio-device\])$", re.MULTILINE
)
"""A line of `/proc/PID/maps` that names a file (Documentation/filesystems/proc.rst)."""
_CHUNK_BYTES: Final = 1 << 20


class OpenFile(msgspec.Struct, frozen=True):
    """A node under `/dev`, or a VFIO device, that a process has open or mapped.

    `device` is the node's device number, since the path may be that of a private copy; 0 for `VFIO_DEVICE`, which has
    no node.
    """

    pid: int
    path: HostPath
    device: int


def read_open_files(proc: str, *, mapped: bool) -> Iterator[OpenFile]:
    """Yield the nodes that the processes of `proc` (`/proc`) have open, and with `mapped` also those they have mapped.

    Raises OSError where the files of a process may not be read.
    """
    for name in os.listdir(proc):  # noqa: PTH208  thousands of processes: no Path objects
        if name.isascii() and name.isdigit():
            process, pid = f"{proc}/{name}", int(name)
            if numbers := _names(f"{process}/fd"):
                yield from _opened(f"{process}/fd", numbers, pid)
                if mapped:
                    yield from _mapped(process, f"{process}/maps", pid)
            else:
                yield from _of_other_threads(process, pid, mapped=mapped)


def _of_other_threads(process: str, pid: int, *, mapped: bool) -> Iterator[OpenFile]:
    """Yield the nodes of a process that shows no descriptors.

    It may have none, as a thread of the kernel has none, or its first thread has ended: `/proc/PID/fd` and
    `/proc/PID/maps` are those of that thread, while other threads run on with the same files and memory.
    """
    if mapped:
        yield from _mapped(process, f"{process}/maps", pid)
    for thread in _names(f"{process}/task"):
        if int(thread) == pid:
            continue
        folder = f"{process}/task/{thread}"
        yield from _opened(f"{folder}/fd", _names(f"{folder}/fd"), pid)
        if mapped:
            yield from _mapped(process, f"{folder}/maps", pid)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise


def _opened(folder: str, numbers: Iterable[str], pid: int) -> Iterator[OpenFile]:
    for number in numbers:
        link = f"{folder}/{number}"
        try:
            target = os.readlink(link)  # noqa: PTH115  a hundred thousand links
        except OSError as error:
            if error.errno in _GONE:
                continue
            raise
        if (found := _node(pid, target, link)) is not None:
            yield found


def _node(pid: int, target: str, link: str) -> OpenFile | None:
    """Return the node that `link` leads to, None for any other file.

    Only nodes are examined further: a stat of a file on a dead NFS server would hang.
    """
    if target == VFIO_DEVICE:
        return OpenFile(pid, VFIO_DEVICE, 0)
    if not target.startswith("/dev/") and (target[:1] != "/" or _NODE.search(target) is None):
        return None
    try:
        number = os.stat(link).st_rdev  # noqa: PTH116
    except FileNotFoundError:  # a copy of a host in files, whose links lead to nodes of this computer
        number = 0
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    return OpenFile(pid, HostPath(target), number)


def _mapped(folder: str, maps: str, pid: int) -> Iterator[OpenFile]:
    content = _content(maps)
    seen: set[tuple[bytes, bytes]] = set()
    for match in _MAPPING.finditer(content):
        if (file := (match[2], match[3])) in seen:
            continue
        seen.add(file)
        target = os.fsdecode(match[3])
        if (found := _node(pid, target, f"{folder}/map_files/{match[1].decode()}")) is not None:
            yield found


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
    except ProcessLookupError:  # the process has ended
        return b""
    else:
        return b"".join(parts)
    finally:
        os.close(fd)
