"""The folders of the host as this process sees them, the kubelet's folders, and the limit of a socket's path.

Two types distinguish two kinds of paths. A `HostPath` is a path on the host (`/dev/vfio/12`), which other programs get.
A `Path` is the path of the same file in this process (`/host/dev/vfio/12`). Only `HostRoots` converts one to the other.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NewType, Self

import msgspec

from gpuvirt.errors import PathTooLongError

HostPath = NewType("HostPath", str)
"""An absolute path on the host."""

SOCKET_PATH_BYTES = 107
"""sockaddr_un has 108 bytes with the final NUL (unix(7))."""


class HostRoots(msgspec.Struct, frozen=True):
    """The folders of the host, as this process sees them."""

    sys: Path
    dev: Path
    proc: Path
    run: Path
    root: Path
    system: Path
    """The root below which this process sees the host's programs and modules."""

    @classmethod
    def under(cls, root: Path, system: Path | None = None) -> Self:
        """Return the roots of a host whose `/` is mounted at `root`."""
        folders = {name: root / name for name in ("sys", "dev", "proc", "run")}
        return cls(**folders, root=root, system=system or root)

    def prefixes(self) -> Mapping[str, str]:
        """Return the replacement of each first component of a host path (`/dev` -> `/host/dev`)."""
        ours = {"sys": self.sys, "dev": self.dev, "proc": self.proc, "run": self.run}
        return {
            name: str(path) for name, path in ({"lib": self.system / "lib", "usr": self.system / "usr"} | ours).items()
        }

    def local(self, path: HostPath) -> Path:
        """Return the path of a host's file in this process."""
        _, first, *rest = path.split("/", 2)
        prefix = self.prefixes().get(first)
        return self.root / path.lstrip("/") if prefix is None else Path(prefix, *rest)


class KubeletPaths(msgspec.Struct, frozen=True):
    """The kubelet's folder (`/var/lib/kubelet`), and the files in it that gpuvirt uses."""

    root: Path
    host: Path | None = None
    """The same folder on the host's file system, where only some of its folders are mounted at `root`."""

    @classmethod
    def seen_through(cls, root: Path, system: Path) -> Self:
        """Return the paths of a kubelet's folder, which is seen as a whole below the host's root at `system`."""
        host = system / str(root).lstrip("/")
        return cls(root, host if not (root / "pods").is_dir() and (host / "pods").is_dir() else None)

    @property
    def _whole(self) -> Path:
        return self.host or self.root

    @property
    def device_plugins(self) -> Path:
        """The folder of `kubelet.sock` and of the sockets of all device plugins."""
        return self.root / "device-plugins"

    @property
    def registration_socket(self) -> Path:
        """The socket where a device plugin registers."""
        return self.device_plugins / "kubelet.sock"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the kubelet's device manager, with the devices of each pod."""
        return self.device_plugins / "kubelet_internal_checkpoint"

    @property
    def pods(self) -> Path:
        """The folder with a folder for each pod of the node, named by the pod's UID."""
        return self._whole / "pods"

    @property
    def claims(self) -> Path:
        """The record of the kubelet's DRA manager, with the resource claims of each pod."""
        return self._whole / "dra_manager_state"

    @property
    def plugins_registry(self) -> Path:
        """The folder of the sockets by which DRA drivers and CSI drivers register."""
        return self._whole / "plugins_registry"

    @property
    def plugins(self) -> Path:
        """The folder with a folder for each DRA driver and CSI driver."""
        return self._whole / "plugins"

    @property
    def claim_registry(self) -> Path:
        """The same folder, in which gpuvirt registers as a DRA driver."""
        return self.root / "plugins_registry"

    @property
    def claim_driver(self) -> Path:
        """The folder of gpuvirt's own socket as a DRA driver."""
        return self.root / "plugins" / "gpuvirt.io"

    @property
    def pod_resources_socket(self) -> Path:
        """The socket of the pod-resources API."""
        return self.root / "pod-resources" / "kubelet.sock"


def check_socket_path(path: Path) -> Path:
    """Return `path`; raise PathTooLongError where it is too long for a unix socket."""
    length = len(str(path).encode())
    if length > SOCKET_PATH_BYTES:
        raise PathTooLongError(
            f"{path}: the path of a unix socket has at most {SOCKET_PATH_BYTES} bytes, this one has {length};"
            " set --kubelet-dir to a shorter path (for example a bind mount or a link)"
        )
    return path
