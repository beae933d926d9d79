"""The unix sockets of device plugins: what they are called, and whether somebody listens at one."""

import hashlib
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from gpuvirt.facts.ids import ResourceName
from gpuvirt.paths import SOCKET_PATH_BYTES, check_socket_path

NVIDIA_DOMAIN = "nvidia.com"
_DIGEST_DIGITS = 8


def socket_path(folder: Path, resource: ResourceName) -> Path:
    """Return where the plugin of a resource listens.

    `kubevirt-<name>.sock` for NVIDIA's, as the kubevirt-gpu-device-plugin has it; others carry their domain, since two
    may share a name. A path that would be too long for a socket gets a digest in place of its end.
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
    """Return a few characters that stand for a resource."""
    return hashlib.sha256(resource.encode()).hexdigest()[:_DIGEST_DIGITS]


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Which file is at a path: another one there later has another identity."""

    device: int
    inode: int
    changed_ns: int


def identity(path: Path) -> FileIdentity | None:
    """Return the identity of the file at `path`, None where there is none."""
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return FileIdentity(found.st_dev, found.st_ino, found.st_ctime_ns)


def is_listened_at(path: Path) -> bool:
    """Return whether somebody accepts connections at `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # a listener whose queue is full
            return True
        except OSError:
            return False
        return True


def clear(path: Path) -> bool:
    """Take away a socket that nobody listens at any more; return whether the path is free now.

    A link that leads to no listener goes as well, itself and not what it leads to. Anything else that lies there is
    somebody else's and stays.
    """
    try:
        mode = path.stat(follow_symlinks=False).st_mode
    except FileNotFoundError:
        return True
    if not (stat.S_ISSOCK(mode) or stat.S_ISLNK(mode)) or is_listened_at(path):
        return False
    path.unlink(missing_ok=True)
    return True
