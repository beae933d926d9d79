"""Whether the kubelet's record of allocations is complete, by its contents in this boot and its losses since.

A kubelet that starts without its checkpoint knows no allocation. It writes a new checkpoint as soon as a plugin
registers, which lacks the containers that run (`devicesToAllocate` in pkg/kubelet/cm/devicemanager allocates nothing to
them). So a missing checkpoint says nothing, and neither does the next one, until no pod is left that may have devices
without an entry: such pods are in doubt. All functions are pure.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import BootId, DeviceId, PodUid, ResourceName
from gpuvirt.model.allocation.ledger import Consumer, Entry, OfSeveral


# A kubelet that starts admits the pods of its node again. It passes over containers that run. If a container has ended,
# as an init container has, and its device is not healthy at that moment, it rejects the pod for good and kills the
# containers that run (`devicesToAllocate` of its device manager; seen with 1.36.3).
def may_be_rejected(entry: Entry, of_several: OfSeveral | None) -> bool:
    """Return whether a kubelet could reject the pod of an allocated device at its next start.

    `of_several` are the devices of pods several of whose containers have devices: one of those may have ended. None if
    they are unknown. While the kubelet admits a pod, it has not named it yet.
    """
    return entry.consumer is None or of_several is None or (entry.resource, entry.device) in of_several


def devices_of_several(allocations: Iterable[tuple[tuple[ResourceName, DeviceId], Consumer]]) -> OfSeveral:
    """Return the devices of pods several of whose containers have devices; `allocations` name each container's."""
    by_pod = defaultdict[PodUid, dict[str | None, set[tuple[ResourceName, DeviceId]]]](dict)
    for key, consumer in allocations:
        if consumer.pod_uid is not None:
            by_pod[consumer.pod_uid].setdefault(consumer.container, set()).add(key)
    several = {pod: containers for pod, containers in by_pod.items() if len(containers) > 1}
    return {key: pod for pod, containers in several.items() for keys in containers.values() for key in keys}


_UID = re.compile(r"[0-9A-Za-z-]+")
"""The UID of a pod, which names its folder."""

NEVER_WRITTEN = "it does not exist yet: the kubelet writes it when its first device plugin registers"
MISSING = "it existed in this boot, and is missing"
RESTARTED = "since the kubelet was started again, it lacks pods that it had before"


class RecordedDevice(msgspec.Struct, frozen=True):
    """One device of one container, by the kubelet's record."""

    pod: PodUid
    container: str
    resource: ResourceName
    device: DeviceId

    @property
    def key(self) -> tuple[ResourceName, DeviceId]:
        """The resource and the device."""
        return self.resource, self.device


class NamedDevice(msgspec.Struct, frozen=True):
    """One device of a container, by the kubelet's API: it names the pod without its UID."""

    namespace: str
    pod: str
    container: str
    resource: ResourceName
    device: DeviceId

    @property
    def key(self) -> tuple[ResourceName, DeviceId]:
        """The resource and the device."""
        return self.resource, self.device


class Doubt(msgspec.Struct, frozen=True):
    """Why the record may be incomplete."""

    seen: str
    """The observation, as text."""
    pods: tuple[PodUid, ...] | None
    """The pods that may have devices without an entry; None if the pods of the node are not visible."""
    kubelet: str = ""
    """The kubelet that still has all allocations in its memory, and writes them again; empty if there is none."""


class RecordHistory(msgspec.Struct, frozen=True):
    """The record's past as this host's processes know it, in the form that is kept on disk."""

    boot_id: BootId | None = None
    """The boot in which it was observed. After a reboot no container of the boot before runs."""
    kubelet: str = ""
    """The kubelet that ran at the last reading of the record, by its socket."""
    is_seen: bool = False
    """Whether the record existed in this boot."""
    is_missing: bool = False
    """Whether the record did not exist at the last reading."""
    is_absence_known: bool = False
    """Whether no pod had a device when the record did not exist yet in this boot, by the API server."""
    devices: tuple[RecordedDevice, ...] = ()
    """The devices in the last record."""
    lost: tuple[RecordedDevice, ...] = ()
    """Devices of pods that have not ended, and that the record lacks since the kubelet has lost it."""
    doubt: Doubt | None = None
    """Why the record may be incomplete; None if it is complete."""
    named: tuple[NamedDevice, ...] = ()
    """Further devices that the kubelet's API named while the record was missing. The record was lost before it was read
    with them, so that no start of the kubelet shows that they vanish."""


class RecordReading(msgspec.Struct, frozen=True):
    """One reading of the record."""

    boot_id: BootId | None
    devices: tuple[RecordedDevice, ...] | None
    """None: the record does not exist."""
    kubelet_before: str
    """The kubelet that ran before the record was read: it, or one that ran before it, has written the record."""
    kubelet_after: str
    pods: frozenset[PodUid] | None
    """The pods that have a folder in the kubelet's folder; None where that is not visible."""

    def has_ended(self, pod: PodUid) -> bool:
        """Return whether a pod has ended for sure."""
        return self.pods is not None and pod not in self.pods and _UID.fullmatch(pod) is not None


class PodRequests(msgspec.Struct, frozen=True):
    """The requests of a pod of this node, by the API server."""

    uid: PodUid
    """The name of its folder: for a mirror pod that of the static pod."""
    name: str
    has_ended: bool
    resources: frozenset[tuple[str, ResourceName]] = frozenset()
    """The extended resources of each container, init containers too."""
    has_claims: bool = False


def observe(history: RecordHistory, reading: RecordReading) -> RecordHistory:
    """Return the history after a reading."""
    if None not in {history.boot_id, reading.boot_id} and history.boot_id != reading.boot_id:
        history = RecordHistory()
    history = replace(history, boot_id=reading.boot_id or history.boot_id)
    if reading.devices is None:
        return _settled(_missing(history, reading))
    return _settled(_read(history, reading, reading.devices))


def name(history: RecordHistory, kubelet: str, named: Iterable[NamedDevice]) -> RecordHistory:
    """Return the history after an answer of the kubelet's API while the record is missing.

    Only the kubelet that ran before the loss has all allocations in its memory.
    """
    doubt = history.doubt
    if not history.is_missing or doubt is None or not doubt.kubelet or doubt.kubelet != kubelet:
        return history
    known = {device.key for device in (*history.devices, *history.lost)}
    return replace(history, named=tuple(device for device in named if device.key not in known))


def _settled(history: RecordHistory) -> RecordHistory:
    """Return a history without the devices that were named in a doubt that has ended."""
    return replace(history, named=()) if history.named and history.doubt is None else history


def _missing(history: RecordHistory, reading: RecordReading) -> RecordHistory:
    history, before = replace(history, is_missing=True), history.doubt
    if not history.is_seen and history.is_absence_known:
        return history
    # A pod in doubt that has ended has no folder any more, so the present pods are all of them.
    pods = before.pods if before is not None and reading.pods is None else _sorted(reading.pods)
    if pods == ():
        return _without_devices(history)
    if not history.is_seen:
        return replace(history, doubt=Doubt(before.seen if before is not None else NEVER_WRITTEN, pods))
    lost = _still_running((*history.lost, *history.devices), reading)
    whole = history.kubelet if before is None else before.kubelet
    return replace(history, lost=lost, doubt=Doubt(MISSING, pods, whole))


def _read(history: RecordHistory, reading: RecordReading, devices: tuple[RecordedDevice, ...]) -> RecordHistory:
    doubt, lost = history.doubt, history.lost
    if doubt is not None and doubt.kubelet and doubt.kubelet == reading.kubelet_after:
        doubt, lost = None, ()
    if history.is_seen and history.kubelet != reading.kubelet_after:
        vanished = _still_running(set(history.devices) - set(devices), reading)
        if vanished:
            lost = (*lost, *vanished)
            pods = frozenset(device.pod for device in vanished)
            before = () if doubt is None else doubt.pods
            doubt = Doubt(RESTARTED, None if before is None else _sorted(pods.union(before)))
    lost = _still_running(set(lost) - set(devices), reading)
    keys = {device.key for device in devices}
    return replace(
        history,
        named=tuple(device for device in history.named if device.key not in keys),
        kubelet=reading.kubelet_before,
        is_seen=True,
        is_missing=False,
        devices=devices,
        lost=lost,
        doubt=_after_ends(doubt, reading),
    )


def _after_ends(doubt: Doubt | None, reading: RecordReading) -> Doubt | None:
    """Return a doubt without the pods that have ended; None if no pod is left."""
    if doubt is None or (doubt.pods is None and reading.pods is None):
        return doubt
    pods = _sorted(reading.pods) if doubt.pods is None else doubt.pods
    pods = tuple(pod for pod in pods or () if not reading.has_ended(pod))
    return replace(doubt, pods=pods) if pods else None


def _still_running(devices: Iterable[RecordedDevice], reading: RecordReading) -> tuple[RecordedDevice, ...]:
    running = {device for device in devices if not reading.has_ended(device.pod)}
    return tuple(sorted(running, key=lambda device: (device.pod, device.container, device.key)))


def _sorted(pods: frozenset[PodUid] | None) -> tuple[PodUid, ...] | None:
    return None if pods is None else tuple(sorted(pods))


def ask(history: RecordHistory, pods: Sequence[PodRequests], claims: frozenset[PodUid]) -> RecordHistory:
    """Return the history after the API server's answer to a doubt; `claims` are the pods with recorded claims.

    The record is complete if it has an entry for each resource of each container of the node's pods, and if the API
    server knows all pods in doubt. While the record is missing, no pod may request a resource.
    """
    doubt = history.doubt
    if doubt is None:
        return history
    ended = {pod.uid for pod in pods if pod.has_ended}
    lost = tuple(device for device in history.lost if device.pod not in ended)
    running = {pod.name for pod in pods if not pod.has_ended}
    named = tuple(device for device in history.named if f"{device.namespace}/{device.pod}" in running)
    history = replace(history, lost=lost, named=named)
    listed = () if history.is_missing else (*history.devices, *lost)
    entries = {(device.pod, device.container, device.resource) for device in listed}
    missing = [pod for pod in pods if not pod.has_ended and _lacks(entries, claims, pod)]
    known = {pod.uid for pod in pods}
    unknown = [pod for pod in doubt.pods or () if pod not in known]
    if missing or unknown:
        names = [*(f"pod {pod.name}" for pod in missing), *(f"pod {uid}" for uid in unknown)]
        found = f"{doubt.seen.partition(';')[0]}; it has not all devices of {', '.join(names)}"
        return replace(history, doubt=replace(doubt, seen=found))
    if not history.is_missing:
        return _settled(replace(history, doubt=None))
    return _without_devices(history)


def _without_devices(history: RecordHistory) -> RecordHistory:
    """Return the history once no pod can have a device while there is no record: as before the first one."""
    return replace(history, is_seen=False, is_absence_known=True, devices=(), lost=(), named=(), doubt=None)


def _lacks(entries: set[tuple[PodUid, str, ResourceName]], claims: frozenset[PodUid], pod: PodRequests) -> bool:
    resources = any((pod.uid, container, resource) not in entries for container, resource in pod.resources)
    return resources or (pod.has_claims and pod.uid not in claims)
