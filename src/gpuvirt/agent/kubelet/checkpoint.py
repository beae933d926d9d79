"""The kubelet's record of the devices of each pod: `device-plugins/kubelet_internal_checkpoint`.

Source: pkg/kubelet/cm/devicemanager/checkpoint. A JSON object `{"Data": {...}, "Checksum": n}`. The kubelet replaces
the file after each allocation and each device list, by a temporary file, fsync and rename. Entries of ended pods stay
until the next write.

The kubelet writes the file when it has allocated all devices of a container, before it admits the next one. Reading it
takes microseconds and no call, so gpuvirt reads it before each destructive step and at each Allocate.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from gpuvirt.agent.kubelet import wire
from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import DeviceId, PodUid, ResourceName
from gpuvirt.facts.nodes import ReadNode, unread_node
from gpuvirt.model.allocation.allocations import Consumers
from gpuvirt.model.allocation.ledger import Consumer
from gpuvirt.model.allocation.pluginanswers import PluginAnswer
from gpuvirt.model.reasons import Reason, Seen, refusals
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


def consumers(checkpoint: Checkpoint, read_node: ReadNode = unread_node) -> Consumers:
    """Return one container of each device; `read_node` reads the nodes in the answers of plugins."""
    return dict(allocations(checkpoint, read_node))


def allocations(
    checkpoint: Checkpoint, read_node: ReadNode
) -> Iterator[tuple[tuple[ResourceName, DeviceId], Consumer]]:
    """Yield each device with each of its containers."""
    for entry in checkpoint.data.pod_device_entries or ():
        uid = PodUid(entry.pod_uid)
        consumer = Consumer(pod_uid=uid, container=entry.container_name, answer=_answer(entry, read_node))
        yield from (((ResourceName(entry.resource_name), device), consumer) for device in entry.ids())


def _answer(entry: PodDevices, read_node: ReadNode) -> PluginAnswer | UnsetType:
    """Return what the plugin answered for a container's devices, unset where that can't be read."""
    try:
        return UNSET if entry.alloc_resp is None else wire.plugin_answer(entry.alloc_resp, read_node)
    except DamagedError:
        return UNSET  # unknown: unset, and the device is found by its id, or can't be mapped


Registered = Mapping[ResourceName, frozenset[DeviceId]]
"""The healthy devices of each registered resource."""


def registered(checkpoint: Checkpoint) -> Registered:
    """Return the healthy devices of each registered resource; none for one whose plugin has stopped lately."""
    found = checkpoint.data.registered_devices or {}
    return {ResourceName(name): frozenset(map(DeviceId, devices or ())) for name, devices in found.items()}


def without_gone(paths: KubeletPaths, in_file: Consumers, in_api: Consumers) -> Consumers:
    """Return the allocations in the checkpoint without those of pods that have ended.

    A pod that the API does not list and that has no folder has ended. The checkpoint has the same path for every
    `--root-dir` of a kubelet, so the folder of pods may belong to another kubelet. It counts only where a pod of the
    checkpoint has its folder there, or where a pod was added or removed there after the checkpoint was written.
    """
    has_folder = {consumer.pod_uid: _has_folder(paths.pods, consumer.pod_uid) for consumer in in_file.values()}
    if True not in has_folder.values() and not _pods_are_newer(paths):
        return in_file
    return {
        key: consumer for key, consumer in in_file.items() if key in in_api or has_folder[consumer.pod_uid] is not False
    }


def gone(before: Consumers, after: Consumers) -> frozenset[PodUid]:
    """Return the pods of which `without_gone` has removed all allocations."""
    return uids(before) - uids(after)


def uids(consumers: Consumers) -> frozenset[PodUid]:
    """Return the pods of these allocations, as far as their UIDs are known."""
    return frozenset(consumer.pod_uid for consumer in consumers.values() if consumer.pod_uid is not None)


def _pods_are_newer(paths: KubeletPaths) -> bool:
    try:
        return paths.pods.stat().st_mtime_ns > paths.checkpoint.stat().st_mtime_ns
    except OSError:
        return False  # unknown: the checkpoint keeps all its allocations


def _has_folder(pods: Path, uid: PodUid | None) -> bool | None:
    """Return whether a pod has its folder, None where that or its UID is unknown, or where that names no folder."""
    return exists(pods / uid) if uid is not None and UID.fullmatch(uid) is not None else None


def exists(path: Path) -> bool | None:
    """Return whether a path exists, None where that is unknown."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False  # unknown: nothing
    except OSError:
        return None  # unknown: None
    return True


def with_folder(paths: KubeletPaths, pods: Iterable[PodUid]) -> frozenset[PodUid]:
    """Return the pods that have a folder."""
    return frozenset(uid for uid in pods if _has_folder(paths.pods, uid))


def with_answers(in_api: Consumers, in_file: Consumers) -> Consumers:
    """Return the allocations that the API lists, with the plugins' answers, which only the checkpoint has."""
    return {
        key: replace(consumer, answer=in_file[key].answer) if key in in_file else consumer
        for key, consumer in in_api.items()
    }


def lacks_nodes(consumers: Iterable[Consumer]) -> bool:
    """Return whether a node in a plugin's answer did not exist when it was read: it may exist by now."""
    answers = {consumer.answer for consumer in consumers}
    return any(node.number is None for answer in answers if isinstance(answer, PluginAnswer) for node in answer.nodes)


def allocations_unknown(seen: str, *, is_record_incomplete: bool = False) -> Reason:
    """Return the reason for a host whose allocations cannot be read, or whose record lacks pods that run."""
    return refusals.allocations_unknown(
        "a device of this host", Seen("", seen), is_record_incomplete=is_record_incomplete
    )
