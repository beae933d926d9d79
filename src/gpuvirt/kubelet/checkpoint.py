"""The kubelet's record of the devices of each pod: `device-plugins/kubelet_internal_checkpoint`.

Source: pkg/kubelet/cm/devicemanager/checkpoint. A JSON object `{"Data": {...}, "Checksum": n}`. The kubelet replaces
the file after each allocation and each device list, by a temporary file, fsync and rename. Entries of ended pods stay
until the next write.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from gpuvirt.documents import from_json
from gpuvirt.facts.ids import DeviceId, PodUid, ResourceName
from gpuvirt.model.allocation.ledger import Consumer
from gpuvirt.model.allocation.recorded import Consumers
from gpuvirt.paths import KubeletPaths

UID = re.compile(r"[0-9A-Za-z-]+")
"""The UID of a pod, which names its folder; the UIDs of static pods are not UUIDs."""


class PodDevices(msgspec.Struct, frozen=True, rename="pascal"):
    """The devices of one resource that one container has."""

    pod_uid: str = msgspec.field(name="PodUID")
    container_name: str
    resource_name: str
    device_ids: Mapping[str, list[str] | None] | list[str] | None = msgspec.field(name="DeviceIDs")
    """By NUMA node since Kubernetes 1.20 (`-1` for none), a list in older versions."""
    alloc_resp: bytes | None = None
    """The answer of the plugin, a serialised ContainerAllocateResponse."""

    def ids(self) -> list[DeviceId]:
        """Return the device ids of all NUMA nodes."""
        if self.device_ids is None:
            return []
        groups: Iterable[list[str] | None]
        groups = [self.device_ids] if isinstance(self.device_ids, list) else self.device_ids.values()
        return list(dict.fromkeys(DeviceId(device) for group in groups for device in group or ()))


class Data(msgspec.Struct, frozen=True, rename="pascal"):
    """The content. Kubelets always write both fields, null for an empty one; without them a file is damaged."""

    pod_device_entries: list[PodDevices] | None
    registered_devices: Mapping[str, list[str] | None] | None
    """The healthy devices of each registered resource."""


class Checkpoint(msgspec.Struct, frozen=True, rename="pascal"):
    """The file."""

    data: Data
    checksum: int = 0


def parse(content: bytes) -> Checkpoint:
    """Return a checkpoint, or raise DamagedError.

    The checksum is not verified: it covers a dump of Go types, whose names may change with the kubelet's code, and the
    kubelet replaces the file atomically.
    """
    return from_json(content, Checkpoint, null_is_absent=True)


def consumers(checkpoint: Checkpoint) -> Consumers:
    """Return the container that has each device."""
    return {
        (ResourceName(entry.resource_name), device): Consumer(
            pod_uid=PodUid(entry.pod_uid), container=entry.container_name
        )
        for entry in checkpoint.data.pod_device_entries or ()
        for device in entry.ids()
    }


def without_gone(paths: KubeletPaths, in_file: Consumers, in_api: Consumers) -> Consumers:
    """Return the allocations in the checkpoint without those of pods that have ended.

    A pod that the API does not list and that has no folder has ended. The checkpoint has the same path for every
    `--root-dir` of a kubelet, so the folder of pods may belong to another kubelet. It counts only where a pod of the
    checkpoint has its folder there, or where a pod was added or removed there after the checkpoint was written.
    """
    has_folder = {consumer.pod_uid: _has_folder(paths.pods, consumer) for consumer in in_file.values()}
    if True not in has_folder.values() and not _pods_are_newer(paths):
        return in_file
    return {
        key: consumer for key, consumer in in_file.items() if key in in_api or has_folder[consumer.pod_uid] is not False
    }


def gone(before: Consumers, after: Consumers) -> frozenset[PodUid]:
    """Return the pods of which `without_gone` has removed all allocations."""
    return _uids(before) - _uids(after)


def _uids(consumers: Consumers) -> frozenset[PodUid]:
    return frozenset(consumer.pod_uid for consumer in consumers.values() if consumer.pod_uid is not None)


def _pods_are_newer(paths: KubeletPaths) -> bool:
    try:
        return paths.pods.stat().st_mtime_ns > paths.checkpoint.stat().st_mtime_ns
    except OSError:
        return False


def _has_folder(pods: Path, consumer: Consumer) -> bool | None:
    """Return whether a pod has its folder, None where its UID is unknown or cannot name a folder."""
    uid = consumer.pod_uid
    return (pods / uid).exists() if uid is not None and UID.fullmatch(uid) is not None else None
