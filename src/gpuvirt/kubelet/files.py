"""What of the kubelet's files is fit to be handed on: how it places devices, who has which, and nothing of others'."""

from collections.abc import Collection

import msgspec

from gpuvirt import plain
from gpuvirt.errors import ConfigError, DamagedError
from gpuvirt.kubelet.checkpoint import Checkpoint, PodDevices
from gpuvirt.model.doctor.pseudonyms import Pseudonyms

CONFIG_KEYS = frozenset({
    *("apiVersion", "kind", "featureGates", "maxPods", "cgroupDriver", "cgroupsPerQOS", "enforceNodeAllocatable"),
    *("cpuManagerPolicy", "cpuManagerPolicyOptions", "cpuManagerReconcilePeriod", "reservedSystemCPUs"),
    *("memoryManagerPolicy", "reservedMemory", "kubeReserved", "systemReserved", "evictionHard", "failSwapOn"),
    *("topologyManagerPolicy", "topologyManagerPolicyOptions", "topologyManagerScope", "podPidsLimit"),
    *("containerRuntimeEndpoint", "shutdownGracePeriod", "shutdownGracePeriodCriticalPods"),
})  # fmt: skip
"""What of its configuration decides on devices. The rest is left out: it has addresses, and may have headers with
tokens (staticPodURLHeader)."""


def fit_config(content: bytes) -> bytes:
    """Return what of `config.yaml` is handed on; raise DamagedError for what can't be understood."""
    try:
        document = plain.read(content.decode(), where="config.yaml").content
    except (ConfigError, UnicodeDecodeError) as error:
        raise DamagedError(f"can't be understood: {error}") from error
    if not isinstance(document, dict):
        raise DamagedError("can't be understood: it is no mapping")
    return plain.write({key: value for key, value in document.items() if key in CONFIG_KEYS}).encode()


def fit_checkpoint(content: Checkpoint, ours: Collection[str], names: Pseudonyms | None) -> bytes:
    """Return a checkpoint without the answers of others' plugins, in which environments and tokens may stand.

    `ours` are the resources that are gpuvirt's. The checksum is 0: no kubelet is to take it.
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
