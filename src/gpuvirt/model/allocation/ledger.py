"""The ledger: which device is allocated to which pod, by the agent's own record and by the kubelet's reports.

The agent makes an entry when the kubelet requests a device. The request does not name the pod: a later report of the
kubelet confirms the entry and names the pod. An entry ends when two reports in a row do not have the device, of those
that must have it if it is allocated.

A new entry ends by evidence, never by its age: the kubelet waits for other plugins without a deadline before it records
a container (pkg/kubelet/cm/devicemanager/manager.go of Kubernetes 1.36). Its admission is settled when the kubelet has
written its record again after the answer, when it calls PreStartContainer for the device, when it requests more of the
same resource, when the call was cancelled, and when another kubelet runs.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from math import inf
from operator import is_
from typing import NewType

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from gpuvirt.facts.ids import BootId, DeviceId, IommuGroup, PciAddress, PodUid, ResourceName, VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.model.allocation.claims import DRIVER, Claim
from gpuvirt.model.allocation.launcherpods import vm_of
from gpuvirt.model.allocation.ondemandids import is_on_demand_id, vgpus_in
from gpuvirt.model.allocation.pluginanswers import PluginAnswer, vfio_ids
from gpuvirt.model.allocation.podallocations import Allocation, ResourceRules, is_number
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.inventory.naming import TypeNames
from gpuvirt.model.reasons import Reason
from gpuvirt.model.reasons.refusals import BEING_ADMITTED

Known = Mapping[DeviceId, tuple[Target, IommuGroup | None]]
"""The devices of a host and their groups, by the ids that the kubelet may have for them; None is an unknown group."""

SettledAt = NewType("SettledAt", float)
"""A time, by the host's monotonic clock, at which evidence shows that the admissions of before are over.

Only the modules that have such evidence make one (`tools/check_proofs.py`): no age of an allocation is one.
"""
UNSETTLED = SettledAt(-inf)
"""No evidence yet."""

MISSES_TO_END = 2


@dataclass(frozen=True, slots=True)
class Consumer:
    """A container of a pod, as far as it is known: the checkpoint has UIDs, the pod-resources API has names."""

    pod_uid: PodUid | None = None
    namespace: str | None = None
    pod: str | None = None
    container: str | None = None
    answer: PluginAnswer | UnsetType = field(default=UNSET, compare=False, repr=False)
    """The device plugin's answer for the container's devices; unset where it was not read, and in the ledger. It does
    not count in comparisons."""

    @property
    def in_ledger(self) -> "Consumer":
        """The container without the answer, which the kubelet's checkpoint keeps."""
        return self if self.answer is UNSET else dataclasses.replace(self, answer=UNSET)

    def with_uid_of(self, other: "Consumer") -> "Consumer":
        """Return the container with the UID of its pod from elsewhere, if it has none."""
        adds = self.pod_uid is None and other.pod_uid is not None
        return dataclasses.replace(self, pod_uid=other.pod_uid) if adds else self

    @property
    def text(self) -> str:
        """The pod as text."""
        return f"pod {self.namespace}/{self.pod}" if self.pod else f"pod {self.pod_uid}"

    @property
    def vm(self) -> str | None:
        """The KubeVirt VM that runs in the pod, as `namespace/name`; None for other pods."""
        return vm_of(self.namespace, self.pod) if self.pod is not None else None

    def same_pod(self, other: "Consumer") -> bool:
        """Return whether both are containers of one pod."""
        if self.pod_uid is not None and other.pod_uid is not None:
            return self.pod_uid == other.pod_uid
        return self.pod is not None and (self.namespace, self.pod) == (other.namespace, other.pod)


OfSeveral = Mapping[tuple[ResourceName, DeviceId], PodUid]
"""The devices of pods several of whose containers have devices, with their pods."""

Counted = frozenset[tuple[ResourceName, DeviceId]] | Unread
"""The devices that the kubelet counts as allocatable; Unread if it may count any: it runs, and does not say so."""


class KubeletAccount(msgspec.Struct, frozen=True):
    """The kubelet's account: the devices that it reports as allocated."""

    at: datetime
    """When it was asked for, by the wall clock: for displays and files."""
    at_s: float
    """The same by the host's monotonic clock, for decisions."""
    devices: Mapping[tuple[ResourceName, DeviceId], Consumer]
    counted: Counted = frozenset()
    """The healthy devices that the kubelet counts as allocatable."""
    registered: Mapping[ResourceName, frozenset[DeviceId]] = msgspec.field(default_factory=dict)
    """The healthy devices of each resource that a plugin has registered, by the kubelet's checkpoint."""
    recorded: bool = True
    """Whether the kubelet's checkpoint was read. Without it the devices of init containers are unknown, and no entry
    ends."""
    partial: Reason | None = None
    """Why the account may be incomplete; None if it is complete."""
    of_several: OfSeveral | None = msgspec.field(default_factory=dict)
    """By the checkpoint; None if it was not read."""
    admitting: frozenset[tuple[ResourceName, DeviceId]] = frozenset()
    """The devices of recorded pods that the kubelet may be admitting: they have had no folder yet."""
    settled_s: SettledAt = UNSETTLED
    """An answer to Allocate from before this time, by the host's monotonic clock, is in this account, or the kubelet
    does not have it any more."""

    @property
    def surely_counted(self) -> frozenset[tuple[ResourceName, DeviceId]]:
        """The devices that the kubelet counts for sure; it may count more while its answer is missing."""
        return frozenset() if isinstance(self.counted, Unread) else self.counted  # unknown: see the name


class Stage(StrEnum):
    """How far a vGPU is that is created for an allocation."""

    INTENDED = "intended"
    """It is being created, or its creation was interrupted."""
    CREATED = "created"
    """It exists, and no container has started with it: it has had no tenant."""
    STARTED = "started"
    """A container was about to start with it, so that no other pod gets it."""


class Entry(msgspec.Struct, frozen=True):
    """One allocated device."""

    resource: ResourceName
    device: DeviceId
    target: Target
    group: IommuGroup | None
    allocation: str
    """The id of the allocation, which all devices of one answer share."""
    since: datetime
    """When it was allocated, by the wall clock: for people. No decision uses it."""
    consumer: Consumer | None = None
    misses: int = 0
    earlier_boot: bool = False
    """Whether the host has rebooted since, and the kubelet has not reported a pod with the device after that."""
    allocated_s: float | None = None
    """When it was allocated, by the host's monotonic clock of that boot; None if this version did not allocate it."""
    stage: Stage | UnsetType = UNSET
    """How far an on-demand vGPU is; unset for other devices."""
    answered_group: IommuGroup | UnsetType | None = UNSET
    """The group at the answer to Allocate, None if it is unknown; unset while the host has not rebooted since. The
    kubelet has recorded its node, and starts the container with that, whatever the device's group is by then."""
    settled_s: SettledAt | UnsetType = UNSET
    """When evidence beside the accounts has settled the admission, by the same clock: accounts of a later time must
    have the device if it is allocated. Unset without such evidence."""
    recorded_for: frozenset[PodUid] | UnsetType = UNSET
    """The pods in the kubelet's record just before the answer. They may have ended: they are no evidence."""

    @property
    def intended(self) -> bool:
        """Whether the vGPU is being created for the allocation, or its creation was interrupted."""
        return self.stage is Stage.INTENDED

    @property
    def allocated_to(self) -> str:
        """The pod as text."""
        return self.consumer.text if self.consumer else f"{BEING_ADMITTED} since {self.since:%H:%M:%S} UTC"

    @property
    def is_unsettled(self) -> bool:
        """Whether the kubelet may be admitting a container with the device, which its accounts need not show yet."""
        is_new = self.consumer is None and self.allocated_s is not None and not self.earlier_boot
        return is_new and self.settled_s is UNSET

    def may_be_unrecorded(self, account: KubeletAccount) -> bool:
        """Return whether an account may lack the device although it is allocated."""
        if self.allocated_s is None or self.earlier_boot:
            return False
        if self.consumer is not None:
            return account.at_s < self.allocated_s
        if self.resource == DRIVER:  # the evidence is of admissions, and claims are prepared after these
            return True
        settled_s = self.settled_s if isinstance(self.settled_s, float) else inf
        return self.allocated_s >= account.settled_s and account.at_s < settled_s

    def together_with(self, other: "Entry") -> bool:
        """Return whether both devices are allocated to the same pod."""
        if self.allocation == other.allocation:
            return True
        return self.consumer is not None and other.consumer is not None and self.consumer.same_pod(other.consumer)


class Ledger(msgspec.Struct, frozen=True):
    """The ledger, as it is kept on disk."""

    entries: tuple[Entry, ...] = ()
    first_names: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The name under which each PCI id was first offered."""
    resources: tuple[ResourceName, ...] = ()
    """All resources that gpuvirt ever offered on this node, so that it knows its own allocations."""
    type_names: Mapping[str, VgpuType] = msgspec.field(default_factory=dict)
    """The names of vGPU types, by the host's ids of them."""
    boot_id: BootId | None = None
    """The boot in which the entries' groups were observed; the next boot may number groups differently."""
    resources_without_gpus: tuple[str, ...] | UnsetType = UNSET
    """The resources of other device plugins that are no GPUs by the agent's settings, for commands."""
    tenancies_of: BootId | UnsetType = UNSET
    """The boot of which `tenancy.json` has the tenants; unset while that file could not be written."""
    type_names_of: str | UnsetType = UNSET
    """The version of the driver that has these `type_names`; not set if an older version has written the ledger."""
    claims: tuple[Claim, ...] | UnsetType = UNSET
    """The claims that have, or wait for, GPUs of this node; unset for none."""
    published: tuple[PciAddress, ...] | UnsetType = UNSET
    """The GPUs of which a ResourceSlice may have a device, so that no device plugin offers them; unset for none."""

    @property
    def names(self) -> TypeNames:
        """The names of vGPU types; none if it is unknown which version of the driver has these ids."""
        known = self.type_names_of
        return TypeNames(known, self.type_names) if isinstance(known, str) else TypeNames()

    @property
    def rules(self) -> ResourceRules:
        """The rules for the ids of resources on the node."""
        known = self.resources_without_gpus
        return ResourceRules(frozenset(self.resources), known if isinstance(known, tuple) else ())


def allocations_of(devices: Mapping[tuple[ResourceName, DeviceId], Consumer]) -> Iterator[Allocation]:
    """Yield the allocations that the kubelet reports."""
    for (resource, device), consumer in devices.items():
        answer = consumer.answer if isinstance(consumer.answer, PluginAnswer) else None
        yield Allocation(resource, device, consumer.text, answer)


def timed(entries: tuple[Entry, ...], at_s: float) -> tuple[Entry, ...]:
    """Return the entries with a time for those of an older version that no pod has yet: they are as old as this
    process, which has read them."""
    if not any(entry.consumer is None and entry.allocated_s is None for entry in entries):
        return entries
    return tuple(
        replace(entry, allocated_s=at_s) if entry.consumer is None and entry.allocated_s is None else entry
        for entry in entries
    )


def settle(entries: Iterable[Entry], account: KubeletAccount | None) -> tuple[Entry, ...]:
    """Return the entries after a report of the kubelet. Without one (None) they do not change."""
    entries = tuple(entries)
    if account is None:
        return entries
    return _same_or(entries, tuple(after for entry in entries if (after := _after(entry, account)) is not None))


def _same_or(before: tuple[Entry, ...], after: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return the earlier entries if none has changed: what follows from them is known by their identity."""
    return before if len(before) == len(after) and all(map(is_, before, after)) else after


def adopt(
    entries: Iterable[Entry], account: KubeletAccount | None, known: Known, rules: ResourceRules
) -> tuple[Entry, ...]:
    """Return the entries with a new one for each allocated device of this host that has none yet.

    Devices under any resource name get one, so that pods from before gpuvirt's installation, and pods of a plugin that
    gpuvirt replaces, have an entry too. An id may stand for several devices, by the VFIO nodes in its plugin's answer.
    """
    entries = tuple(entries)
    if account is None:
        return entries
    ours = {(entry.resource, entry.device) for entry in entries}
    found = [
        Entry(
            resource=resource,
            device=device,
            target=target,
            group=group,
            allocation=f"kubelet:{consumer.pod_uid or ''}:{consumer.namespace}/{consumer.pod}/{consumer.container}",
            since=account.at,
            consumer=consumer.in_ledger,
            stage=Stage.STARTED if is_on_demand_id(device) else UNSET,
        )
        for (resource, device), consumer in account.devices.items()
        if (resource, device) not in ours
        for target, group in _devices_of(resource, device, consumer, known, rules)
    ]
    return (*entries, *found) if found else entries


def _devices_of(
    resource: ResourceName, device: DeviceId, consumer: Consumer, known: Known, rules: ResourceRules
) -> Iterable[tuple[Target, IommuGroup | None]]:
    """Return the devices that a VM gets by an id, with their groups."""
    answer = consumer.answer if isinstance(consumer.answer, PluginAnswer) else None
    if is_on_demand_id(device):
        named = vgpus_in(answer) if answer is not None else ()
        return dict(known[found] for found in named if found in known).items()
    ids = [] if is_number(device) and not rules.is_group_number(resource, device, answer) else [device]
    if answer is not None and resource not in rules.ours:
        ids += vfio_ids(answer)
    return dict(known[found] for found in ids if found in known).items()


def locate(entries: Iterable[Entry], known: Known, *, same_boot: bool) -> tuple[Entry, ...]:
    """Return the entries with the present groups of their devices.

    A device that the host does not show keeps its last group in the same boot, and has none after a reboot.
    """
    entries = tuple(entries)
    return _same_or(entries, tuple(_located(entry, known, same_boot=same_boot) for entry in entries))


def _located(entry: Entry, known: Known, *, same_boot: bool) -> Entry:
    group, earlier_boot = _group_now(entry, known, same_boot=same_boot), entry.earlier_boot or not same_boot
    answered = entry.answered_group
    if not same_boot and answered is UNSET:
        answered = entry.group
    if group == entry.group and earlier_boot is entry.earlier_boot and answered is entry.answered_group:
        return entry
    return replace(entry, group=group, earlier_boot=earlier_boot, answered_group=answered)


def _group_now(entry: Entry, known: Known, *, same_boot: bool) -> IommuGroup | None:
    target, group = known.get(entry.target.id, (None, None))
    # A vGPU of vendor VFIO has the address of its VF, which the host shows without a vGPU, too.
    is_shown = target is not None and (target.vgpu is not None or entry.target.vgpu is None)
    if is_shown and group is not None:
        return group
    return entry.group if same_boot else None


def _seen(entry: Entry, consumer: Consumer) -> Entry:
    """Return an entry whose device the kubelet has reported for a container; the same object if that is no news."""
    found = consumer
    if entry.consumer is not None and entry.consumer != found and is_on_demand_id(entry.device):
        found = found.with_uid_of(entry.consumer)  # the next pod with the id has an entry of its own
    is_known = entry.consumer == found and entry.misses == 0
    if is_known and not (entry.earlier_boot or entry.intended):
        return entry
    stage = Stage.CREATED if entry.intended else entry.stage
    return replace(entry, consumer=found.in_ledger, misses=0, earlier_boot=False, stage=stage)


def _after(entry: Entry, account: KubeletAccount) -> Entry | None:
    consumer = account.devices.get((entry.resource, entry.device))
    may_be_unrecorded = entry.may_be_unrecorded(account)
    if consumer is not None and not (may_be_unrecorded and _is_former(entry, consumer)):
        return _seen(entry, consumer)
    if consumer is not None or not account.recorded or may_be_unrecorded:
        return entry
    missed = replace(entry, misses=entry.misses + 1)
    return missed if missed.misses < MISSES_TO_END else None


def _is_former(entry: Entry, consumer: Consumer) -> bool:
    """Return whether a container may be that of the pod that had the device before."""
    before = entry.recorded_for if isinstance(entry.recorded_for, frozenset) else ()
    return entry.consumer is None and consumer.pod_uid in before


def settle_admissions(
    entries: Iterable[Entry], at_s: SettledAt, resource: ResourceName, devices: AbstractSet[DeviceId] | None = None
) -> tuple[Entry, ...]:
    """Return the entries after evidence that admissions with a resource, or with these devices of it, are over."""
    entries = tuple(entries)
    settled = tuple(
        replace(entry, settled_s=at_s)
        if entry.is_unsettled and entry.resource == resource and (devices is None or entry.device in devices)
        else entry
        for entry in entries
    )
    return _same_or(entries, settled)


def record(entries: Iterable[Entry], given: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return the entries after an allocation. The new entry of a device replaces the one that it had."""
    given = tuple(given)
    renewed = {(entry.resource, entry.device) for entry in given}
    return (*(entry for entry in entries if (entry.resource, entry.device) not in renewed), *given)
