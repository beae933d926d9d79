"""Makes the offers to the kubelet: which devices are offered beside the allocated ones, and why others are not.

Devices of pods from before a reboot that are not there yet stay listed as healthy until they are. After a reboot the
kubelet admits pods again by its record. It refuses for good a pod whose device is unhealthy at that moment
(`devicesToAllocate` of its device manager), and starts a container only after PreStartContainer, which refuses until
the container's own devices are there.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, KeysView, Mapping
from operator import itemgetter

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName, VgpuId
from gpuvirt.model.allocation.allocateddevices import AllocatedDevices, find_allocated
from gpuvirt.model.allocation.claims import DRIVER
from gpuvirt.model.allocation.ledger import Entry, OfSeveral
from gpuvirt.model.allocation.recordhistory import may_be_rejected
from gpuvirt.model.allocation.tenancy import FormerTenants
from gpuvirt.model.change.plan import Scope
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.devices import candidates as possible
from gpuvirt.model.devices.candidates import Candidate, KnownVgpus
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.naming import Named, Naming
from gpuvirt.model.offers.allocationcheck import device_gone, why_changed
from gpuvirt.model.offers.offers import Health, HealthVerdict, Key, Offer, OfferedDevice, Offers, judge, symptoms
from gpuvirt.model.reasons import Reason, ReasonCode, notoffered, refusals

_NOT_MADE_AGAIN = frozenset({ReasonCode.DEVICE_GONE, ReasonCode.TYPE_CHANGED})
_IDLE = frozenset({ReasonCode.NATIVE_DRIVER, ReasonCode.NO_VGPUS})
"""The reasons against a GPU that is in no shape for VMs, which claims convert."""
_LEAVES = frozenset({ReasonCode.WITHDRAWN, ReasonCode.OFFERED_TO_CLAIMS})
_NOT_BOUND_AGAIN = frozenset({ReasonCode.DRIVER_CHANGED, ReasonCode.NO_DRIVER})


def awaited(entry: Entry, against: Reason) -> Reason:
    """Return that an allocated device is awaited after a reboot; `against`, the reason against it, where it is not.

    A vGPU is awaited until this boot has shown it. A whole GPU is awaited while it has another driver than a VM's,
    until the kubelet has reported its pod in this boot.
    """
    if entry.target.vgpu is not None:
        was_shown = entry.answered_group is UNSET or entry.group is not None
        return against if was_shown or against.code not in _NOT_MADE_AGAIN else notoffered.awaited(entry.device)
    if not entry.earlier_boot or against.code not in _NOT_BOUND_AGAIN:
        return against
    return notoffered.awaited(entry.device, *against.places, is_vgpu=False)


class OfferInputs(msgspec.Struct, frozen=True):
    """The inputs of offers, besides the inventory."""

    naming: Naming
    settings: Settings
    entries: tuple[Entry, ...]
    resources: frozenset[ResourceName]
    """The resources that gpuvirt has ever offered on this node."""
    allocations_known: bool
    now_s: float
    withdrawn: frozenset[PciAddress] = frozenset()
    """Functions that are being returned to the host."""
    undesired: frozenset[VgpuId] = frozenset()
    """vGPUs that are being removed."""
    withheld: Mapping[ResourceName, Reason] = msgspec.field(default_factory=dict)
    """Withheld resources; their allocated devices stay listed."""
    changing: Scope = msgspec.field(default_factory=Scope)
    """The devices that running changes may touch."""
    blocked: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The functions of slots in which the kernel still blocks a step of an ended process, with that step."""
    former: FormerTenants = msgspec.field(default_factory=FormerTenants)
    """The last tenants of GPUs in this boot."""
    on_demand: Mapping[VgpuId, Reason] = msgspec.field(default_factory=dict)
    """The vGPUs that are not offered under their own ids because of mode on-demand, with the reasons."""
    of_several: OfSeveral | None = None
    """The devices of pods several of whose containers have devices; None if they are unknown."""
    claimed: frozenset[PciAddress] = frozenset()
    """Functions of GPUs that claims get."""


Candidates = tuple[Candidate | Reason, ...]


def candidates_of(
    inventory: Inventory, naming: Naming, settings: Settings, known: KnownVgpus | None = None
) -> Candidates:
    """Return the devices that can be offered, and the reasons against the others; `known` vGPUs are taken over."""
    return (*possible.passthrough(inventory, naming, settings), *possible.vgpus(inventory, naming, known))


def make_offers(
    inventory: Inventory, inputs: OfferInputs, before: Offers, candidates: Candidates | None = None
) -> Offers:
    """Return the offers; `before` are the last ones, which are returned where nothing has changed.

    `candidates` are those of the inventory and the inputs; None: they are not known yet.

    A device that can't be read any more stays, unhealthy. A device that is allocated to a pod stays listed in any case:
    the kubelet does not restart a container whose devices are no longer listed.
    """
    allocated = find_allocated(inputs.entries, inputs.resources)
    if candidates is None:
        candidates = candidates_of(inventory, inputs.naming, inputs.settings)
    sorted_out = _sort_out(inventory, inputs, allocated, candidates, before)
    withheld, by_key = sorted_out.withheld, {_key(candidate): candidate for candidate in sorted_out.free}
    of_claims = _for_claims(inventory, inputs, allocated, candidates, before.for_claims.devices)
    for_claims = {_key(candidate): candidate for candidate in of_claims}
    kept = {
        candidate: reason
        for candidate, reason in _kept(inventory, inputs, before, allocated, by_key.keys(), withheld)
        if candidate.named.resource not in inputs.withheld or candidate.target in allocated.by_target
    }
    kept_ids = {str(candidate.id) for candidate in kept}
    seen = {
        key: tuple(
            symptoms(
                inventory,
                allocated,
                device,
                inputs.former,
                allocations_known=inputs.allocations_known,
                grace_without_driver=inputs.settings.grace_without_driver,
            )
        )
        for key, device in (by_key | for_claims).items()
    } | {_key(candidate): (reason,) for candidate, reason in kept.items()}
    verdict = judge(before.verdict, seen, inputs.now_s)
    offers = Offers(
        by_resource=_by_resource(by_key | {_key(candidate): candidate for candidate in kept}, verdict, before),
        withheld={subject: reason for subject, reason in withheld.items() if subject not in kept_ids},
        verdict=verdict,
        other_names=_other_names(sorted_out.free),
        of_withheld_resources=sorted_out.of_withheld_resources,
        for_claims=Offer(DRIVER, _listed(for_claims, verdict, before)),
    )
    return before if offers.is_same_as(before) else offers


class _SortedOut(msgspec.Struct, frozen=True):
    """The candidates, by whether they are offered."""

    free: tuple[Candidate, ...]
    withheld: Mapping[str, Reason]
    of_withheld_resources: Mapping[ResourceName, tuple[Candidate, ...]]
    """The devices of resources that are not offered now."""


def _sort_out(
    inventory: Inventory, inputs: OfferInputs, allocated: AllocatedDevices, candidates: Candidates, before: Offers
) -> _SortedOut:
    """Return which candidates are offered, and why the others are not."""
    free: list[Candidate] = []
    withheld: dict[str, Reason] = {}
    of_withheld_resources: defaultdict[ResourceName, list[Candidate]] = defaultdict(list)
    for found in candidates:
        if isinstance(found, Reason) and found.code in _IDLE and found.subject in inputs.claimed:
            withheld[found.subject] = notoffered.for_claims(found.subject)
            continue
        if not isinstance(found, Reason) and (vgpu := found.target.vgpu) is not None and vgpu in inputs.on_demand:
            withheld[found.id] = inputs.on_demand[vgpu]
            continue
        offerable = found if isinstance(found, Reason) else _offerable(inventory, inputs, allocated, found)
        if isinstance(offerable, Reason):
            withheld[offerable.subject] = offerable
        elif (why := _why_withheld(inputs, allocated, offerable)) is not None:
            withheld[offerable.id] = why
            of_withheld_resources[offerable.named.resource].append(offerable)
        else:
            free.append(offerable)
    for candidate in _of_another_kind(free, before):
        free.remove(candidate)
        withheld[candidate.id] = _name_taken(candidate)
    resources = {resource: tuple(found) for resource, found in sorted(of_withheld_resources.items())}
    return _SortedOut(tuple(free), withheld, resources)


def _for_claims(
    inventory: Inventory,
    inputs: OfferInputs,
    allocated: AllocatedDevices,
    candidates: Candidates,
    before: Mapping[DeviceId, OfferedDevice],
) -> Iterator[Candidate]:
    """Yield the GPUs on a VFIO driver that claims get, of which no change is under way."""
    for found in candidates if inputs.claimed else ():
        if not isinstance(found, Reason) and found.carrier in inputs.claimed and found.carrier in inventory.gpus:
            candidate, known = replace(found, named=Named(DRIVER)), before.get(found.id)
            if known is not None and known.candidate == candidate:
                candidate = known.candidate  # its identity tells that nothing has changed
            if _why_not_now(inventory, inputs, candidate, held=candidate.target in allocated.by_target) is None:
                yield candidate


def _listed(
    listed: Mapping[Key, Candidate], verdict: HealthVerdict, before: Offers
) -> Mapping[DeviceId, OfferedDevice]:
    return {
        key[1]: _offered(candidate, verdict.health(key), before.device(key))
        for key, candidate in sorted(listed.items(), key=itemgetter(0))
    }


def _by_resource(
    listed: Mapping[Key, Candidate], verdict: HealthVerdict, before: Offers
) -> Mapping[ResourceName, Offer]:
    """Return the offered devices by resource; a resource that was offered before stays, if only as an empty list."""
    devices: defaultdict[ResourceName, dict[DeviceId, OfferedDevice]] = defaultdict(dict)
    for resource in before.by_resource:
        devices[resource] = {}
    for key in sorted(listed, key=itemgetter(1)):
        resource, device = key
        devices[resource][device] = _offered(listed[key], verdict.health(key), before.device(key))
    return {resource: Offer(resource, devices[resource]) for resource in sorted(devices)}


def _offered(candidate: Candidate, health: Health, before: OfferedDevice | None) -> OfferedDevice:
    """Return an offered device, the object from before if it has not changed: that tells others in a moment."""
    if before is not None and before.candidate is candidate and before.health == health:
        return before
    return OfferedDevice(candidate, health)


def _offerable(
    inventory: Inventory, inputs: OfferInputs, allocated_devices: AllocatedDevices, candidate: Candidate
) -> Candidate | Reason:
    """Return the device to offer beside the allocated ones, or the reason not to offer it."""
    if candidate.target.gpu in inputs.claimed:
        return notoffered.for_claims(candidate.id)
    if candidate.carrier in inputs.withdrawn and candidate.framework is None:
        return notoffered.withdrawn(candidate.carrier)
    if candidate.target.vgpu in inputs.undesired:
        return notoffered.withdrawn(candidate.id, is_vgpu=True)
    held = candidate.target in allocated_devices.by_target
    return _why_not_now(inventory, inputs, candidate, held=held) or allocated_devices.as_allocated(candidate)


def _why_not_now(inventory: Inventory, inputs: OfferInputs, candidate: Candidate, *, held: bool) -> Reason | None:
    """Return what keeps a device that no pod has from being given now."""
    if not held and candidate.target.gpu in inputs.blocked:
        return refusals.blocked(candidate.id, inputs.blocked[candidate.target.gpu])
    if not held and inputs.changing.covers(candidate.target):
        return refusals.changing(candidate.id, None)
    if not inputs.allocations_known and not held and possible.shares_group(inventory, inputs.settings, candidate):
        return refusals.allocations_unknown(candidate.id)
    return None


def _why_withheld(inputs: OfferInputs, allocated_devices: AllocatedDevices, candidate: Candidate) -> Reason | None:
    reason = inputs.withheld.get(candidate.named.resource)
    return (
        replace(reason, subject=candidate.id)
        if reason is not None and candidate.target not in allocated_devices.by_target
        else None
    )


def _of_another_kind(free: Iterable[Candidate], before: Offers) -> tuple[Candidate, ...]:
    """Return the devices whose resource has another kind of device: the kind offered before, else PCI functions."""
    kinds: dict[ResourceName, bool] = {}
    for resource, offer in before.by_resource.items():
        if offer.devices:
            *_, last = offer.devices.values()
            kinds[resource] = last.candidate.is_mdev
    free = tuple(free)
    found = dict.fromkeys((candidate.named.resource, candidate.is_mdev) for candidate in free)
    for resource, is_mdev in sorted(found, key=itemgetter(1)):
        kinds.setdefault(resource, is_mdev)
    if all(kinds[resource] is is_mdev for resource, is_mdev in found):
        return ()
    others = (candidate for candidate in free if kinds[candidate.named.resource] is not candidate.is_mdev)
    return tuple(sorted(others, key=lambda candidate: candidate.is_mdev))


def _name_taken(candidate: Candidate) -> Reason:
    kind, other = ("an mdev", "PCI functions") if candidate.is_mdev else ("a PCI function", "mdevs")
    return Reason(
        ReasonCode.NAME_TAKEN,
        candidate.id,
        f"is {kind}, but the resource {candidate.named.resource} has {other}; KubeVirt looks for these in different"
        " environment variables",
        fix="give each kind an alias of its own in the agent's settings",
    )


def _key(candidate: Candidate) -> Key:
    return candidate.named.resource, candidate.id


def _kept(
    inventory: Inventory,
    inputs: OfferInputs,
    before: Offers,
    allocated_devices: AllocatedDevices,
    keys: KeysView[Key],
    withheld: Mapping[str, Reason],
) -> Iterator[tuple[Candidate, Reason]]:
    """Yield the devices that stay listed though they are no candidates now, with the reason against them."""
    listed = {
        (resource, id_): device.candidate
        for resource, offer in before.by_resource.items()
        for id_, device in offer.devices.items()
        if (resource, id_) not in keys
    }
    held = {
        (entry.resource, entry.device): entry
        for entry in allocated_devices.given_by_us()
        if (entry.resource, entry.device) not in keys
    }
    for key, entry in held.items():
        candidate = listed.get(key) or _from_entry(entry)
        against = why_changed(inventory, candidate, withheld.get(candidate.id)) or device_gone(candidate)
        if against.code in _LEAVES and may_be_rejected(entry, inputs.of_several):
            against = Reason(
                ReasonCode.LEAVES_AFTER_POD,
                entry.device,
                f"is withdrawn, but stays listed for {entry.allocated_to}: without it, a restarted kubelet could reject"
                " the pod",
                fix="no action needed: it is withdrawn when the pod has ended; to keep it, revert the change of the"
                " desired state",
            )
        yield candidate, awaited(entry, against)
    for key, candidate in listed.items():
        reason = withheld.get(candidate.id)
        if key not in held and reason is not None and reason.code is ReasonCode.UNREAD:
            yield candidate, reason


def _from_entry(entry: Entry) -> Candidate:
    """Return an allocated device that only the ledger has: it was gone when this agent started."""
    return Candidate(
        id=entry.device,
        target=entry.target,
        named=Named(entry.resource),
        group=entry.group,
        numa_node=None,
        framework=possible.framework_of(entry.target),
        carrier=entry.target.gpu,
    )


def _other_names(free: Iterable[Candidate]) -> Mapping[ResourceName, frozenset[str]]:
    found: defaultdict[ResourceName, set[str]] = defaultdict(set)
    for candidate in free:
        if candidate.named.natural is not None:
            found[candidate.named.resource].add(candidate.named.natural)
    return {resource: frozenset(names) for resource, names in found.items()}
