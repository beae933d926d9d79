"""Allocates on-demand vGPUs: creates each for the pod that the kubelet admits, and gives it to no other pod.

Allocate knows neither pod nor container, so an allocation is known by the kubelet's id. The ledger has it on disk, with
the vGPU's id, before the vGPU is created. A container starts only with the vGPU that the kubelet's record names, and
from then on the vGPU is that pod's alone. The kubelet gives the id of a pod that has ended to the next pod while the id
is still listed: that pod gets a new vGPU.

Source: kubelet/cm/devicemanager/manager.go of Kubernetes 1.36: devicesToAllocate takes an init container's devices for
the pod's other containers, in one admission and before any of them starts.
"""

import asyncio
import itertools
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cache

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from gpuvirt.agent.allocation.allocator import READ_TIMEOUT_S
from gpuvirt.agent.change.allocationgate import AllocationGate
from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.agent.change.steps.leasing import RefusedError, what_failed
from gpuvirt.agent.known.kubeletrecord import KubeletRecord
from gpuvirt.agent.known.requests import AllocationRefusedError, AllocationRequest
from gpuvirt.agent.known.state import NodeState
from gpuvirt.agent.loops.telemetry import Telemetry
from gpuvirt.agent.options import NodeOptions
from gpuvirt.agent.store.persisted import NotWrittenError, WriteBehind
from gpuvirt.clock import Clock, Deadline, Signal
from gpuvirt.errors import VgpuUnavailableError
from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName, VgpuId, VgpuType, slot_of
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.sysfs import device_path
from gpuvirt.facts.vgpu import Framework, LiveVgpu, VgpuHost
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.devicefacts import AskedDevice, read_at_once, read_devices
from gpuvirt.hardware.functions import iommu
from gpuvirt.hardware.vgpu import mdev, vendor_vfio
from gpuvirt.hardware.vgpu.registry import backend_of
from gpuvirt.loops.serialworker import WorkerBlockedError, WorkerBusyError
from gpuvirt.model.allocation.allocations import pods_of
from gpuvirt.model.allocation.attachment import Attachment, attach
from gpuvirt.model.allocation.ledger import Entry, Ledger, Stage, record
from gpuvirt.model.allocation.ondemandids import is_on_demand_id
from gpuvirt.model.allocation.tenancy import TenantKind
from gpuvirt.model.change.steps import CreateVgpu
from gpuvirt.model.change.vgpus.gpustate import is_mig
from gpuvirt.model.desired.settings import CdiUse
from gpuvirt.model.devices.candidates import Candidate, Target
from gpuvirt.model.inventory.inventory import Inventory, build_inventory
from gpuvirt.model.inventory.naming import cdi_name
from gpuvirt.model.offers.namereview import withholdings
from gpuvirt.model.offers.ondemand.offer import VgpuPlace, choose, why_full
from gpuvirt.model.offers.ondemand.ondemandstarts import started
from gpuvirt.model.offers.ondemand.ondemandviews import candidate_of
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, nodeproblems, notoffered, refusals

WAIT_S = 4.0
"""On two slow cores, a vGPU was gone 1.4 s after a wait of 1.5 s had ended, and the pod had failed for good."""
PAUSE_S = 5.0
"""How long no pod waits after a wait that ended without room."""
RECHECK_S = 0.05


class RemovalWait:
    """How long Allocate waits for the removal of ended pods' vGPUs: the deadline of the present wait, or of the last.

    The kubelet admits pods one after another, and a refused pod fails for good. A pod is often admitted a moment before
    the vGPU of its predecessor is gone. But a full node must not delay each of many pods: once a wait has ended without
    room, the pods after it don't wait for a while.
    """

    def __init__(self, clock: Clock) -> None:
        self.begun = Signal()
        """Set when a wait begins."""
        self._clock = clock
        self._deadline: Deadline | None = None

    @property
    def waits(self) -> bool:
        """Whether an allocation waits now."""
        return self._deadline is not None and self._deadline.left_s > 0

    async def wait(self, changed: Signal, request: Deadline) -> bool:
        """Wait for a change; return False at the deadline, or at the request's own."""
        if self._deadline is None or self._deadline.left_s < -PAUSE_S:
            self._deadline = Deadline(self._clock, WAIT_S)
            self.begun.set()
        if (left_s := min(self._deadline.left_s, request.left_s)) <= 0:
            return False
        await changed.wait_for(self._clock, min(RECHECK_S, left_s))
        return True

    def end(self) -> None:
        """End a wait that found room: the next one has all its time."""
        if self._deadline is not None:
            self._deadline.close()
            self._deadline = None


class Creation(msgspec.Struct, frozen=True):
    """A vGPU that was created."""

    live: LiveVgpu
    cdevs: tuple[str, ...] = ()
    """The own nodes of the VF, which the kernel has made with the vGPU: `vfio0`. A VM with iommufd needs them."""
    host: VgpuHost | None = None
    """The GPU as its driver shows it after the creation of a MIG-backed vGPU; None for others, and where it could not
    be read."""


def create(
    change_host: ChangeHost,
    locks: Sequence[int],
    functions: Mapping[PciAddress, PciFunction],
    place: VgpuPlace,
    step: CreateVgpu,
) -> Creation:
    """Create a vGPU in its place; raise RefusedError. The process of the write keeps `locks` open.

    `functions` are those of the host. The kernel may block the write, and then this call.
    """
    with ExitStack() as stack:
        kernel: Kernel = change_host.kernel
        if change_host.children is not None:
            kernel, _ = stack.enter_context(change_host.children(locks))
        try:
            if place.host.framework is Framework.MDEV:
                # The agent may not have observed a vGPU yet whose creation the kernel had blocked.
                mdev.verify_room(kernel, step.parent, step.type)
            backend_of(place.host.framework).create(kernel, step.parent, step.type, step.vgpu)
        except (OSError, VgpuUnavailableError) as error:
            raise RefusedError(refusals.failed(step.text, place.gpu, what_failed(error))) from error
    live = _created(change_host.kernel, place, step)
    return Creation(
        live,
        _cdevs(change_host.kernel, place),
        _host_after(change_host.kernel, functions, place.host) if is_mig(step.type) else None,
    )


def _cdevs(kernel: Kernel, place: VgpuPlace) -> tuple[str, ...]:
    if place.host.framework is Framework.MDEV:
        return ()  # a mediated device is opened by its group
    found, nodes = iommu.read_cdevs(kernel, device_path(place.parent.address)), iommu.read_cdev_nodes(kernel)
    if isinstance(found, Unread) or isinstance(nodes, Unread) or not nodes.issuperset(found):
        return ()  # unknown: the VM opens the group, until a scan has read the nodes
    return found


def _host_after(kernel: Kernel, functions: Mapping[PciAddress, PciFunction], before: VgpuHost) -> VgpuHost | None:
    """Return a GPU's vGPUs, and what its driver lists now: no number tells in advance whether an instance is left."""
    gpu = functions[before.gpu]
    of_gpu = {address: functions[address] for address in (gpu.address, *gpu.virtfns) if address in functions}
    probe = backend_of(before.framework).probe(kernel, of_gpu, {before.gpu: before}, brief=False)
    return None if isinstance(probe, Unread) else probe.hosts.get(before.gpu)  # unknown: a scan follows


def _created(kernel: Kernel, place: VgpuPlace, step: CreateVgpu) -> LiveVgpu:
    """Return the new vGPU; raise RefusedError where the host does not show it as it was requested."""
    if place.host.framework is Framework.MDEV:
        live = mdev.read_new(kernel, step.vgpu, step.parent)
    else:
        live = vendor_vfio.read_new(kernel, place.parent, place.host)
    for found in (live.type, live.group) if live is not None else ():
        if isinstance(found, Unread):
            raise RefusedError(refusals.unread(step.vgpu, found))
    if live is None:
        raise RefusedError(refusals.failed(step.text, place.gpu, Seen.absent(str(step.vgpu))))
    if live.type != step.type:
        raise RefusedError(refusals.failed(step.text, place.gpu, Seen(str(step.vgpu), f"its type is {live.type}")))
    if live.group is None:
        raise RefusedError(refusals.no_group(step.vgpu))
    return live


log = logging.getLogger(__name__)

ALLOCATE_S = 5.0
"""How long all waits of a request may take, for room and for the kernel; the kubelet admits no other pod meanwhile."""


def _new_uuid() -> VgpuId:
    return VgpuId(str(uuid.uuid4()))


class OnDemandParts(msgspec.Struct, frozen=True):
    """The parts of an agent that the allocator uses."""

    state: NodeState
    options: NodeOptions
    kubelet: KubeletRecord
    change_host: ChangeHost
    """The host on which vGPUs are created."""
    gate: AllocationGate
    telemetry: Telemetry
    ledger: WriteBehind[Ledger]
    publish: Callable[[], None]
    """Shows the new allocation at once: in the view, in the lists, and in the CDI specs."""
    observe_soon: Callable[[], None]
    """Has the host observed soon: not every creation leads to a uevent."""
    changed: Signal
    """Set whenever the host or the allocations may have changed."""
    new_uuid: Callable[[], VgpuId] = msgspec.field(default=_new_uuid)


class _Request(msgspec.Struct, frozen=True):
    """A request that is being answered."""

    resource: ResourceName
    deadline: Deadline
    created: list[Entry] = msgspec.field(default_factory=list)
    """Its new allocations."""


class OnDemandAllocator:
    """Answers the kubelet for on-demand resources."""

    def __init__(self, parts: OnDemandParts) -> None:
        self._on = parts
        self._state = parts.state
        self._turn = asyncio.Lock()
        """Allocations are made one after another."""
        self.removal_wait = RemovalWait(parts.options.clock)
        """The wait for room."""
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._workers = cache(parts.options.workers)  # a worker's thread lasts as long as the process

    @staticmethod
    def takes(request: AllocationRequest) -> bool:
        """Return whether a request is one for on-demand vGPUs."""
        return any(is_on_demand_id(device) for device in itertools.chain.from_iterable(request.containers))

    def prefer(
        self, _resource: ResourceName, available: Sequence[DeviceId], must_include: Sequence[DeviceId], size: int
    ) -> tuple[DeviceId, ...]:
        """Return the ids that no pod has had first; a hint, which the kubelet need not follow."""
        known = {entry.device for entry in self._state.ledger.entries}
        others = sorted(
            (device for device in available if device not in must_include), key=lambda device: device in known
        )
        return (*must_include, *others)[:size]

    async def allocate(self, request: AllocationRequest) -> tuple[Attachment, ...]:
        """Create the vGPUs of a request; raise AllocationRefusedError for the whole request, which leaves nothing."""
        on, began_s = self._on, self._on.options.clock.monotonic_s()
        async with self._turn:
            with closing(Deadline(on.options.clock, ALLOCATE_S)) as deadline:
                asked = _Request(request.resource, deadline)
                try:
                    attachments = [await self._give(asked, ids) for ids in request.containers]
                except AllocationRefusedError as error:
                    self._take_back(asked.created)
                    on.telemetry.allocations[request.resource, error.reason.code] += 1
                    raise
        on.telemetry.allocations[request.resource, "given"] += 1
        on.telemetry.allocate_s.observe(on.options.clock.monotonic_s() - began_s)
        return tuple(attachments)

    async def _give(self, request: _Request, ids: Sequence[DeviceId]) -> Attachment:
        """Return the answer for one container.

        The environment has the vGPUs' own ids, names of CDI devices have the kubelet's.
        """
        resource = request.resource
        if (withholding := withholdings(self._state.memory.desired.spec).get(resource)) is not None:
            raise AllocationRefusedError(withholding.reason)
        devices: list[Candidate] = []
        for device in dict.fromkeys(ids):
            if (consumer := self._on.kubelet.lost().get((resource, device))) is not None:
                raise AllocationRefusedError(refusals.forgotten(device, consumer.text))
            devices.append(await self._untouched(request, device) or await self._new(request, device))
        inventory, settings = self._inventory(resource), self._state.terms.settings
        named = ids if settings.cdi is CdiUse.ANSWERS else ()
        names = tuple(cdi_name(resource, device) for device in dict.fromkeys(named))
        return replace(attach(inventory, resource, devices, settings), cdi_devices=names)

    def _inventory(self, resource: ResourceName) -> Inventory:
        """Return the host; raise AllocationRefusedError before its first observation."""
        if (inventory := self._state.inventory) is None:
            raise AllocationRefusedError(notoffered.unknown_resource(resource))
        return inventory

    async def _untouched(self, request: _Request, device: DeviceId) -> Candidate | None:
        """Return the vGPU of an id with which no container has started, None without one.

        The kubelet gives the id of an init container to the pod's other containers, and that of a pod that it has
        refused to the next pod. The allocation of any other id ends: its pod has ended, or its vGPU was never made. A
        vGPU of an agent that was killed may be recorded as intended only; its start would be on disk. The request of a
        pod that is not named yet waits while a change may touch the vGPU, since its init container may have it; raises
        AllocationRefusedError if that lasts.
        """
        while (entry := self._entry(request.resource, device)) is not None:
            found = candidate_of(self._inventory(request.resource), entry) if entry.stage is not Stage.STARTED else None
            if found is not None and self._renewed(entry):
                return found
            if found is None or entry.consumer is not None:
                self._drop([entry])
                return None
            if not await self.removal_wait.wait(self._on.changed, request.deadline):
                raise AllocationRefusedError(refusals.changing(device, None))
        return None

    def _renewed(self, entry: Entry) -> bool:
        """Record that an allocation is the next pod's, whom the accounts do not show yet; return False if a change
        may touch its vGPU."""
        clock = self._on.options.clock
        now, now_s = clock.now(), clock.monotonic_s()
        new = replace(entry, consumer=None, misses=0, since=now, allocated_s=now_s, earlier_boot=False)
        before = pods_of(self._on.kubelet.recorded(), (entry.resource, entry.device))
        new = replace(new, stage=Stage.CREATED, answered_group=UNSET, settled_s=UNSET, recorded_for=before)

        def renew() -> None:
            self._state.record_allocation(record(self._state.ledger.entries, [new]))

        try:
            with self._on.gate.creation(entry.device, entry.target, slot_of(entry.target.gpu), renew):
                return True
        except RefusedError:
            return False  # unknown: the pod gets another vGPU

    async def _new(self, request: _Request, device: DeviceId) -> Candidate:
        """Return a new vGPU; wait a moment for room, while vGPUs of ended pods are removed."""
        resource = request.resource
        offer, failed = self._state.memory.on_demand, dict[PciAddress, Reason]()
        vgpu_type = offer.type_of(resource)
        if vgpu_type is None or not offer.was_listed(device, self._state.terms.run_id):
            raise AllocationRefusedError(notoffered.unknown_device(device, resource, offer.listed(resource)))
        while True:
            inventory, spread = self._inventory(resource), self._state.terms.settings.vgpu_placement
            place = choose(inventory, self._state.on_demand_now(), vgpu_type, spread, failed)
            if place is not None:
                try:
                    made = await self._create(request, self._intended(resource, device, place, vgpu_type), place)
                except RefusedError as error:
                    log.warning("%s", error.reason.text, extra={"reason": str(error.reason.code)})
                    failed[place.gpu] = error.reason
                    continue
                self.removal_wait.end()
                return made
            self._on.publish()  # vGPUs without a pod are found, and removed
            if not await self.removal_wait.wait(self._on.changed, request.deadline):
                blocked = (reason for reason in failed.values() if reason.code is ReasonCode.WRITE_BLOCKED)
                texts = why_full(self._state.on_demand_now(), {gpu: why.message for gpu, why in failed.items()})
                raise AllocationRefusedError(
                    next(
                        blocked,
                        refusals.no_room(
                            resource,
                            f"has no room for another {vgpu_type} on any GPU of this node",
                            "create the pod again once a pod with a vGPU has ended; a Deployment or a Job does so by"
                            " itself",
                            *(
                                [Seen(gpu, text) for gpu, text in sorted(texts.items())]
                                or [Seen("this node", "no GPU in this mode")]
                            ),
                        ),
                    )
                )

    async def _create(self, request: _Request, entry: Entry, place: VgpuPlace) -> Candidate:
        """Create the vGPU of an allocation; after an error nothing is allocated.

        Raises RefusedError, after which the next GPU is tried, and AllocationRefusedError if the kernel blocks the
        creation. That creation may still go on, and one on the next GPU could be blocked as well.
        """
        gpu, change_host = place.gpu, self._on.change_host
        step = CreateVgpu(VgpuId(entry.target.id), entry.target.type or VgpuType(""), place.parent.address)

        def intend() -> None:
            self._tenant(gpu)
            self._state.record_allocation(record(self._state.ledger.entries, [entry]))

        try:
            with self._on.gate.creation(entry.device, entry.target, slot_of(gpu), intend) as locks:
                await self._write()
                functions = self._inventory(entry.resource).facts.functions
                made = await self._workers(f"create on {gpu}").run(
                    lambda: create(change_host, locks, functions, place, step),
                    name=step.text,
                    timeout_s=max(request.deadline.left_s, 0),
                )
                log.info("%s (for a pod that requests %s)", step.text, entry.resource)
                return self._created(request, entry, made)
        except WorkerBlockedError as error:
            self._drop([entry])
            blocked = refusals.blocked(gpu, f"{step.text} ({error})")
            if isinstance(error, WorkerBusyError):  # by an earlier request: this creation was not begun
                raise RefusedError(blocked) from error
            raise AllocationRefusedError(blocked) from error
        except RefusedError:
            self._drop([entry])
            raise

    def _tenant(self, gpu: PciAddress) -> None:
        """Record the tenant of the GPU; raise RefusedError if it would be forgotten."""
        kinds = {gpu: TenantKind.NATIVE}
        on_disk = self._state.terms.settings.require_reset
        if (reason := self._state.tenancies.give(kinds, on_disk=on_disk)) is not None:
            raise RefusedError(replace(reason, subject=gpu))

    def _intended(self, resource: ResourceName, device: DeviceId, place: VgpuPlace, vgpu_type: VgpuType) -> Entry:
        vgpu = self._on.new_uuid() if place.host.framework is Framework.MDEV else VgpuId(place.parent.address)
        target, clock = Target(place.gpu, vgpu, vgpu_type), self._on.options.clock
        allocation = f"allocate:{self._name}:{next(self._numbers)}"
        now, now_s = clock.now(), clock.monotonic_s()
        new = Entry(resource, device, target, None, allocation, now, allocated_s=now_s, stage=Stage.INTENDED)
        return replace(new, recorded_for=pods_of(self._on.kubelet.recorded(), (resource, device)))

    def _created(self, request: _Request, entry: Entry, creation: Creation) -> Candidate:
        """Record that the vGPU exists, and return it."""
        live, now_s = creation.live, self._on.options.clock.monotonic_s()
        group = live.group if isinstance(live.group, int) else None
        made = replace(entry, group=group, stage=Stage.CREATED)
        request.created.append(made)
        if creation.host is not None:
            self._state.observe_vgpus([creation.host], now_s)
        self._state.observe_created(entry.target.gpu, live, now_s, creation.cdevs)
        self._state.record_allocation(record(self._state.ledger.entries, [made]))
        self._on.publish()
        self._on.observe_soon()
        found = candidate_of(self._inventory(entry.resource), made)
        if found is None:
            raise RefusedError(refusals.changing(entry.device, None))
        return found

    async def _write(self) -> None:
        """Write the ledger; raise RefusedError where it can't be."""
        self._on.ledger.save(self._state.ledger.content)
        try:
            await self._on.ledger.write_now()
        except NotWrittenError as error:
            raise RefusedError(
                nodeproblems.not_written(
                    ReasonCode.LEDGER_NOT_WRITTEN, self._on.options.ledger, str(error), "no vGPU is created for a pod"
                )
            ) from error

    def _entry(self, resource: ResourceName, device: DeviceId) -> Entry | None:
        entries = self._state.ledger.entries
        return next((entry for entry in entries if (entry.resource, entry.device) == (resource, device)), None)

    def _drop(self, dropped: Sequence[Entry]) -> None:
        """End allocations: their vGPUs are removed like all vGPUs without a pod, with a proof."""
        keys = {(entry.resource, entry.device) for entry in dropped}
        entries = self._state.ledger.entries
        self._state.record_allocation(tuple(entry for entry in entries if (entry.resource, entry.device) not in keys))

    def _take_back(self, created: Sequence[Entry]) -> None:
        if created:
            self._drop(created)
            self._on.publish()

    async def pre_start(self, resource: ResourceName, ids: Sequence[DeviceId]) -> None:
        """Let a container start with its vGPUs; raise AllocationRefusedError if the kubelet's record has others.

        From the first start on, which is on disk, no other pod gets these vGPUs.
        """
        named = [device for device in ids if is_on_demand_id(device)]
        if not named:
            return
        inventory = await self._read_again(resource, named)
        # Only now: meanwhile another request may have changed the allocations, and the kubelet its record.
        entries = self._state.ledger.entries
        found = started(inventory, entries, self._on.kubelet.recorded(), resource, named)
        if isinstance(found, Reason):
            raise AllocationRefusedError(found)
        new = [entry for entry in found if entry not in entries]
        if not new:
            return
        self._state.record_allocation(record(entries, new))
        try:
            await self._write()
        except RefusedError as error:
            raise AllocationRefusedError(error.reason) from error

    async def _read_again(self, resource: ResourceName, devices: Sequence[DeviceId]) -> Inventory:
        """Return the host with the vGPUs of ids as they are now; raise AllocationRefusedError if the kernel blocks it.

        The last observation is up to 2 s old, and a vGPU that was removed by hand may have led to no uevent.
        """
        inventory = self._inventory(resource)
        facts = inventory.facts
        for device in devices:
            entry = self._entry(resource, device)
            vgpu = candidate_of(inventory, entry) if entry is not None else None
            if vgpu is not None:  # else the container does not start
                facts = await self._read(facts, vgpu)
        if facts is inventory.facts:
            return inventory
        self._on.observe_soon()
        return build_inventory(facts, self._state.ledger.type_names)

    async def _read(self, facts: Facts, vgpu: Candidate) -> Facts:
        """Return facts with a vGPU as it is now. Its group is not opened: the pod's VM may be starting."""
        kernel, gpu, target = self._on.options.kernel, vgpu.target.gpu, vgpu.target.vgpu
        asked = AskedDevice(vgpu.carrier, gpu, target, vgpu.framework, None, (), may_open=False, had_tenant=False)
        if (fresh := read_at_once(kernel, facts, [asked])) is not None:
            return fresh.facts
        try:
            fresh = await self._workers(f"read on {gpu}").run(
                lambda: read_devices(kernel, facts, [asked]), name=f"read {vgpu.id}", timeout_s=READ_TIMEOUT_S
            )
        except WorkerBlockedError as error:
            effect = "no container starts with it until it can be read"
            raise AllocationRefusedError(nodeproblems.scan_blocked(vgpu.id, str(error), effect)) from error
        return fresh.facts
