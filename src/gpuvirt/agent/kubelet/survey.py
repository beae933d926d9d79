"""Reads the kubelet's folder for `gpuvirt doctor`: its socket, its configuration, the devices that it counts."""

import errno
from collections import defaultdict
from pathlib import Path

from gpuvirt import documents
from gpuvirt.agent.change.gate.agentlock import no_plugin
from gpuvirt.agent.change.gate.drainrequest import has_member
from gpuvirt.agent.change.gate.gate import gate_at, plugin_gates
from gpuvirt.agent.change.gate.gatelock import GateFailedError
from gpuvirt.agent.kubelet import checkpoint, sockets
from gpuvirt.agent.kubelet.podresources import PodResourcesUnknownError, ask_allocatable
from gpuvirt.errors import ConfigError, DamagedError
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.setup import KubeletConfig, KubeletFacts
from gpuvirt.paths import HostPath, KubeletPaths

CONFIG = "config.yaml"
"""The kubelet's configuration on nodes of kubeadm."""

GONE = frozenset({errno.ENOENT, errno.ENOTDIR})


def read_kubelet(paths: KubeletPaths) -> KubeletFacts:
    """Return the facts about the kubelet in its folder."""
    counted_by, counted = _counted(paths)
    return KubeletFacts(
        folder=str(paths.root),
        socket=str(paths.registration_socket),
        listens=_listens(paths.registration_socket),
        has_socket=_exists(paths.registration_socket),
        config_file=str(paths.root / CONFIG),
        config=_config(paths.root / CONFIG),
        counted_by=counted_by,
        counted=counted,
        offers_without_gate=_offers_without_gate(paths.device_plugins),
        gates=str(plugin_gates(paths.device_plugins)),
    )


def _offers_without_gate(device_plugins: Path) -> bool | Unread:
    """Return whether an agent offers devices, and none takes part in the gates of a device plugin.

    The privileged agent has gates elsewhere; it is none of these.
    """
    try:
        found = _exists(device_plugins)
        if isinstance(found, Unread) or not found:
            return found
        if has_member(gate_at(plugin_gates(device_plugins))):
            return False
        # Only where no plugin has the lock is it held here, for microseconds: an agent that starts then tries again.
        with no_plugin(device_plugins) as nobody_offers:
            return not nobody_offers
    except GateFailedError as error:
        return Unread(HostPath(str(error.path)), seen=error.problem)


def _listens(path: Path) -> bool | Unread:
    failure = sockets.connected(path)
    # unknown: what is Unread is so below, too; a path that is too long is refused without a look.
    if failure in {*GONE, errno.ECONNREFUSED} or _exists(path) is False:
        return False
    return True if failure is None else Unread(HostPath(str(path)), errno=failure)


def _exists(path: Path) -> bool | Unread:
    try:
        path.stat()
    except OSError as error:
        return False if error.errno in GONE else Unread(HostPath(str(path)), errno=error.errno)
    return True


def _config(path: Path) -> KubeletConfig | Unread | None:
    found = _exists(path)
    if isinstance(found, Unread):
        return found
    if not found:
        return None
    try:
        return documents.load(path, KubeletConfig, null_is_absent=True)
    except ConfigError as error:
        return Unread(HostPath(str(path)), seen=error.message)


def _counted(paths: KubeletPaths) -> tuple[str, dict[str, frozenset[str]] | Unread | None]:
    """Return the devices that the kubelet counts, and the source: its API or its checkpoint."""
    try:
        # unknown: the checkpoint tells, which is named as the source
        allocatable = ask_allocatable(paths.pod_resources_socket) if paths.pod_resources_socket.exists() else None
    except (PodResourcesUnknownError, OSError):  # unknown: the checkpoint tells
        allocatable = None
    if allocatable is None:
        return str(paths.checkpoint), _counted_in_checkpoint(paths.checkpoint)
    counted: defaultdict[str, set[str]] = defaultdict(set)
    for resource, device in allocatable:
        counted[resource].add(device)
    return str(paths.pod_resources_socket), {resource: frozenset(devices) for resource, devices in counted.items()}


def _counted_in_checkpoint(path: Path) -> dict[str, frozenset[str]] | Unread | None:
    try:
        registered = checkpoint.parse(path.read_bytes()).data.registered_devices or {}
    except OSError as error:
        return None if error.errno in GONE else Unread(HostPath(str(path)), errno=error.errno)
    except DamagedError as error:
        return Unread(HostPath(str(path)), seen=str(error))
    return {resource: frozenset(devices or ()) for resource, devices in registered.items()}
