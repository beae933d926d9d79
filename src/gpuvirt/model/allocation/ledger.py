"""What was handed to whom, by our own account and by the kubelet's, and how the two are brought together.

An entry is made when the kubelet asks for a device, before anybody knows for which pod. What the kubelet later says of
its pods confirms it and names the pod. It ends when the kubelet has said twice that no pod has the device; as long as
the kubelet is not heard, it stays.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from gpuvirt.facts.ids import BootId, DeviceId, IommuGroup, PciAddress, PodUid, ResourceName, VgpuType
from gpuvirt.model.allocation.podallocations import Allocation
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.reasons import Reason

Known = Mapping[DeviceId, tuple[Target, IommuGroup | None]]
"""What the devices of a host are, by the ids that a kubelet could know them by; a group of None is not known."""

UNCONFIRMED_FOR = timedelta(seconds=10)
"""How long a new entry waits for the kubelet to name its pod; admission takes well under a second."""

MISSES_TO_END = 2


_LAUNCHER = re.compile(r"virt-launcher-([^/ ]+)-[a-z0-9]{5}")


@dataclass(frozen=True, slots=True)
class Consumer:
    """A container of a pod, as far as it is known: the checkpoint knows UIDs, the pod-resources API names."""

    pod_uid: PodUid | None = None
    namespace: str | None = None
    pod: str | None = None
    container: str | None = None

    @property
    def text(self) -> str:
        """The pod in words."""
        return f"pod {self.namespace}/{self.pod}" if self.pod else f"pod {self.pod_uid}"

    @property
    def vm(self) -> str | None:
        """The KubeVirt VM that runs in the pod, as `namespace/name`; None for another pod.

        KubeVirt calls the pod `virt-launcher-NAME-xxxxx`, and cuts very long names.
        """
        found = _LAUNCHER.fullmatch(self.pod or "")
        return f"{self.namespace}/{found[1]}" if found is not None else None

    def same_pod(self, other: "Consumer") -> bool:
        """Return whether both are containers of one pod."""
        if self.pod_uid is not None and other.pod_uid is not None:
            return self.pod_uid == other.pod_uid
        return self.pod is not None and (self.namespace, self.pod) == (other.namespace, other.pod)


@dataclass(frozen=True, slots=True)
class KubeletAccount:
    """Which devices the kubelet says that pods have."""

    at: datetime
    devices: Mapping[tuple[ResourceName, DeviceId], Consumer]
    counted: frozenset[tuple[ResourceName, DeviceId]] = frozenset()
    """What it admits pods by: healthy devices of its lists, as far as it tells."""
    recorded: bool = True
    """Whether the kubelet's record was read: without it, what an init container has is not known, and no entry ends."""
    partial: Reason | None = None
    """Why this may not be all that pods have; None: it is."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One device in somebody's hands."""

    resource: ResourceName
    device: DeviceId
    target: Target
    group: IommuGroup | None
    allocation: str
    """What was given in one answer has the same."""
    since: datetime
    consumer: Consumer | None = None
    misses: int = 0
    earlier_boot: bool = False
    """The host has booted since, and the kubelet has named no pod since that has the device."""

    @property
    def allocated_to(self) -> str:
        """Who has it, in words."""
        return self.consumer.text if self.consumer else "a pod that is being admitted"

    def together_with(self, other: "Entry") -> bool:
        """Return whether both are in the same hands."""
        if self.allocation == other.allocation:
            return True
        return self.consumer is not None and other.consumer is not None and self.consumer.same_pod(other.consumer)


@dataclass(frozen=True, slots=True)
class FormerTenant:
    """Who had a whole function last."""

    consumer: Consumer | None
    """None where the kubelet never named the pod."""
    boot_id: BootId | None
    """The boot of the host in which the pod had it; a reboot resets the function."""

    @property
    def allocated_to(self) -> str:
        """The pod in words."""
        return self.consumer.text if self.consumer else "a pod that the kubelet did not name"


Former = Mapping[PciAddress, FormerTenant]
"""The last pods of whole functions that no pod has now."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What is kept on disk."""

    entries: tuple[Entry, ...] = ()
    first_names: Mapping[str, str] = field(default_factory=dict)
    """The name under which each PCI id was first offered."""
    resources: tuple[ResourceName, ...] = ()
    """Every resource that was ever offered on this node: what pods hold of these is ours to answer for."""
    type_names: Mapping[str, VgpuType] = field(default_factory=dict)
    """What vGPU types are called, by the host's ids of them."""
    boot_id: BootId | None = None
    """The boot of the host in which the entries' groups were seen; the next one numbers groups again."""
    former: Former = field(default_factory=dict)


def allocations_of(devices: Mapping[tuple[ResourceName, DeviceId], Consumer]) -> Iterator[Allocation]:
    """Yield what the kubelet says that pods have."""
    return (Allocation(resource, device, consumer.text) for (resource, device), consumer in devices.items())


def settle(entries: Iterable[Entry], account: KubeletAccount | None) -> tuple[Entry, ...]:
    """Return the entries after the kubelet was heard; with None, which is not having heard it, nothing changes."""
    entries = tuple(entries)
    if account is None:
        return entries
    return tuple(after for entry in entries if (after := _after(entry, account)) is not None)


def remember(former: Former, before: Iterable[Entry], after: Iterable[Entry], boot_id: BootId | None) -> Former:
    """Return the last pods of whole functions after entries have ended; an entry of an earlier boot is none's."""
    left = {entry.target for entry in after}
    ended = [entry for entry in before if entry.target not in left and entry.target.vgpu is None]
    new = {entry.target.gpu: FormerTenant(entry.consumer, boot_id) for entry in ended if not entry.earlier_boot}
    return {**former, **new} if new else former


def of_boot(former: Former, boot_id: BootId | None) -> Former:
    """Return the last pods of a boot; what is not known to be of another boot counts."""
    counts = {None, boot_id}
    same = {one: tenant for one, tenant in former.items() if boot_id is None or tenant.boot_id in counts}
    return former if len(same) == len(former) else same


def adopt(entries: Iterable[Entry], account: KubeletAccount | None, known: Known) -> tuple[Entry, ...]:
    """Return the entries with one for each device of this host that a pod has and that has none yet.

    A pod has a device under whatever resource's name, so that pods from before our time, and those of a plugin that we
    replace, get an entry too.
    """
    entries = tuple(entries)
    if account is None:
        return entries
    ours = {(entry.resource, entry.device) for entry in entries}
    found = [
        Entry(
            resource=resource,
            device=device,
            target=known[device][0],
            group=known[device][1],
            allocation=f"kubelet:{consumer.pod_uid or ''}:{consumer.namespace}/{consumer.pod}/{consumer.container}",
            since=account.at,
            consumer=consumer,
        )
        for (resource, device), consumer in account.devices.items()
        if device in known and (resource, device) not in ours
    ]
    return (*entries, *found) if found else entries


def locate(entries: Iterable[Entry], known: Known, *, same_boot: bool) -> tuple[Entry, ...]:
    """Return the entries with the groups that their devices are in now.

    Of a device that can't be seen, the group that it was in is the best there is; after a reboot it is worth nothing.
    """
    return tuple(
        replace(
            entry,
            group=_group_now(entry, known, same_boot=same_boot),
            earlier_boot=entry.earlier_boot or not same_boot,
        )
        for entry in entries
    )


def _group_now(entry: Entry, known: Known, *, same_boot: bool) -> IommuGroup | None:
    _, group = known.get(entry.device, (None, None))
    if group is not None:
        return group
    return entry.group if same_boot else None


def _after(entry: Entry, account: KubeletAccount) -> Entry | None:
    consumer = account.devices.get((entry.resource, entry.device))
    if consumer is not None:
        return replace(entry, consumer=consumer, misses=0, earlier_boot=False)
    if not account.recorded or account.at < entry.since + (UNCONFIRMED_FOR if entry.consumer is None else timedelta()):
        return entry
    missed = replace(entry, misses=entry.misses + 1)
    return missed if missed.misses < MISSES_TO_END else None


def record(entries: Iterable[Entry], given: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return the entries after an allocation; a device that was in somebody's hands has changed them."""
    given = tuple(given)
    renewed = {(entry.resource, entry.device) for entry in given}
    return (*(entry for entry in entries if (entry.resource, entry.device) not in renewed), *given)
