"""The unix sockets of device plugins: their names, and whether a process listens on one."""

import errno
import hashlib
import socket
import stat
from pathlib import Path

import msgspec

from gpuvirt.facts.ids import ResourceName
from gpuvirt.paths import SOCKET_PATH_BYTES, check_socket_path

NVIDIA_DOMAIN = "nvidia.com"
_DIGEST_DIGITS = 8
NO_LISTENER = frozenset({errno.ECONNREFUSED, errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""The errors of a connection to a file that no process listens at."""


def socket_path(folder: Path, resource: ResourceName) -> Path:
    """Return the socket of a resource's plugin.

    It is `kubevirt-<name>.sock` for NVIDIA's domain, as in the kubevirt-gpu-device-plugin. Other sockets contain their
    domain, since two domains may have the same name. Where the path would be too long for a socket, a digest replaces
    the end of the name.
    """
    domain, _, name = resource.partition("/")
    stem = f"kubevirt-{name}" if domain == NVIDIA_DOMAIN else f"gpuvirt-{domain}-{name}"
    path = folder / f"{stem}.sock"
    excess = len(str(path).encode()) - SOCKET_PATH_BYTES
    if excess <= 0:
        return path
    kept = stem[: max(len(stem) - excess - _DIGEST_DIGITS - 1, 0)]
    return check_socket_path(folder / f"{kept}-{digest(resource)}.sock")


def digest(resource: ResourceName) -> str:
    """Return a few characters that identify a resource."""
    return hashlib.sha256(resource.encode()).hexdigest()[:_DIGEST_DIGITS]


class FileIdentity(msgspec.Struct, frozen=True):
    """The identity of the file at a path; a new file at the same path has another identity."""

    device: int
    inode: int
    changed_ns: int


def identity(path: Path) -> FileIdentity | None:
    """Return the identity of the file at `path`, None where the file does not exist."""
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return None  # unknown: the plugin registers again
    return FileIdentity(found.st_dev, found.st_ino, found.st_ctime_ns)


def is_listened_at(path: Path) -> bool:
    """Return whether a process accepts connections on the socket `path`, or may do so."""
    found = connected(path)
    return found not in NO_LISTENER  # unknown: the socket stays


def connected(path: Path) -> int | None:
    """Return the errno of a connection to the socket `path`, None where a process listens; it waits for nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # unknown: a listener whose queue is full
            return None
        except OSError as error:
            return error.errno or errno.ENAMETOOLONG  # unknown: none of NO_LISTENER; Python refuses a long path
        return None


def clear(path: Path) -> bool:
    """Remove a socket without a listener, or a link to one; return whether the path is free now.

    Of a link, only the link is removed. Files of other kinds belong to other programs and stay.
    """
    try:
        mode = path.stat(follow_symlinks=False).st_mode
    except FileNotFoundError:
        return True  # unknown: nothing, the path is free
    if not (stat.S_ISSOCK(mode) or stat.S_ISLNK(mode)) or is_listened_at(path):
        return False
    path.unlink(missing_ok=True)
    return True
