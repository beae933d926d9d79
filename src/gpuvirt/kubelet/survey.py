"""What the kubelet's folder says of it, for `gpuvirt doctor`: its socket, its configuration, what it has counted."""

import errno
from collections import defaultdict
from pathlib import Path

from gpuvirt import documents
from gpuvirt.errors import ConfigError, DamagedError
from gpuvirt.facts.kubelet import KubeletConfig, KubeletFacts
from gpuvirt.facts.pci import Unread
from gpuvirt.kubelet import checkpoint
from gpuvirt.kubelet.podresources import PodResourcesUnknownError, ask_allocatable
from gpuvirt.paths import HostPath, KubeletPaths

CONFIG = "config.yaml"
"""Where kubeadm puts the kubelet's configuration."""

GONE = frozenset({errno.ENOENT, errno.ENOTDIR})


def read_kubelet(paths: KubeletPaths) -> KubeletFacts:
    """Return what a kubelet's folder says."""
    counted_by, counted = _counted(paths)
    return KubeletFacts(
        folder=str(paths.root),
        socket=str(paths.registration_socket),
        listens=_exists(paths.registration_socket),
        config_file=str(paths.root / CONFIG),
        config=_config(paths.root / CONFIG),
        counted_by=counted_by,
        counted=counted,
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
        return documents.load(path, KubeletConfig, null_is_absent=True)
    except ConfigError as error:
        return Unread(HostPath(str(path)), seen=error.message)


def _counted(paths: KubeletPaths) -> tuple[str, dict[str, frozenset[str]] | Unread | None]:
    """Return what it counts, and where that was found: it tells, or has written it down."""
    try:
        told = ask_allocatable(paths.pod_resources_socket) if paths.pod_resources_socket.exists() else None
    except (PodResourcesUnknownError, OSError):  # an old kubelet, one that has ended, or not ours to ask
        told = None
    if told is None:
        return str(paths.checkpoint), _written(paths.checkpoint)
    counted: defaultdict[str, set[str]] = defaultdict(set)
    for resource, device in told:
        counted[resource].add(device)
    return str(paths.pod_resources_socket), {resource: frozenset(devices) for resource, devices in counted.items()}


def _written(path: Path) -> dict[str, frozenset[str]] | Unread | None:
    try:
        registered = checkpoint.parse(path.read_bytes()).data.registered_devices or {}
    except OSError as error:
        return None if error.errno in GONE else Unread(HostPath(str(path)), errno=error.errno)
    except DamagedError as error:
        return Unread(HostPath(str(path)), seen=str(error))
    return {resource: frozenset(devices or ()) for resource, devices in registered.items()}
