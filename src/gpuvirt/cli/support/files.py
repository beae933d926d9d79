"""Redacts the kubelet's files for support archives: keeps the settings for devices and the allocations."""

from collections.abc import Collection

import msgspec

from gpuvirt import plain
from gpuvirt.agent.kubelet.checkpoint import Checkpoint, PodDevices
from gpuvirt.cli.support.packing import Pseudonyms
from gpuvirt.errors import ConfigError, DamagedError

CONFIG_KEYS = frozenset({
    *("apiVersion", "kind", "featureGates", "maxPods", "cgroupDriver", "cgroupsPerQOS", "enforceNodeAllocatable"),
    *("cpuManagerPolicy", "cpuManagerPolicyOptions", "cpuManagerReconcilePeriod", "reservedSystemCPUs"),
    *("memoryManagerPolicy", "reservedMemory", "kubeReserved", "systemReserved", "evictionHard", "failSwapOn"),
    *("topologyManagerPolicy", "topologyManagerPolicyOptions", "topologyManagerScope", "podPidsLimit"),
    *("containerRuntimeEndpoint", "shutdownGracePeriod", "shutdownGracePeriodCriticalPods"),
})  # fmt: skip
"""The settings that affect devices. All others are left out: they contain addresses, and may contain headers with
tokens (staticPodURLHeader)."""


def fit_config(content: bytes) -> bytes:
    """Return the redacted `config.yaml`; raise DamagedError where it cannot be parsed."""
    try:
        document = plain.read(content.decode(), where="config.yaml").content
    except (ConfigError, UnicodeDecodeError) as error:
        raise DamagedError(f"cannot be parsed: {error}") from error
    if not isinstance(document, dict):
        raise DamagedError("cannot be parsed: it is not a mapping")
    return plain.write({key: value for key, value in document.items() if key in CONFIG_KEYS}).encode()


def fit_checkpoint(content: Checkpoint, ours: Collection[str], names: Pseudonyms | None) -> bytes:
    """Return a checkpoint without the answers of other vendors' plugins, which may contain environments and tokens.

    `ours` are gpuvirt's resources. The checksum is 0, so that a kubelet rejects the file.
    """
    entries = [_fit(entry, ours, names) for entry in content.data.pod_device_entries or ()]
    data = msgspec.structs.replace(content.data, pod_device_entries=entries)
    return msgspec.json.format(msgspec.json.encode(Checkpoint(data)), indent=1) + b"\n"


def _fit(entry: PodDevices, ours: Collection[str], names: Pseudonyms | None) -> PodDevices:
    if entry.resource_name not in ours:
        entry = msgspec.structs.replace(entry, alloc_resp=None)
    if names is None:
        return entry
    return msgspec.structs.replace(
        entry, pod_uid=names.uid(entry.pod_uid), container_name=names.container(entry.container_name)
    )
