"""Allocates devices: answers the kubelet when it asks for some, or says why not.

What the last look at the host saw is a moment old, so the devices of a request are read again before they are given,
and judged as after each look. Of a request of which something is refused nothing is given.
"""

import itertools
import logging
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName, is_mdev_uuid, slot_of
from gpuvirt.facts.pci import PciFunction
from gpuvirt.facts.vgpu import Framework
from gpuvirt.hardware.devicefacts import AskedDevice, FreshFacts, may_sleep, read_devices
from gpuvirt.model.allocation.attachment import Attachment, attach
from gpuvirt.model.allocation.ledger import UNCONFIRMED_FOR, Entry, Former, FormerTenant, record
from gpuvirt.model.allocation.placement import Place, prefer
from gpuvirt.model.devices.candidates import Candidate
from gpuvirt.model.inventory.inventory import Inventory, build_inventory
from gpuvirt.model.offers.allocationcheck import why_refused
from gpuvirt.model.offers.offers import Offer
from gpuvirt.model.reasons import Reason, ReasonCode, nodeproblems, refusals, unhealthy
from gpuvirt.node.allocation.allocated import Allocated, Allocations
from gpuvirt.node.change.gate.gate import Gate, UnitBlockedError, UnitBusyError
from gpuvirt.node.change.leasing import RefusedError
from gpuvirt.node.known.state import NodeState
from gpuvirt.node.loops.serialworker import WorkerBlockedError
from gpuvirt.node.loops.telemetry import Telemetry
from gpuvirt.node.site import Site

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""How long a pod's admission waits for its devices to be read; the kubelet admits no other meanwhile."""


class AllocationRefusedError(GpuvirtError):
    """A request can't be met; `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Request:
    """What the kubelet asks for: devices of one resource, for each container of a pod."""

    resource: ResourceName
    containers: Sequence[Sequence[DeviceId]]


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Whom an allocator tells of its answers."""

    allocated: Callable[[], None]
    refused: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Checked:
    """The devices of a request as they are now."""

    host: Inventory
    against: Mapping[DeviceId, Reason]
    """What speaks against those that can't be given."""


class Allocator:
    """Gives devices to pods, and records to whom."""

    def __init__(
        self, state: NodeState, site: Site, telemetry: Telemetry, callbacks: Callbacks, gate: Gate | None = None
    ) -> None:
        """Without a `gate` no other process changes what is offered here."""
        self._state = state
        self._site = site
        self._telemetry = telemetry
        self._callbacks = callbacks
        self._gate = gate
        self._allocations = Allocations(state, site.clock, site.recorded)
        self._name = uuid.uuid4().hex
        """Tells the allocations of this agent from those of the one before, whatever its clock says."""
        self._numbers = itertools.count(1)

    def prefer(
        self, resource: ResourceName, available: Sequence[DeviceId], must_include: Sequence[DeviceId], size: int
    ) -> tuple[DeviceId, ...]:
        """Return the devices to prefer; raise PlacementError where the request contradicts itself."""
        offer = self._state.offers.by_resource.get(resource, Offer(resource))
        candidates = {device.id: device.candidate for device in offer.devices.values()}
        places = {id_: Place(one.numa_node, one.group, one.target.gpu) for id_, one in candidates.items()}
        allocated = self._allocations.read()
        holds, unfinished = allocated.holds, allocated.unfinished
        siblings = [one.id for one in holds.siblings(candidates.values(), unfinished)]
        musts = [candidates[one] for one in must_include if one in candidates]
        free = [
            one
            for one in available
            if one not in candidates or not holds.in_the_way(resource, [*musts, candidates[one]], unfinished)
        ]
        spread = self._state.settings.vgpu_placement
        return prefer(free, must_include, size, places, spread, siblings=siblings)

    async def allocate(self, request: Request) -> tuple[Attachment, ...]:
        """Give devices to containers, an answer for each; raise AllocationRefusedError and give nothing.

        Nobody else waits where reading the devices sleeps in the kernel.
        """
        began_s = self._site.clock.monotonic_s()
        try:
            attachments = await self._allocate(request)
        except AllocationRefusedError as error:
            self._telemetry.allocations[request.resource, error.reason.code] += 1
            self._callbacks.refused()
            raise
        self._telemetry.allocations[request.resource, "given"] += 1
        self._telemetry.allocate_s.observe(self._site.clock.monotonic_s() - began_s)
        return attachments

    async def _allocate(self, request: Request) -> tuple[Attachment, ...]:
        inventory, offer = self._offered(request.resource)
        allocated = self._allocations.read()
        ids = dict.fromkeys(itertools.chain.from_iterable(request.containers))
        devices = [offer.devices[device].candidate for device in ids if device in offer.devices]
        former = {one.target.gpu: tenant for one in devices if (tenant := self._former(allocated, one)) is not None}
        asked = [_asked(inventory, allocated, device, former) for device in devices]
        if any(may_sleep(inventory.facts, device) for device in asked):
            fresh = await self._in_worker(request.resource, lambda: self._read(inventory, asked))
            checked = self._checked(inventory, fresh, devices, former)
            newest, offer = self._offered(request.resource)
            if newest is not inventory:
                checked = _Checked(newest, checked.against)
            allocated = self._allocations.read()
        else:
            checked = self._checked(inventory, self._read(inventory, asked), devices, former)
        return self._give(request, offer, allocated, checked)

    def _offered(self, resource: ResourceName) -> tuple[Inventory, Offer]:
        """Return the host and a resource as it is offered; raise AllocationRefusedError where it is not."""
        inventory, offer = self._state.inventory, self._state.offers.by_resource.get(resource)
        if inventory is None or offer is None:
            raise AllocationRefusedError(unhealthy.unknown_resource(resource))
        if (withholding := self._state.resources.withholdings.get(resource)) is not None:
            raise AllocationRefusedError(withholding.reason)  # also of a device whose pod has just ended
        return inventory, offer

    def _former(self, allocated: Allocated, device: Candidate) -> FormerTenant | None:
        """Return which other pod has had a whole function in this boot, None for none, or where that may be.

        The kubelet names no pod when it asks, so whoever asks is taken for another pod than the one that the kubelet
        has named. An entry without a pod is of the admission that is under way: an init container had the device.
        """
        if device.target.vgpu is not None or not self._state.settings.require_reset:
            return None
        own = allocated.by_ledger.by_target.get(device.target)
        if own is None:
            return self._state.former.get(device.target.gpu)
        is_new = own.consumer is None and self._site.clock.now() - own.since <= UNCONFIRMED_FOR
        return None if is_new or own.earlier_boot else FormerTenant(own.consumer, self._state.ledger.boot_id)

    async def _in_worker(self, resource: ResourceName, read: Callable[[], FreshFacts]) -> FreshFacts:
        """Read in the thread for what may sleep; raise AllocationRefusedError where it does."""
        try:
            return await self._site.giving.run(read, name="look at what is asked for", timeout_s=LOOK_S)
        except WorkerBlockedError as error:
            effect = "no device of it is given to a pod until it can be"
            reason = nodeproblems.scan_blocked(resource, str(error), effect)
            raise AllocationRefusedError(reason) from error

    def _read(self, inventory: Inventory, asked: Sequence[AskedDevice]) -> FreshFacts:
        return read_devices(self._site.kernel, inventory.facts, asked)

    def _checked(
        self, inventory: Inventory, fresh: FreshFacts, devices: Sequence[Candidate], former: Former
    ) -> _Checked:
        """Return what speaks against devices, by facts that were read for that."""
        now, settings = inventory, self._state.settings
        if fresh.facts is not inventory.facts:
            now = build_inventory(fresh.facts, self._state.ledger.type_names)
        found = {one.id: why_refused(inventory, now, fresh.members, settings, one, former) for one in devices}
        return _Checked(now, {device: reason for device, reason in found.items() if reason is not None})

    def _give(self, request: Request, offer: Offer, allocated: Allocated, checked: _Checked) -> tuple[Attachment, ...]:
        resource, entries = request.resource, allocated.entries
        attachments: list[Attachment] = []
        given: list[Candidate] = []
        added: list[Entry] = []
        for ids in request.containers:
            devices = tuple(self._usable(offer, ids, checked.against))
            holds = allocated.holds if entries is allocated.entries else self._allocations.holds(entries)
            if (reason := holds.in_the_way(resource, devices, allocated.unfinished)) is not None:
                raise AllocationRefusedError(reason)
            attachments.append(attach(checked.host, resource, devices, self._state.settings))
            given += devices
            added += (new := tuple(self._entries(resource, devices)))
            entries = record(entries, new)
        with self._passed(resource, by_slot(checked.host.facts.functions, given)):
            targets = [(device.id, device.target) for device in given]
            try:
                self._state.changes.allocate(targets, lambda: self._state.ledger.record_allocation(entries))
            except RefusedError as error:
                raise AllocationRefusedError(error.reason) from error
        self._allocations.add(added, allocated.recorded)
        self._callbacks.allocated()
        return tuple(attachments)

    def _usable(self, offer: Offer, ids: Sequence[DeviceId], against: Mapping[DeviceId, Reason]) -> Iterator[Candidate]:
        """Yield the devices of a request; raise AllocationRefusedError at the first that can't be used."""
        for device_id in dict.fromkeys(ids):
            reason = self._why_not(offer, device_id, against)
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

    def _why_not(self, offer: Offer, device_id: DeviceId, against: Mapping[DeviceId, Reason]) -> Reason | None:
        device = offer.devices.get(device_id)
        if device is None and (withheld := self._state.offers.withheld.get(device_id)) is not None:
            return withheld
        if device is None:
            return unhealthy.unknown_device(device_id, offer.resource, tuple(offer.devices))
        return against.get(device_id) if device.health.healthy else device.health.against[0]

    def _entries(self, resource: ResourceName, devices: Sequence[Candidate]) -> Iterator[Entry]:
        now = self._site.clock.now()
        allocation = f"allocate:{self._name}:{next(self._numbers)}"
        for device in devices:
            yield Entry(resource, device.id, device.target, device.group, allocation, now)


def _asked(inventory: Inventory, allocated: Allocated, device: Candidate, former: Former) -> AskedDevice:
    """Return a device as it is to be read again."""
    return AskedDevice(
        carrier=device.carrier,
        gpu=device.target.gpu,
        vgpu=device.target.vgpu,
        framework=device.framework,
        group=device.group,
        members=inventory.groups.get(device.group, ()) if device.group is not None else (),
        may_open=allocated.holds.not_started(device, allocated.unfinished),
        had_tenant=device.target.gpu in former,
    )


def by_slot(
    functions: Mapping[PciAddress, PciFunction], devices: Sequence[Candidate]
) -> Mapping[str, Sequence[DeviceId]]:
    """Return devices by the slots that they are on."""
    found: defaultdict[str, list[DeviceId]] = defaultdict(list)
    for device in devices:
        gpu = functions.get(device.target.gpu)
        found[slot_of(gpu.physfn or gpu.address if gpu is not None else device.target.gpu)].append(device.id)
    return found


_MISMATCHES = frozenset({ReasonCode.DEVICE_GONE, ReasonCode.TYPE_CHANGED, ReasonCode.UNKNOWN_DEVICE})
