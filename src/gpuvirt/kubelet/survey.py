"""What the kubelet's folder says of it, for `gpuvirt doctor`: its socket, its configuration, what it has counted."""

import errno
from pathlib import Path

from gpuvirt import documents
from gpuvirt.errors import ConfigError, DamagedError
from gpuvirt.facts.kubelet import KubeletConfig, KubeletFacts
from gpuvirt.facts.pci import Unread
from gpuvirt.kubelet import checkpoint
from gpuvirt.paths import HostPath, KubeletPaths

CONFIG = "config.yaml"
"""Where kubeadm puts the kubelet's configuration."""

GONE = frozenset({errno.ENOENT, errno.ENOTDIR})


def read_kubelet(paths: KubeletPaths) -> KubeletFacts:
    """Return what a kubelet's folder says."""
    return KubeletFacts(
        folder=str(paths.root),
        socket=str(paths.registration_socket),
        listens=_exists(paths.registration_socket),
        config_file=str(paths.root / CONFIG),
        config=_config(paths.root / CONFIG),
        checkpoint_file=str(paths.checkpoint),
        counted=_counted(paths.checkpoint),
    )


def _exists(path: Path) -> bool | Unread:
    try:
        path.stat()
    except OSError as error:
        return False if error.errno in GONE else Unread(HostPath(str(path)), errno=error.errno)
    return True


def _config(path: Path) -> KubeletConfig | Unread | None:
    found = _exists(path)
    if found is not True:
        return None if found is False else found
    try:
        return documents.load(path, KubeletConfig)
    except ConfigError as error:
        return Unread(HostPath(str(path)), seen=error.message)


def _counted(path: Path) -> dict[str, frozenset[str]] | Unread | None:
    try:
        registered = checkpoint.parse(path.read_bytes()).data.registered_devices or {}
    except OSError as error:
        return None if error.errno in GONE else Unread(HostPath(str(path)), errno=error.errno)
    except DamagedError as error:
        return Unread(HostPath(str(path)), seen=str(error))
    return {resource: frozenset(devices or ()) for resource, devices in registered.items()}
