"""Where things lie: the host's folders as this process sees them, the kubelet's, and the length of a socket's path.

Two types keep two things apart. A `HostPath` is what the host calls a file (`/dev/vfio/12`) and is what other programs
are told. A `Path` is where this process finds it (`/host/dev/vfio/12`). Only `HostRoots` turns one into the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NewType, Self

from gpuvirt.errors import PathTooLongError

HostPath = NewType("HostPath", str)
"""An absolute path as the host itself would write it."""

SOCKET_PATH_BYTES = 107
"""sockaddr_un holds 108 bytes with the closing NUL (unix(7))."""


@dataclass(frozen=True, slots=True)
class HostRoots:
    """The folders of the host, as this process sees them."""

    sys: Path
    dev: Path
    proc: Path
    run: Path
    root: Path
    system: Path
    """Where the host's programs and modules are seen, which a container has beside its own."""

    @classmethod
    def under(cls, root: Path, system: Path | None = None) -> Self:
        """Return the roots of a host whose `/` is seen at `root`."""
        folders = {name: root / name for name in ("sys", "dev", "proc", "run")}
        return cls(**folders, root=root, system=system or root)

    def prefixes(self) -> Mapping[str, str]:
        """Return, for each first component of a host path, what stands in its place here (`/dev` -> `/host/dev`)."""
        ours = {"sys": self.sys, "dev": self.dev, "proc": self.proc, "run": self.run}
        return {
            name: str(path) for name, path in ({"lib": self.system / "lib", "usr": self.system / "usr"} | ours).items()
        }

    def local(self, path: HostPath) -> Path:
        """Return where this process finds `path`."""
        _, first, *rest = path.split("/", 2)
        prefix = self.prefixes().get(first)
        return self.root / path.lstrip("/") if prefix is None else Path(prefix, *rest)


@dataclass(frozen=True, slots=True)
class KubeletPaths:
    """The kubelet's folder (`/var/lib/kubelet`) and what device plugins need of it."""

    root: Path

    @property
    def device_plugins(self) -> Path:
        """The folder that holds `kubelet.sock` and the sockets of all device plugins."""
        return self.root / "device-plugins"

    @property
    def registration_socket(self) -> Path:
        """The socket where a device plugin registers."""
        return self.device_plugins / "kubelet.sock"

    @property
    def checkpoint(self) -> Path:
        """The device manager's record of which pod holds which device."""
        return self.device_plugins / "kubelet_internal_checkpoint"

    @property
    def pods(self) -> Path:
        """The folder that has one for each pod of the node, by its UID."""
        return self.root / "pods"

    @property
    def pod_resources_socket(self) -> Path:
        """The socket of the pod-resources API."""
        return self.root / "pod-resources" / "kubelet.sock"


def check_socket_path(path: Path) -> Path:
    """Return `path` when a unix socket may lie there, else raise PathTooLongError."""
    length = len(str(path).encode())
    if length > SOCKET_PATH_BYTES:
        raise PathTooLongError(
            f"{path}: a unix socket's path holds at most {SOCKET_PATH_BYTES} bytes, this one has {length};"
            " give --kubelet-dir a shorter path (a bind mount or a link will do)"
        )
    return path
