"""The kubelet's own record of which pod has which device: `device-plugins/kubelet_internal_checkpoint`.

Source: pkg/kubelet/cm/devicemanager/checkpoint. A JSON object `{"Data": {...}, "Checksum": n}`; the kubelet writes it
beside, syncs and renames, after each allocation and device list. Entries of dead pods stay until it is next written.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from gpuvirt.documents import from_json
from gpuvirt.facts.ids import DeviceId, PodUid, ResourceName
from gpuvirt.kubelet.podresources import Consumers
from gpuvirt.model.allocation.ledger import Consumer
from gpuvirt.paths import KubeletPaths

UID = re.compile(r"[0-9A-Za-z-]+")
"""A pod's, which names its folder; those of pods from files are other than UUIDs."""


class PodDevices(msgspec.Struct, frozen=True, rename="pascal"):
    """What one container has of one resource."""

    pod_uid: str = msgspec.field(name="PodUID")
    container_name: str
    resource_name: str
    device_ids: Mapping[str, list[str] | None] | list[str] | None = msgspec.field(name="DeviceIDs")
    """By NUMA node since Kubernetes 1.20 (`-1` for none), a list before."""
    alloc_resp: bytes | None = None
    """The answer that the plugin gave, a serialised ContainerAllocateResponse."""

    def ids(self) -> list[DeviceId]:
        """Return the device ids, whatever their nodes."""
        if self.device_ids is None:
            return []
        groups: Iterable[list[str] | None]
        groups = [self.device_ids] if isinstance(self.device_ids, list) else self.device_ids.values()
        return list(dict.fromkeys(DeviceId(one) for group in groups for one in group or ()))


class Data(msgspec.Struct, frozen=True, rename="pascal"):
    """The content. Kubelets write both fields, null for none: a file that lacks one says nothing of pods."""

    pod_device_entries: list[PodDevices] | None
    registered_devices: Mapping[str, list[str] | None] | None
    """The healthy devices of each registered resource."""


class Checkpoint(msgspec.Struct, frozen=True, rename="pascal"):
    """The file."""

    data: Data
    checksum: int = 0


def parse(content: bytes) -> Checkpoint:
    """Return a checkpoint, or raise DamagedError.

    The checksum is not asked: it is over a dump of Go types, whose names may change with the kubelet's code, and the
    kubelet puts the file in its place whole.
    """
    return from_json(content, Checkpoint, null_is_absent=True)


def consumers(checkpoint: Checkpoint) -> Mapping[tuple[ResourceName, DeviceId], Consumer]:
    """Return who has which device."""
    return {
        (ResourceName(entry.resource_name), device): Consumer(
            pod_uid=PodUid(entry.pod_uid), container=entry.container_name
        )
        for entry in checkpoint.data.pod_device_entries or ()
        for device in entry.ids()
    }


def without_gone(paths: KubeletPaths, in_file: Consumers, in_api: Consumers) -> Consumers:
    """Return what pods have that are not gone.

    The checkpoint's folder is the same whatever `--root-dir` a kubelet has, so the pods' folder can be another
    kubelet's: it counts where a pod of the checkpoint has its folder in it, or a pod came or went in it since the
    checkpoint was written.
    """
    has_folder = {consumer.pod_uid: _has_folder(paths.pods, consumer) for consumer in in_file.values()}
    if True not in has_folder.values() and not _pods_are_newer(paths):
        return in_file
    return {key: one for key, one in in_file.items() if key in in_api or has_folder[one.pod_uid] is not False}


def gone(before: Consumers, after: Consumers) -> frozenset[PodUid]:
    """Return the pods of which nothing is left by `without_gone`."""
    uids = (frozenset(one.pod_uid for one in held.values() if one.pod_uid is not None) for held in (before, after))
    return next(uids) - next(uids)


def _pods_are_newer(paths: KubeletPaths) -> bool:
    try:
        return paths.pods.stat().st_mtime_ns > paths.checkpoint.stat().st_mtime_ns
    except OSError:
        return False


def _has_folder(pods: Path, consumer: Consumer) -> bool | None:
    """Return whether a pod has its folder, None where its UID names none."""
    uid = consumer.pod_uid
    return (pods / uid).exists() if uid is not None and UID.fullmatch(uid) is not None else None
