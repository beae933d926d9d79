"""The offers to the kubelet: each resource with its devices, their health, and why other devices are not offered.

Some symptoms pass: a device answers 0xffff for a moment while a VM resets it, and a group is not viable while its
functions change drivers in turn. A GPU that needs a reset between two tenants and can't be reset is withheld.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import TypeVar

import msgspec

from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName, slot_of
from gpuvirt.facts.pci import HARMLESS_ATTRIBUTES, PciFunction, Unread
from gpuvirt.facts.snapshot import Facts, OpenDeviceUser
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model.allocation.allocateddevices import AllocatedDevices
from gpuvirt.model.allocation.claims import DRIVER
from gpuvirt.model.allocation.tenancy import FormerTenants, TenantKind
from gpuvirt.model.devices.candidates import Candidate
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import group_blockers
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, notoffered, refusals
from gpuvirt.model.reasons.notoffered import OPENED_ELSEWHERE
from gpuvirt.model.reasons.reason import opened_by
from gpuvirt.model.reasons.refusals import named

Key = tuple[ResourceName, DeviceId]
_FOR_ITS_POD = frozenset({ReasonCode.AWAITED_AFTER_REBOOT, ReasonCode.LEAVES_AFTER_POD})
"""The reasons against all pods but the one that has the device: the kubelet would reject that one without it."""


class Health(msgspec.Struct, frozen=True):
    """The reasons against a device; one that is listed as healthy may have some that keep it from other pods alone."""

    against: tuple[Reason, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether the kubelet is told that a VM can use the device."""
        return all(reason.code in _FOR_ITS_POD for reason in self.against)


HEALTHY = Health()


class Debounce(msgspec.Struct, frozen=True):
    """How long a symptom must last before it counts, and be gone before it no longer counts, in seconds."""

    raise_after_s: float = 0.0
    clear_after_s: float = 0.0


DEBOUNCE: Mapping[ReasonCode, Debounce] = {
    ReasonCode.NODE_MISSING: Debounce(0.0, 0.0),
    ReasonCode.GROUP_NOT_VIABLE: Debounce(1.0, 0.5),
    ReasonCode.FELL_OFF_BUS: Debounce(1.5, 1.0),
    ReasonCode.UNREAD: Debounce(1.0, 0.0),
    ReasonCode.IN_USE_ELSEWHERE: Debounce(10.0, 0.0),
}
"""The debounced symptoms; any other reason counts at once, and is cleared at once.

A reset takes up to a second (PCIe 6.6.2 allows 1 s after a conventional reset), binding a group's functions a few
tenths of a second. The kubelet reports a pod's end up to some seconds before its process closes the device.
"""


class Trace(msgspec.Struct, frozen=True):
    """A symptom of a device over time."""

    reason: Reason
    standing: bool
    """Whether the last observation showed it."""
    since_s: float
    """The time since which `standing` has its value."""
    counts: bool
    """Whether it makes the device unhealthy."""


Traces = Mapping[ReasonCode, Trace]
NO_TRACES: Traces = {}
"""Those of most devices."""


class HealthVerdict(msgspec.Struct, frozen=True):
    """The health of all devices; it is an input of the next judgement."""

    traces: Mapping[Key, Traces] = msgspec.field(default_factory=dict)
    again_at_s: float | None = None
    """When to judge again even without a new event: a symptom will then have lasted, or been gone, long enough.

    By the clock of `now_s`: a duration, added to that clock again, may end just before a symptom has lasted.
    """

    def health(self, key: Key) -> Health:
        """Return the health of a device."""
        traces = self.traces.get(key)
        return Health(tuple(trace.reason for trace in traces.values() if trace.counts)) if traces else HEALTHY


def judge(before: HealthVerdict, symptoms: Mapping[Key, tuple[Reason, ...]], now_s: float) -> HealthVerdict:
    """Return the verdict on the devices of `symptoms`; `before` is the last verdict."""
    traces = {key: _follow(before.traces.get(key), reasons, now_s) for key, reasons in symptoms.items()}
    return HealthVerdict(traces, min(_due_s(traces.values()), default=None))


def _follow(before: Traces | None, reasons: Sequence[Reason], now_s: float) -> Traces:
    if not reasons and not before:
        return NO_TRACES
    shown = {reason.code: reason for reason in reasons}
    traces: dict[ReasonCode, Trace] = {}
    for code, reason in shown.items():
        past = before.get(code) if before is not None else None
        since_s = past.since_s if past is not None and past.standing else now_s
        stood = now_s >= since_s + DEBOUNCE.get(code, Debounce()).raise_after_s
        # A device that has had the symptom since its first observation is not debounced.
        traces[code] = Trace(reason, True, since_s, before is None or (past is not None and past.counts) or stood)
    for code, past in (before or {}).items():
        if code not in shown and past.counts:
            since_s = now_s if past.standing else past.since_s
            if now_s < since_s + DEBOUNCE.get(code, Debounce()).clear_after_s:
                traces[code] = Trace(past.reason, False, since_s, True)
    return traces


def _due_s(all_traces: Iterable[Traces]) -> Iterator[float]:
    for traces in all_traces:
        for code, trace in traces.items():
            if trace.standing != trace.counts:
                debounce = DEBOUNCE.get(code, Debounce())
                yield trace.since_s + (debounce.raise_after_s if trace.standing else debounce.clear_after_s)


def symptoms(
    inventory: Inventory,
    allocated_devices: AllocatedDevices,
    candidate: Candidate,
    former: FormerTenants,
    *,
    allocations_known: bool,
    grace_without_driver: bool,
) -> Iterator[Reason]:
    """Yield the symptoms that an inventory shows for a device; `former` are the last tenants of GPUs."""
    facts, carrier = inventory.facts, inventory.facts.functions.get(candidate.carrier)
    if carrier is not None and (carrier.fell_off_bus or carrier.unread):
        yield from function_symptoms(carrier, candidate.id)
    gpu = facts.functions.get(candidate.target.gpu)
    if gpu is not None and gpu is not carrier and (gpu.fell_off_bus or gpu.unread):
        yield from function_symptoms(gpu, candidate.id)
    if gpu is not None and candidate.target not in allocated_devices.by_target:
        yield from _against_next_pod(facts, candidate, gpu, former, grace_without_driver=grace_without_driver)
    if candidate.group is None:
        return
    missing = _missing_node(inventory, candidate.group)
    if missing is not None and not _opens_by_cdev(inventory, candidate):
        yield notoffered.node_missing(candidate.id, missing)
    if others := _other_members(inventory, candidate):
        yield from _group_symptoms(inventory, candidate, others)
    if allocations_known and candidate.group not in allocated_devices.by_group:
        yield from _user_symptoms(facts, candidate.id, candidate.group)


def _against_next_pod(
    facts: Facts, candidate: Candidate, gpu: PciFunction, former: FormerTenants, *, grace_without_driver: bool
) -> Iterator[Reason]:
    """Yield the symptoms that keep a device from its next pod only.

    A pod that has the device keeps it: a restarted kubelet would reject the pod if its device were unhealthy.
    """
    if gpu.bars_unassigned:
        yield refusals.bar_unassigned(candidate.id, gpu.address, gpu.bars_unassigned)
    is_whole = candidate.target.vgpu is None
    desired = TenantKind.VM if is_whole else TenantKind.NATIVE
    if (unreset := former.why_withheld(facts.functions, gpu.address, desired)) is not None:
        yield unreset
    if not is_whole:
        return
    if gpu.console is not None:
        yield notoffered.boot_console(candidate.id, gpu.address, gpu.console)
    if gpu.needs_grace_driver and gpu.driver == "vfio-pci" and not grace_without_driver:
        yield notoffered.grace_driver_missing(candidate.id, gpu.address, gpu.driver_name)


def _user_symptoms(facts: Facts, subject: str, group: IommuGroup) -> Iterator[Reason]:
    """Yield a reason where processes have a group open of which no device is allocated."""
    users, busy = (facts.users or {}).get(group, ()), facts.busy_groups.get(group)
    if users or busy is not None:
        yield _in_use_elsewhere(subject, users, *((Seen("", busy),) if busy else ()))


def function_symptoms(function: PciFunction, subject: str) -> Iterator[Reason]:
    """Yield the symptoms of a function itself, whatever uses it."""
    if function.fell_off_bus:
        yield refusals.fell_off_bus(subject, function.address)
    for unread in function.unread:
        if unread.path.rpartition("/")[2] not in HARMLESS_ATTRIBUTES:
            yield refusals.unread(subject, unread)
            return


def _missing_node(inventory: Inventory, group: IommuGroup) -> str | None:
    """Return a missing device node that opening a group needs: its own, or that of VFIO's container."""
    if group not in inventory.facts.group_nodes:
        return f"/dev/vfio/{group}"
    return None if inventory.facts.platform.vfio_container else "/dev/vfio/vfio"


def _opens_by_cdev(inventory: Inventory, candidate: Candidate) -> bool:
    carrier = inventory.facts.functions.get(candidate.carrier)
    return (
        candidate.framework is not Framework.MDEV
        and inventory.facts.platform.iommufd
        and carrier is not None
        and any(name in inventory.facts.cdev_nodes for name in carrier.cdevs)
    )


def _group_symptoms(inventory: Inventory, candidate: Candidate, others: Sequence[PciAddress]) -> Iterator[Reason]:
    """Yield the symptoms of the other members of a candidate's group."""
    if (unread := next(_unread_drivers(inventory, others), None)) is not None:
        yield refusals.unread(candidate.id, unread)
    if spoiling := group_blockers(inventory.facts.functions, others):
        slot = slot_of(candidate.target.gpu)  # a GPU is bound together with the other functions of its slot
        gpu = next((gpu for gpu in inventory.gpus if slot_of(gpu) == slot), candidate.target.gpu)
        is_whole = candidate.target.vgpu is None
        yield notoffered.group_not_viable(candidate.id, gpu, spoiling, is_whole=is_whole)


def _unread_drivers(inventory: Inventory, members: Iterable[PciAddress]) -> Iterator[Unread]:
    """Yield the unreadable values of a group's members: a driver, or a VFIO device whose name VMs get."""
    for address in members:
        function = inventory.facts.functions[address]
        if isinstance(function.driver, Unread):
            yield function.driver
        if inventory.facts.platform.iommufd:
            yield from (found for found in function.unread if found.path.endswith("/vfio-dev"))


def _other_members(inventory: Inventory, candidate: Candidate) -> list[PciAddress]:
    """Return the other members of a candidate's group; its own function is left out, as a vGPU's VF stays on nvidia."""
    members = inventory.groups.get(candidate.group) if candidate.group is not None else None
    return [] if members is None else [address for address in members if address != candidate.carrier]


def _in_use_elsewhere(device: str, users: Sequence[OpenDeviceUser], *seen: Seen) -> Reason:
    """A process that belongs to no pod has the device open."""
    user = named(users) or "a process that gpuvirt can't see"
    seen = seen or opened_by(users)
    message = f"is in use by {user}, which belongs to no pod of the kubelet"
    return Reason(ReasonCode.IN_USE_ELSEWHERE, device, message, seen, OPENED_ELSEWHERE)


T = TypeVar("T")


class OfferedDevice(msgspec.Struct, frozen=True):
    """A device of a resource."""

    candidate: Candidate
    health: Health = HEALTHY

    @property
    def id(self) -> DeviceId:
        """The id of the device in ListAndWatch."""
        return self.candidate.id


class Offer(msgspec.Struct, frozen=True):
    """A resource. It stays, with an empty list, when its last device goes: the kubelet counts unhealthy ids too."""

    resource: ResourceName
    devices: Mapping[DeviceId, OfferedDevice] = msgspec.field(default_factory=dict)


class Offers(msgspec.Struct, frozen=True):
    """All resources of a node, and why other devices are not offered."""

    by_resource: Mapping[ResourceName, Offer] = msgspec.field(default_factory=dict)
    withheld: Mapping[str, Reason] = msgspec.field(default_factory=dict)
    """Why a device is not offered, by the reason's subject: a PCI address or a vGPU's id."""
    verdict: HealthVerdict = msgspec.field(default_factory=HealthVerdict)
    other_names: Mapping[ResourceName, frozenset[str]] = msgspec.field(default_factory=dict)
    """The names from today's PCI ID database, where a resource was first offered under another name."""
    of_withheld_resources: Mapping[ResourceName, tuple[Candidate, ...]] = msgspec.field(default_factory=dict)
    """Devices that would be offered if their resource were not withheld."""
    for_claims: Offer = msgspec.field(default_factory=lambda: Offer(DRIVER))
    """The GPUs on a VFIO driver that claims (DRA) get."""

    @property
    def names(self) -> frozenset[ResourceName]:
        """All resources, offered or withheld."""
        return frozenset(self.by_resource.keys() | self.of_withheld_resources.keys())

    def of(self, resource: ResourceName) -> Offer | None:
        """Return the devices of a resource, or those for claims; None for a resource that is not offered."""
        return self.for_claims if resource == DRIVER else self.by_resource.get(resource)

    def device(self, key: Key) -> OfferedDevice | None:
        """Return an offered device, None if it is not offered."""
        offer = self.of(key[0])
        return offer.devices.get(key[1]) if offer is not None else None

    def is_same_as(self, other: "Offers") -> bool:
        """Return whether these are the same offers of the same devices, by their identity: a type does not count in
        comparisons of devices."""
        return (
            self.by_resource.keys() == other.by_resource.keys()
            and all(
                _are_same(offer.devices, other.by_resource[name].devices) for name, offer in self.by_resource.items()
            )
            and self.withheld == other.withheld
            and self.verdict == other.verdict
            and self.other_names == other.other_names
            and _are_same(self.for_claims.devices, other.for_claims.devices)
            and self.of_withheld_resources.keys() == other.of_withheld_resources.keys()
            and all(
                len(candidates) == len(other.of_withheld_resources[name])
                and all(map(is_, candidates, other.of_withheld_resources[name]))
                for name, candidates in self.of_withheld_resources.items()
            )
        )

    def devices(self) -> Iterator[tuple[ResourceName, OfferedDevice]]:
        """Yield every offered device with its resource."""
        for offer in self.by_resource.values():
            for device in offer.devices.values():
                yield offer.resource, device


def _are_same(now: Mapping[T, object], before: Mapping[T, object]) -> bool:
    return now.keys() == before.keys() and all(map(is_, now.values(), before.values()))


def first_names(offers: Offers, before: Mapping[str, str]) -> Mapping[str, str]:
    """Return the first names to record: the earlier ones, and the names of resources that are offered first now."""
    found: dict[str, str] = {}
    for _, device in offers.devices():
        named = device.candidate.named
        if named.key is not None and named.first is not None and named.key not in before:
            found.setdefault(named.key, named.first)
    return {**before, **found} if found else before
