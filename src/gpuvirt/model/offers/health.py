"""Whether an offered device can be used: what speaks against it, how long it must stand, how long it must be gone.

Symptoms are what one look at the host shows. They are judged over time, since some pass: a device that a virtual
machine resets answers 0xffff for a moment, and a group is not viable while its functions change drivers in turn.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName
from gpuvirt.facts.pci import HARMLESS_ATTRIBUTES, PciFunction, Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model.allocation.holds import Holds
from gpuvirt.model.allocation.ledger import Former
from gpuvirt.model.devices.candidates import Candidate
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import spoilers
from gpuvirt.model.offers.resets import is_reset, why_withheld
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, refusals, unhealthy

Key = tuple[ResourceName, DeviceId]


@dataclass(frozen=True, slots=True)
class Health:
    """What speaks against a device; nothing does when it is healthy."""

    against: tuple[Reason, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether a virtual machine could use the device."""
        return not self.against


HEALTHY = Health()


@dataclass(frozen=True, slots=True)
class Debounce:
    """How long a symptom stands before it counts, and is gone before it no longer does, in seconds."""

    raise_after_s: float = 0.0
    clear_after_s: float = 0.0


DEBOUNCE: Mapping[ReasonCode, Debounce] = {
    ReasonCode.NODE_MISSING: Debounce(0.0, 0.0),
    ReasonCode.GROUP_NOT_VIABLE: Debounce(1.0, 0.5),
    ReasonCode.FELL_OFF_BUS: Debounce(1.5, 1.0),
    ReasonCode.UNREAD: Debounce(1.0, 0.0),
    ReasonCode.IN_USE_ELSEWHERE: Debounce(10.0, 0.0),
}
"""For the symptoms below; any other reason counts at once and is gone at once.

A reset takes up to a second (PCIe 6.6.2 allows 1 s after a conventional reset), a bind of a group's functions a few
tenths; a pod's end shows in the kubelet's account up to some seconds before its process has let go.
"""


@dataclass(frozen=True, slots=True)
class Trace:
    """One symptom of one device, over time."""

    reason: Reason
    standing: bool
    """Whether the last look showed it."""
    since_s: float
    """Since when that is so."""
    counts: bool
    """Whether it speaks against the device."""


Traces = Mapping[ReasonCode, Trace]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What health says now; it is handed back at the next look, as what was known before."""

    traces: Mapping[Key, Traces] = field(default_factory=dict)
    again_in_s: float | None = None
    """When to look again though nothing else happens: a symptom will have stood, or been gone, for long enough."""

    def health(self, key: Key) -> Health:
        """Return what speaks against a device."""
        return Health(tuple(trace.reason for trace in self.traces.get(key, {}).values() if trace.counts))


def judge(before: Verdict, symptoms: Mapping[Key, tuple[Reason, ...]], now_s: float) -> Verdict:
    """Return the verdict on the devices of `symptoms`, given what was known of them before."""
    traces = {key: _follow(before.traces.get(key), reasons, now_s) for key, reasons in symptoms.items()}
    return Verdict(traces, min(_waits(traces.values(), now_s), default=None))


def _follow(before: Traces | None, reasons: Iterable[Reason], now_s: float) -> Traces:
    shown = {reason.code: reason for reason in reasons}
    traces: dict[ReasonCode, Trace] = {}
    for code, reason in shown.items():
        past = before.get(code) if before is not None else None
        since_s = past.since_s if past is not None and past.standing else now_s
        stood = now_s - since_s >= DEBOUNCE.get(code, Debounce()).raise_after_s
        # A device that was never seen without its symptom has not come down with it just now.
        traces[code] = Trace(reason, True, since_s, before is None or (past is not None and past.counts) or stood)
    for code, past in (before or {}).items():
        if code not in shown and past.counts:
            since_s = now_s if past.standing else past.since_s
            if now_s - since_s < DEBOUNCE.get(code, Debounce()).clear_after_s:
                traces[code] = Trace(past.reason, False, since_s, True)
    return traces


def _waits(all_traces: Iterable[Traces], now_s: float) -> Iterator[float]:
    for traces in all_traces:
        for code, trace in traces.items():
            if trace.standing != trace.counts:
                debounce = DEBOUNCE.get(code, Debounce())
                wait_s = debounce.raise_after_s if trace.standing else debounce.clear_after_s
                yield max(trace.since_s + wait_s - now_s, 0.0)


def symptoms(
    inventory: Inventory, holds: Holds, candidate: Candidate, former: Former, *, allocations_known: bool
) -> Iterator[Reason]:
    """Yield what one look at the host shows against a device; `former` are the last pods that had functions."""
    facts, carrier = inventory.facts, inventory.facts.functions.get(candidate.carrier)
    if carrier is not None:
        yield from _of_function(carrier, candidate.id)
    gpu = facts.functions.get(candidate.target.gpu)
    if gpu is not None and gpu is not carrier:
        yield from _of_function(gpu, candidate.id)
    if carrier is not None and candidate.target not in holds.by_target:
        yield from _of_reset(inventory, candidate, carrier, former)
    if candidate.group is None:
        return
    missing = next(_missing_nodes(inventory, candidate.group), None)
    if missing is not None and not _opens_by_cdev(inventory, candidate):
        yield unhealthy.node_missing(candidate.id, missing)
    if unread := next(_unread_drivers(inventory, candidate), None):
        yield refusals.unread(candidate.id, unread)
    if spoiling := spoilers(facts.functions, _others(inventory, candidate)):
        yield unhealthy.group_not_viable(
            candidate.id, candidate.group, [(function.address, str(function.driver)) for function in spoiling]
        )
    if allocations_known and candidate.group not in holds.by_group:
        yield from _of_users(facts, candidate.id, candidate.group)


def _of_users(facts: Facts, subject: str, group: IommuGroup) -> Iterator[Reason]:
    """Yield who has a group open of which no pod has anything."""
    users, said = (facts.users or {}).get(group, ()), facts.busy_groups.get(group)
    if users or said is not None:
        yield unhealthy.in_use_elsewhere(subject, users, *((Seen("", said),) if said else ()))


def _of_function(function: PciFunction, subject: str) -> Iterator[Reason]:
    if function.fell_off_bus:
        yield refusals.fell_off_bus(subject, function.address)
    matters = (found for found in function.unread if found.path.rpartition("/")[2] not in HARMLESS_ATTRIBUTES)
    unread = next(matters, None) if function.unread else None
    if unread is not None:
        yield refusals.unread(subject, unread)


def _of_reset(inventory: Inventory, candidate: Candidate, function: PciFunction, former: Former) -> Iterator[Reason]:
    tenant = former.get(function.address) if candidate.target.vgpu is None else None
    if tenant is not None and is_reset(inventory.facts.functions, function.address, function.reset) is False:
        yield why_withheld(function.address, tenant.allocated_to)


def _missing_nodes(inventory: Inventory, group: IommuGroup) -> Iterator[str]:
    """Yield what is missing to open a group: its own node, and VFIO's container that it is put into."""
    if group not in inventory.facts.group_nodes:
        yield f"/dev/vfio/{group}"
    if not inventory.facts.platform.vfio_container:
        yield "/dev/vfio/vfio"


def _opens_by_cdev(inventory: Inventory, candidate: Candidate) -> bool:
    carrier = inventory.facts.functions.get(candidate.carrier)
    return (
        candidate.framework is not Framework.MDEV
        and inventory.facts.platform.iommufd
        and carrier is not None
        and any(name in inventory.facts.cdev_nodes for name in carrier.cdevs)
    )


def _unread_drivers(inventory: Inventory, candidate: Candidate) -> Iterator[Unread]:
    """Yield what can't be read of who has the other members: a driver, or a VFIO device that a VM is told."""
    for address in _others(inventory, candidate):
        function = inventory.facts.functions[address]
        if isinstance(function.driver, Unread):
            yield function.driver
        if inventory.facts.platform.iommufd:
            yield from (found for found in function.unread if found.path.endswith("/vfio-dev"))


def _others(inventory: Inventory, candidate: Candidate) -> Iterator[PciAddress]:
    """Yield the members of a candidate's group that are not itself: a VF that carries a vGPU stays on nvidia."""
    members = inventory.groups.get(candidate.group, ()) if candidate.group is not None else ()
    return (address for address in members if address != candidate.carrier)
