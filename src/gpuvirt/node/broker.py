"""Who gets what: answers the kubelet when it asks for devices, or says why not.

What was seen at the last look is a moment old, so each device is looked at once more before it is given away. Of a
request of which something is refused nothing is given.
"""

import itertools
import logging
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from gpuvirt.clock import Clock
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName, is_mdev_uuid
from gpuvirt.facts.pci import PciFunction
from gpuvirt.facts.vgpu import Framework
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.model import refusals
from gpuvirt.model.allocations import Unknown
from gpuvirt.model.attachment import Attachment, attach
from gpuvirt.model.candidates import Candidate
from gpuvirt.model.holds import Holds, find_holds
from gpuvirt.model.isolation import slots_of
from gpuvirt.model.ledger import UNCONFIRMED_FOR, Entry, Holders, Known, adopt, record
from gpuvirt.model.offers import Offer
from gpuvirt.model.placement import Place, prefer
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.recorded import Consumers, ReadRecorded, Recorded, any_consumer, with_consumers
from gpuvirt.node import lastlook
from gpuvirt.node.change.gate import Gate, UnitBlockedError, UnitBusyError
from gpuvirt.node.deviceuse import Sight
from gpuvirt.node.leasing import RefusedError
from gpuvirt.node.state import NodeState
from gpuvirt.node.unfinished import Unfinished

log = logging.getLogger(__name__)

Looked = Mapping[DeviceId, Sight]
"""What a look just before an allocation has shown of each device."""


class AllocationRefusedError(GpuvirtError):
    """A request can't be met; `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.text)
        self.reason = reason


class Broker:
    """Gives devices away, and remembers to whom."""

    def __init__(
        self,
        state: NodeState,
        kernel: Kernel,
        clock: Clock,
        recorded: ReadRecorded,
        given: Callable[[], None],
        gate: Gate | None = None,
    ) -> None:
        """`given` is called after each allocation, `recorded` reads what the kubelet has recorded of its own.

        Without a `gate` no other process changes what is offered here.
        """
        self._state = state
        self._kernel = kernel
        self._clock = clock
        self._recorded = recorded
        self._given = given
        self._unfinished = Unfinished()
        self._gate = gate
        self._name = uuid.uuid4().hex
        """Tells the allocations of this agent from those of the one before, whatever its clock says."""
        self._numbers = itertools.count(1)
        self._found: tuple[tuple[Entry, ...], Holds] | None = None
        """What was allocated last, and what follows from it."""
        self._adopted: tuple[tuple[Entry, ...], Recorded | Unknown, Known, tuple[tuple[Entry, ...], Consumers]] | None
        self._adopted = None
        """The ledger's entries with the kubelet's record, and what these follow from."""

    def prefer(
        self, resource: ResourceName, available: Sequence[DeviceId], must_include: Sequence[DeviceId], size: int
    ) -> tuple[DeviceId, ...]:
        """Return the devices to prefer; raise PlacementError where the request contradicts itself."""
        offer = self._state.offers.by_resource.get(resource, Offer(resource))
        places = {
            device.id: Place(device.candidate.numa_node, device.candidate.group, device.candidate.target.gpu)
            for device in offer.devices.values()
        }
        entries, unfinished = self._allocated(self._recorded())
        holds = self._holds(entries)
        candidates = {device.id: device.candidate for device in offer.devices.values()}
        companions = [one.id for one in holds.companions(candidates.values(), unfinished)]
        musts = [candidates[one] for one in must_include if one in candidates]
        free = [
            one
            for one in available
            if one not in candidates or not holds.in_the_way(resource, [*musts, candidates[one]], unfinished)
        ]
        spread = self._state.settings.vgpu_placement
        return prefer(free, must_include, size, places, spread, companions=companions)

    def may_sleep(self, resource: ResourceName, containers: Sequence[Sequence[DeviceId]]) -> bool:
        """Return whether looking at what a request names could take its time."""
        inventory, offer = self._state.inventory, self._state.offers.by_resource.get(resource)
        if inventory is None or offer is None:
            return False
        named = (offer.devices[one] for one in itertools.chain.from_iterable(containers) if one in offer.devices)
        holds = self._holds(self._with_recorded(self._recorded())[0])
        return any(
            lastlook.may_sleep(inventory.facts, device.candidate, allocated=holds.has_any(device.candidate))
            for device in named
        )

    def look(self, resource: ResourceName, containers: Sequence[Sequence[DeviceId]]) -> Looked:
        """Look once more at the devices that a request names; return what that shows of each.

        Nothing is changed, and it may run in another thread.
        """
        inventory, offer = self._state.inventory, self._state.offers.by_resource.get(resource)
        if inventory is None or offer is None:
            return {}
        ids = dict.fromkeys(itertools.chain.from_iterable(containers))
        holds = self._holds(self._with_recorded(self._recorded())[0])
        devices = [offer.devices[device].candidate for device in ids if device in offer.devices]
        allocated = {device.id for device in devices if holds.has_any(device)}
        former = {device.id: tenant for device in devices if (tenant := self._former(holds, device)) is not None}
        return lastlook.look(self._kernel, inventory, devices, allocated, former)

    def _former(self, holds: Holds, device: Candidate) -> str | None:
        """Return which other pod has had a whole function in this boot, None for none, or where that may be.

        The kubelet names no pod when it asks, so whoever asks is taken for another pod than the one that the kubelet
        has named. An entry without a pod is of the admission that is under way: an init container had the device.
        """
        if device.target.vgpu is not None or not self._state.settings.require_reset:
            return None
        own = holds.by_target.get(device.target)
        if own is None:
            tenant = self._state.former.get(device.target.gpu)
            return tenant.holder if tenant is not None else None
        is_new = own.consumer is None and self._clock.now() - own.since <= UNCONFIRMED_FOR
        return None if is_new or own.earlier_boot else own.holder

    def _allocated(self, recorded: Recorded | Unknown) -> tuple[tuple[Entry, ...], frozenset[str]]:
        """Return the entries with what the kubelet has recorded since, and the allocations of the container that asks.

        The entries are the ledger's own where the record has no more.
        """
        unfinished = self._unfinished.now(self._state.entries, recorded)
        found, consumers = self._with_recorded(recorded)
        return with_consumers(found, consumers, unfinished), unfinished

    def _with_recorded(self, recorded: Recorded | Unknown) -> tuple[tuple[Entry, ...], Consumers]:
        """Return the entries with those that only the record has, and the containers of recorded devices.

        They are found once for as long as ledger, record and host are the same objects.
        """
        entries, known, last = self._state.entries, self._state.known, self._adopted
        if last is None or last[0] is not entries or last[1] is not recorded or last[2] is not known:
            last = self._adopted = entries, recorded, known, self._adopt(entries, recorded, known)
        return last[3]

    def _adopt(
        self, entries: tuple[Entry, ...], recorded: Recorded | Unknown, known: Known
    ) -> tuple[tuple[Entry, ...], Consumers]:
        if isinstance(recorded, Unknown):
            return entries, {}
        consumers = any_consumer({key: pods for key, pods in recorded.items() if key[1] in known})
        return adopt(entries, Holders(self._clock.now(), consumers), known) if consumers else entries, consumers

    def _holds(self, entries: tuple[Entry, ...]) -> Holds:
        """Return what is allocated, found once for as long as it is the same."""
        found, ours = self._found, self._state.resources
        if found is None or found[0] is not entries or found[1].ours is not ours:
            found = self._found = entries, find_holds(entries, ours)
        return found[1]

    def allocate(
        self, resource: ResourceName, containers: Sequence[Sequence[DeviceId]], looked: Looked | None = None
    ) -> tuple[Attachment, ...]:
        """Give devices to containers, an answer for each; raise AllocationRefusedError and give nothing.

        `looked` is what `look` has just returned for the same request; it is made here where it is not given.
        """
        inventory, offer = self._state.inventory, self._state.offers.by_resource.get(resource)
        if inventory is None or offer is None:
            raise AllocationRefusedError(
                Reason(ReasonCode.UNKNOWN_RESOURCE, resource, "is not offered on this node", fix="see: gpuvirt devices")
            )
        if (withholding := self._state.withholdings.get(resource)) is not None:
            raise AllocationRefusedError(withholding.reason)  # also of a device whose pod has just ended
        looked = self.look(resource, containers) if looked is None else looked
        recorded = self._recorded()
        opened = {sight.opened for sight in looked.values() if sight.opened is not None}
        entries, unfinished = self._allocated(recorded)
        attachments: list[Attachment] = []
        given: list[Candidate] = []
        added: list[Entry] = []
        for ids in containers:
            devices = tuple(self._usable(offer, ids, looked))
            if (reason := self._holds(entries).in_the_way(resource, devices, unfinished)) is not None:
                raise AllocationRefusedError(reason)
            attachment = attach(inventory, resource, devices, self._state.settings)
            nodes = attachment.device_nodes
            if devices and (reason := lastlook.missing_node(self._kernel, devices[0].id, nodes, opened)):
                raise AllocationRefusedError(reason)
            attachments.append(attachment)
            given += devices
            added += (new := tuple(self._entries(resource, devices)))
            entries = record(entries, new)
        with self._passed(resource, by_slot(inventory.facts.functions, given)):
            try:
                self._state.changes.allocate(
                    [(device.id, device.target) for device in given], lambda: self._state.hear_entries(entries)
                )
            except RefusedError as error:
                raise AllocationRefusedError(error.reason) from error
        self._unfinished.add(added, recorded)
        self._given()
        return tuple(attachments)

    def _usable(self, offer: Offer, ids: Sequence[DeviceId], looked: Looked) -> Iterator[Candidate]:
        """Yield the devices of a request; raise AllocationRefusedError at the first that can't be used."""
        for device_id in dict.fromkeys(ids):
            reason = self._why_not(offer, device_id, looked)
            if reason is None:
                yield offer.devices[device_id].candidate
            elif not self._may_be_left_out(offer, device_id, reason):
                raise AllocationRefusedError(reason)

    def _may_be_left_out(self, offer: Offer, device_id: DeviceId, reason: Reason) -> bool:
        """Return whether an mdev that is gone or of another type may be left out, as an admin has switched on."""
        device = offer.devices.get(device_id)
        is_mdev = device.candidate.framework is Framework.MDEV if device is not None else is_mdev_uuid(device_id)
        return self._state.settings.compat.drop_mismatched_vgpus and is_mdev and reason.code in _MISMATCHES

    @contextmanager
    def _passed(self, resource: ResourceName, devices: Mapping[str, Sequence[DeviceId]]) -> Iterator[None]:
        """Keep other processes from changing devices of these slots; raise AllocationRefusedError where one does."""
        with ExitStack() as stack:
            try:
                if self._gate is not None:
                    stack.enter_context(self._gate.allocation(devices))
            except UnitBlockedError as error:
                raise AllocationRefusedError(refusals.blocked(resource, error.step)) from error
            except UnitBusyError as error:
                raise AllocationRefusedError(refusals.busy(resource, str(error))) from error
            except OSError as error:  # where no gate can be written, no change begins either
                log.warning("%s: no gate could be passed: %s", resource, error)
            yield

    def _why_not(self, offer: Offer, device_id: DeviceId, looked: Looked) -> Reason | None:
        device = offer.devices.get(device_id)
        if device is None and (withheld := self._state.offers.withheld.get(device_id)) is not None:
            return withheld
        if device is None:
            known = ", ".join(offer.devices) or "none"
            return Reason(
                ReasonCode.UNKNOWN_DEVICE, device_id, f"is no device of {offer.resource}", seen=f"its devices: {known}"
            )
        if not device.health.healthy:
            return device.health.against[0]
        sight = looked.get(device_id)
        return sight.against if sight is not None else None

    def _entries(self, resource: ResourceName, devices: Sequence[Candidate]) -> Iterator[Entry]:
        now = self._clock.now()
        allocation = f"allocate:{self._name}:{next(self._numbers)}"
        for device in devices:
            yield Entry(resource, device.id, device.target, device.group, allocation, now)


def by_slot(
    functions: Mapping[PciAddress, PciFunction], devices: Sequence[Candidate]
) -> Mapping[str, Sequence[DeviceId]]:
    """Return devices by the slots that they are on."""
    found: defaultdict[str, list[DeviceId]] = defaultdict(list)
    for device in devices:
        (slot,) = slots_of(functions, [device.target.gpu])
        found[slot].append(device.id)
    return found


_MISMATCHES = frozenset({ReasonCode.DEVICE_GONE, ReasonCode.TYPE_CHANGED, ReasonCode.UNKNOWN_DEVICE})
