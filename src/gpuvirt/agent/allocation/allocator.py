"""Allocates devices: answers the kubelet's requests, or returns why a request is refused.

The last observation of the host is a moment old. So Allocate reads the requested devices again, and judges them by the
same functions as each observation. If one device of a request is refused, the whole request is.
"""

import itertools
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.change.allocationgate import AllocationGate
from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.agent.known.kubeletrecord import KubeletRecord, PodStarts
from gpuvirt.agent.known.requests import AllocationRefusedError, AllocationRequest
from gpuvirt.agent.known.state import NodeState
from gpuvirt.agent.loops.telemetry import Telemetry
from gpuvirt.agent.options import NodeOptions
from gpuvirt.clock import Clock
from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName, is_mdev_uuid, slot_of
from gpuvirt.facts.pci import PciFunction
from gpuvirt.facts.snapshot import FreshFacts
from gpuvirt.facts.vgpu import Framework
from gpuvirt.hardware.devicefacts import AskedDevice, read_at_once, read_devices
from gpuvirt.loops.serialworker import WorkerBlockedError
from gpuvirt.model.allocation.allocateddevices import AllocatedDevices, find_allocated
from gpuvirt.model.allocation.allocations import (
    Consumers,
    ReadRecorded,
    Recorded,
    Unknown,
    any_consumer,
    pods_of,
    with_consumers,
)
from gpuvirt.model.allocation.attachment import Attachment, attach
from gpuvirt.model.allocation.containerstarts import why_no_start
from gpuvirt.model.allocation.ledger import Consumer, Entry, Known, KubeletAccount, adopt, record
from gpuvirt.model.allocation.placement import DevicePlace, prefer
from gpuvirt.model.allocation.pluginanswers import PluginAnswer, vfio_ids
from gpuvirt.model.allocation.podallocations import ResourceRules
from gpuvirt.model.allocation.tenancy import FormerTenants, TenantKind
from gpuvirt.model.devices.candidates import Candidate
from gpuvirt.model.inventory.inventory import Inventory, build_inventory
from gpuvirt.model.inventory.resets import Reset, reset_of
from gpuvirt.model.offers.allocationcheck import why_refused, why_unseen
from gpuvirt.model.offers.namereview import withholdings
from gpuvirt.model.offers.offers import Offer
from gpuvirt.model.reasons import Reason, ReasonCode, nodeproblems, notoffered, refusals

Entries = tuple[Entry, ...]

Key = tuple[ResourceName, DeviceId]


class Unfinished:
    """The allocations of this process that may belong to a container whose admission is not finished."""

    def __init__(self) -> None:
        self._recorded: dict[str, dict[Key, frozenset[Consumer]]] = {}
        """The containers in the kubelet's record for the devices of each allocation, just before that allocation."""

    def add(self, given: Sequence[Entry], recorded: Recorded | Unknown) -> None:
        """Record a new allocation, with the kubelet's record from just before it."""
        if not isinstance(recorded, Unknown):
            for entry in given:
                key = entry.resource, entry.device
                self._recorded.setdefault(entry.allocation, {})[key] = recorded.get(key, frozenset())

    def now(self, entries: Iterable[Entry], recorded: Recorded | Unknown) -> frozenset[str]:
        """Return the allocations of the container that the kubelet is admitting now."""
        waiting = {entry.allocation for entry in entries if entry.consumer is None}
        self._recorded = {allocation: had for allocation, had in self._recorded.items() if allocation in waiting}
        if isinstance(recorded, Unknown):
            return frozenset()
        return frozenset(
            allocation
            for allocation, had in self._recorded.items()
            if all(recorded.get(key, frozenset()) <= consumers for key, consumers in had.items())
        )


class Allocated(msgspec.Struct, frozen=True):
    """The allocations at one moment."""

    entries: Entries
    """The entries of the ledger and of the record; the ledger's own object if the record has no others."""
    allocated_devices: AllocatedDevices
    """The allocated devices of the entries, by device and by IOMMU group."""
    by_ledger: AllocatedDevices
    """The same, but only with the containers that the ledger names."""
    unfinished: frozenset[str]
    """The allocations of the container that the kubelet is admitting now."""
    recorded: Recorded | Unknown


class Allocations:
    """Reads the allocations in the ledger and in the kubelet's newest record, for each request for devices.

    The kubelet names no pod in its requests. It admits one container after another, calls Allocate once for each of its
    resources, and records all of the container's devices before it goes on to the next container (devicemanager:
    `allocateContainerResources`). So an allocated device that the kubelet has not recorded yet belongs to the container
    that it is admitting now. If the record was written in between, or could not be read, the device counts as another
    container's: then Allocate refuses the rest of its IOMMU group.
    """

    def __init__(self, state: NodeState, clock: Clock, recorded: ReadRecorded) -> None:
        """`recorded` reads the kubelet's record of its allocations."""
        self._state = state
        self._clock = clock
        self._recorded = recorded
        self._unfinished = Unfinished()
        self._found: tuple[Entries, AllocatedDevices] | None = None
        """The last entries, with the allocated devices."""
        self._adopted: tuple[Entries, Recorded | Unknown, Known, ResourceRules, tuple[Entries, Consumers]] | None = None
        """The last ledger entries, record, host and resources, with the entries that follow from them."""

    def read(self) -> Allocated:
        """Return the present allocations."""
        recorded = self._recorded()
        unfinished = self._unfinished.now(self._state.ledger.entries, recorded)
        known, consumers = self._with_recorded(recorded)
        entries = with_consumers(known, consumers, unfinished)
        by_ledger = self.allocated_devices(known)
        allocated_devices = by_ledger if entries is known else find_allocated(entries, self._state.ledger.resources)
        return Allocated(entries, allocated_devices, by_ledger, unfinished, recorded)

    def add(self, given: Sequence[Entry], recorded: Recorded | Unknown) -> None:
        """Record a new allocation, with the kubelet's record from just before it."""
        self._unfinished.add(given, recorded)

    def allocated_devices(self, entries: Entries) -> AllocatedDevices:
        """Return the allocated devices of entries."""
        found, ours = self._found, self._state.ledger.resources
        if found is None or found[0] is not entries or found[1].ours is not ours:
            found = self._found = entries, find_allocated(entries, ours)
        return found[1]

    def _with_recorded(self, recorded: Recorded | Unknown) -> tuple[Entries, Consumers]:
        """Return the entries of the ledger and the record, and the containers of recorded devices."""
        ledger, last = self._state.ledger, self._adopted
        entries, known, rules = ledger.entries, ledger.known, ledger.rules
        now = entries, recorded, known, rules
        if last is None or any(before is not value for before, value in zip(last, now, strict=False)):
            last = self._adopted = (*now, self._adopt(entries, recorded, known, rules))
        return last[4]

    def _adopt(
        self, entries: Entries, recorded: Recorded | Unknown, known: Known, rules: ResourceRules
    ) -> tuple[Entries, Consumers]:
        listed = recorded.listed if isinstance(recorded, Unknown) else recorded
        consumers = any_consumer({key: pods for key, pods in listed.items() if _may_be_vms(key[1], pods, known)})
        if not consumers:
            return entries, {}
        return adopt(
            entries, KubeletAccount(self._clock.now(), self._clock.monotonic_s(), consumers), known, rules
        ), consumers


def _may_be_vms(device: DeviceId, consumers: Iterable[Consumer], known: Known) -> bool:
    """Return whether an id, or what its plugin answered, may be a device that VMs get."""
    return device in known or any(
        isinstance(consumer.answer, PluginAnswer) and any(vfio_ids(consumer.answer)) for consumer in consumers
    )


READ_TIMEOUT_S = 2.0
"""How long a pod's admission waits until its devices are read. The kubelet admits no other pod meanwhile."""


class Callbacks(msgspec.Struct, frozen=True):
    """The functions that an allocator calls after its answers."""

    allocated: Callable[[], None]
    refused: Callable[[], None]
    unseen: Callable[[Reason | None], None]
    """Takes why devices were allocated with unknown users; None after an allocation with known users."""


class _Snapshot(msgspec.Struct, frozen=True):
    """The state of the agent that Allocate decides by, all of one moment."""

    host: Inventory
    offer: Offer
    allocated: Allocated


class _Checked(msgspec.Struct, frozen=True):
    """The devices of a request, as just read."""

    host: Inventory
    against: Mapping[DeviceId, Reason]
    """Why devices can't be allocated."""
    unseen: Mapping[DeviceId, Reason]
    """Why it is unknown who uses devices that are allocated nevertheless: with `--plugin-only` nothing can tell."""


class Allocator:
    """Allocates devices to pods, and records the allocations."""

    def __init__(
        self,
        state: NodeState,
        options: NodeOptions,
        kubelet: KubeletRecord,
        telemetry: Telemetry,
        callbacks: Callbacks,
        gate: AllocationGate,
    ) -> None:
        self._state = state
        self._options = options
        self._kubelet = kubelet
        self._worker = options.workers("allocating")
        self._telemetry = telemetry
        self._callbacks = callbacks
        self._gate = gate
        self._allocations = Allocations(state, options.clock, kubelet.recorded)
        self._name = uuid.uuid4().hex
        """Distinguishes the allocations of this agent from those of earlier ones, independently of the clock."""
        self._numbers = itertools.count(1)
        self._started: dict[str, PodStarts] = {}
        """The starts of pods before each allocation of whole GPUs whose entry is in the ledger."""

    def prefer(
        self, resource: ResourceName, available: Sequence[DeviceId], must_include: Sequence[DeviceId], size: int
    ) -> tuple[DeviceId, ...]:
        """Return the preferred devices; raise PlacementError if the request contradicts itself."""
        offer = self._state.memory.offers.by_resource.get(resource, Offer(resource))
        candidates = {device.id: device.candidate for device in offer.devices.values()}
        places = {
            device: DevicePlace(found.numa_node, found.group, found.target.gpu) for device, found in candidates.items()
        }
        allocated = self._allocations.read()
        allocated_devices, unfinished = allocated.allocated_devices, allocated.unfinished
        siblings = [sibling.id for sibling in allocated_devices.siblings(candidates.values(), unfinished)]
        musts = [candidates[device] for device in must_include if device in candidates]
        free = [
            device
            for device in available
            if device not in candidates
            or not allocated_devices.conflict(resource, [*musts, candidates[device]], unfinished)
        ]
        spread = self._state.terms.settings.vgpu_placement
        return prefer(free, must_include, size, places, spread, siblings=siblings)

    async def allocate(self, request: AllocationRequest) -> tuple[Attachment, ...]:
        """Allocate devices; return an answer for each container. Raise AllocationRefusedError for the whole request.

        The event loop goes on if the kernel blocks the reading of the devices.
        """
        began_s = self._options.clock.monotonic_s()
        try:
            attachments = await self._allocate(request)
        except AllocationRefusedError as error:
            self._telemetry.allocations[request.resource, error.reason.code] += 1
            self._callbacks.refused()
            raise
        self._telemetry.allocations[request.resource, "given"] += 1
        self._telemetry.allocate_s.observe(self._options.clock.monotonic_s() - began_s)
        return attachments

    async def pre_start(self, resource: ResourceName, devices: Sequence[DeviceId]) -> None:
        """Let a container start with its devices; raise AllocationRefusedError, after which the kubelet tries again."""
        if (inventory := self._state.inventory) is None:
            raise AllocationRefusedError(notoffered.unknown_resource(resource))
        recorded = self._kubelet.recorded()
        reason = why_no_start(inventory, self._state.ledger.entries, recorded, resource, devices)
        if reason is not None:
            raise AllocationRefusedError(reason)

    async def _allocate(self, request: AllocationRequest) -> tuple[Attachment, ...]:
        asked = self._snapshot(request.resource)
        facts, offered = asked.host.facts, asked.offer.devices
        ids = dict.fromkeys(itertools.chain.from_iterable(request.containers))
        devices = [offered[device].candidate for device in ids if device in offered]
        started = self._kubelet.pod_starts() if any(device.target.vgpu is None for device in devices) else None
        former = self._former(asked.allocated, devices, started)
        to_read = [_to_read(asked, device, former) for device in devices]
        kernel, snapshot = self._options.kernel, asked
        fresh = read_at_once(kernel, facts, to_read)
        if fresh is None:
            fresh = await self._in_worker(request.resource, lambda: read_devices(kernel, facts, to_read))
            snapshot = self._snapshot(request.resource)  # meanwhile there may have been allocations and observations
        checked = self._checked(asked.host, fresh, devices, former)
        if snapshot.host is asked.host:
            snapshot = replace(snapshot, host=checked.host)
        attachments, added = self._give(request, snapshot, checked)
        self._remember_starts(added, started)
        return attachments

    def _snapshot(self, resource: ResourceName) -> _Snapshot:
        """Return the state of this moment; raise AllocationRefusedError if the resource is not offered."""
        inventory, offer = self._state.inventory, self._state.memory.offers.of(resource)
        if inventory is None or offer is None:
            raise AllocationRefusedError(notoffered.unknown_resource(resource))
        if (withholding := withholdings(self._state.memory.desired.spec).get(resource)) is not None:
            raise AllocationRefusedError(withholding.reason)  # a device stays listed until its pod has ended
        return _Snapshot(inventory, offer, self._allocations.read())

    def _former(self, allocated: Allocated, devices: Sequence[Candidate], started: PodStarts | None) -> FormerTenants:
        """Return the last tenants of GPUs; the pod that is being admitted, or was never started, counts as none.

        The kubelet names no pod in its requests. An init container's device goes to the pod's other containers in the
        same admission: while no pod of the node has started since, the pod with the device has not either.
        """
        if started is None or not self._started:
            return self._state.former
        entries = (allocated.by_ledger.own(device) for device in devices)
        same_pod = frozenset(
            entry.target.gpu
            for entry in entries
            if entry is not None and self._started.get(entry.allocation) == started
        )
        return replace(self._state.former, same_pod=same_pod)

    async def _in_worker(self, resource: ResourceName, read: Callable[[], FreshFacts]) -> FreshFacts:
        """Read in a serial worker, since the kernel may block; raise AllocationRefusedError if it does."""
        try:
            return await self._worker.run(read, name="read the requested devices", timeout_s=READ_TIMEOUT_S)
        except WorkerBlockedError as error:
            effect = "gpuvirt allocates none of its devices until they can be read"
            reason = nodeproblems.scan_blocked(resource, str(error), effect)
            raise AllocationRefusedError(reason) from error

    def _checked(
        self, inventory: Inventory, fresh: FreshFacts, devices: Sequence[Candidate], former: FormerTenants
    ) -> _Checked:
        """Return the reasons against devices, by freshly read facts."""
        now, settings = inventory, self._state.terms.settings
        if fresh.facts is not inventory.facts:
            now = build_inventory(fresh.facts, self._state.ledger.type_names)
        found = {device.id: why_refused(inventory, now, fresh, settings, device, former) for device in devices}
        against = {device: reason for device, reason in found.items() if reason is not None}
        unknown = {device.id: why_unseen(fresh, device) for device in devices}
        unseen = {device: reason for device, reason in unknown.items() if reason is not None}
        return _Checked(now, against, unseen) if self._options.plugin_only else _Checked(now, unseen | against, {})

    def _give(
        self, request: AllocationRequest, snapshot: _Snapshot, checked: _Checked
    ) -> tuple[tuple[Attachment, ...], Sequence[Entry]]:
        """Record an allocation; return its answers and its new entries."""
        resource, host, allocated = request.resource, snapshot.host, snapshot.allocated
        entries = allocated.entries
        attachments: list[Attachment] = []
        given: list[Candidate] = []
        added: list[Entry] = []
        for ids in request.containers:
            devices = tuple(self._usable(snapshot.offer, ids, checked.against))
            allocated_devices = (
                allocated.allocated_devices
                if entries is allocated.entries
                else self._allocations.allocated_devices(entries)
            )
            if (reason := allocated_devices.conflict(resource, devices, allocated.unfinished)) is not None:
                raise AllocationRefusedError(reason)
            attachments.append(attach(host, resource, devices, self._state.terms.settings))
            given += devices
            added += (new := tuple(self._entries(resource, devices, allocated.recorded)))
            entries = record(entries, new)
        devices_by_slot = by_slot(host.facts.functions, given)
        targets = [(device.id, device.target) for device in given]
        try:
            self._gate.allocate(resource, devices_by_slot, targets, lambda: self._record(host, given, entries))
        except RefusedError as error:
            raise AllocationRefusedError(error.reason) from error
        self._allocations.add(added, allocated.recorded)
        self._callbacks.allocated()
        unseen = (checked.unseen[device.id] for device in given if device.id in checked.unseen)
        # only an agent with --plugin-only gives a device whose users it can't see
        message = (
            "is allocated, but may be in use by a process outside of pods: --plugin-only can't see the host's processes"
        )
        fix = "run the privileged agent (deploy/node.yaml), which refuses such devices"
        self._callbacks.unseen(next((replace(reason, message=message, fix=fix) for reason in unseen), None))
        return tuple(attachments), added

    def _record(self, host: Inventory, given: Sequence[Candidate], entries: tuple[Entry, ...]) -> None:
        """Record the tenants of GPUs on disk, and the allocations; raise RefusedError if a tenant would be forgotten.

        The tenant of a GPU that the kernel can reset may be forgotten.
        """
        kinds, functions = {device.target.gpu: _kind(device) for device in given}, host.facts.functions
        keeps_memory = [gpu for gpu in kinds if reset_of(functions, gpu) is not Reset.POSSIBLE]
        on_disk = bool(keeps_memory) and self._state.terms.settings.require_reset
        if (reason := self._state.tenancies.give(kinds, on_disk=on_disk)) is not None:
            raise RefusedError(replace(reason, subject=keeps_memory[0]))
        self._state.record_allocation(entries)

    def _remember_starts(self, added: Sequence[Entry], started: PodStarts | None) -> None:
        if self._started:
            known = {entry.allocation for entry in self._state.ledger.entries}
            self._started = {allocation: before for allocation, before in self._started.items() if allocation in known}
        if started is not None:
            self._started |= {entry.allocation: started for entry in added}

    def _usable(self, offer: Offer, ids: Sequence[DeviceId], against: Mapping[DeviceId, Reason]) -> Iterator[Candidate]:
        """Yield the devices of a request; raise AllocationRefusedError at the first that can't be allocated."""
        for device_id in dict.fromkeys(ids):
            reason = self._why_not(offer, device_id, against)
            if reason is None:
                yield offer.devices[device_id].candidate
            elif not self._may_be_left_out(offer, device_id, reason):
                raise AllocationRefusedError(reason)

    def _may_be_left_out(self, offer: Offer, device_id: DeviceId, reason: Reason) -> bool:
        """Return whether the settings allow to leave out an mdev that is gone or has another type."""
        device = offer.devices.get(device_id)
        is_mdev = device.candidate.framework is Framework.MDEV if device is not None else is_mdev_uuid(device_id)
        return self._state.terms.settings.compat.drop_mismatched_vgpus and is_mdev and reason.code in _MISMATCHES

    def _why_not(self, offer: Offer, device_id: DeviceId, against: Mapping[DeviceId, Reason]) -> Reason | None:
        device = offer.devices.get(device_id)
        if device is None and (withheld := self._state.memory.offers.withheld.get(device_id)) is not None:
            return withheld
        if device is None:
            return notoffered.unknown_device(device_id, offer.resource, tuple(offer.devices))
        # A kubelet that has lost its checkpoint requests the devices of pods that run.
        if (consumer := self._kubelet.lost().get((offer.resource, device_id))) is not None:
            return refusals.forgotten(device_id, consumer.text)
        return next(iter(device.health.against), None) or against.get(device_id)

    def _entries(
        self, resource: ResourceName, devices: Sequence[Candidate], recorded: Recorded | Unknown
    ) -> Iterator[Entry]:
        now, now_s = self._options.clock.now(), self._options.clock.monotonic_s()
        allocation = f"allocate:{self._name}:{next(self._numbers)}"
        for device in devices:
            before = pods_of(recorded, (resource, device.id))
            yield Entry(
                resource,
                device.id,
                device.target,
                device.group,
                allocation,
                now,
                allocated_s=now_s,
                recorded_for=before,
            )


def _to_read(snapshot: _Snapshot, device: Candidate, former: FormerTenants) -> AskedDevice:
    """Return the request to read a device again."""
    groups, allocated = snapshot.host.groups, snapshot.allocated
    return AskedDevice(
        carrier=device.carrier,
        gpu=device.target.gpu,
        vgpu=device.target.vgpu,
        framework=device.framework,
        group=device.group,
        members=groups.get(device.group, ()) if device.group is not None else (),
        may_open=allocated.allocated_devices.not_started(device, allocated.unfinished),
        had_tenant=former.needs_reset(device.target.gpu, _kind(device)),
    )


def _kind(device: Candidate) -> TenantKind:
    """Return how a pod with the device uses its GPU."""
    return TenantKind.VM if device.target.vgpu is None else TenantKind.NATIVE


def by_slot(
    functions: Mapping[PciAddress, PciFunction], devices: Sequence[Candidate]
) -> Mapping[str, Sequence[DeviceId]]:
    """Return devices by their PCI slots."""
    found: defaultdict[str, list[DeviceId]] = defaultdict(list)
    for device in devices:
        gpu = functions.get(device.target.gpu)
        found[slot_of(gpu.physfn or gpu.address if gpu is not None else device.target.gpu)].append(device.id)
    return found


_MISMATCHES = frozenset(
    {ReasonCode.AWAITED_AFTER_REBOOT, ReasonCode.DEVICE_GONE, ReasonCode.TYPE_CHANGED, ReasonCode.UNKNOWN_DEVICE}
)
