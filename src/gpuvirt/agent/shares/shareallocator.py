"""Gives shares of GPUs to containers: the answers to Allocate and PreStartContainer.

Allocate knows neither pod nor container, so its answer is one CDI device with a random name that has no spec yet. The
kubelet records the answer with the pod and the container, and calls PreStartContainer before each start of the
container. Then the kubelet's record tells whose device it is, the pod's annotation tells the GPU, and the spec is
written. A container whose device has no spec does not start, and the kubelet tries again.

Source: kubelet/cm/devicemanager/manager.go of Kubernetes 1.36: allocateContainerResources, writeCheckpoint and
GetDeviceRunContainerOptions, which calls PreStartContainer with a container's device ids and a deadline of 30 s.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.agent.known.requests import AllocationRefusedError, AllocationRequest
from gpuvirt.agent.shares.gpuclaims import GpuClaims
from gpuvirt.agent.shares.nodeshares import NodeShares, RefusedCall, RefusedPod
from gpuvirt.clock import Clock, Deadline, Signal
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import DeviceId, PodUid, ResourceName
from gpuvirt.facts.pci import Unread
from gpuvirt.loops.serialworker import SerialWorker
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.attachment import Attachment
from gpuvirt.model.node.shares import NONE_GONE, CdiReading, PodReading, gone_pods
from gpuvirt.model.reasons import Reason, Seen, count_of, nodeproblems, notoffered, sharing
from gpuvirt.model.reasons.notoffered import CHECKPOINT
from gpuvirt.model.reasons.sharing import RETRIES
from gpuvirt.model.shares.demand import ContainerName, Units
from gpuvirt.model.shares.node import sharespec
from gpuvirt.model.shares.node.choice import NodeSharing, PodOnNode, choose, why_refused
from gpuvirt.model.shares.node.limits import NO_PATHS, LimitPaths, with_limits
from gpuvirt.model.shares.node.nvidiacdi import FOLDERS, Fields, NoCdiDeviceError, NvidiaGpu, container_edits
from gpuvirt.model.shares.node.records import ContainerRecord, KeptShare, PodRecord, ShareRecords, record_of

log = logging.getLogger(__name__)


class UnitAllocation(msgspec.Struct, frozen=True):
    """The units that one container has in the kubelet's record."""

    pod: PodUid
    container: ContainerName
    ids: frozenset[DeviceId]
    device: str | None
    """The CDI device of the answer to Allocate; None for an answer of another plugin."""


RunningPods = Callable[[Collection[PodUid]], frozenset[PodUid] | Unread]
"""Returns those of some pods that have processes on this host."""


class Accounts(msgspec.Struct, frozen=True):
    """The accounts of the pods on one node, besides the API server's."""

    recorded: Callable[[], Sequence[UnitAllocation] | Unknown]
    """Reads the kubelet's record of the resource."""
    running: RunningPods
    outdated: Signal = msgspec.field(default_factory=Signal)
    """Set when the kubelet's record still has pods that seem to have ended: it is to be written again."""


class GpuChoice:
    """The choice of GPUs on one node."""

    def __init__(self, shares: NodeShares, claims: GpuClaims) -> None:
        self._shares = shares
        self._claims = claims

    def why_refused(self, units: Units) -> Reason | None:
        """Return why no GPU can give units to any container now, None if one can."""
        shares, records = self._shares, self._shares.records
        state = shares.state.get()
        open_node, closed = self._open(state.node)
        reason = why_refused(units, open_node, records, shares.resource, state.kept_texts(records))
        if reason is None:
            return None
        if why_refused(units, state.node, records, "") is None:
            return closed
        return state.closed_by or reason

    async def choose(self, pod: PodOnNode, unit: DeviceId) -> PodRecord:
        """Choose the GPUs of a pod that has not started, and record them on disk; raise AllocationRefusedError.

        A GPU that a change has is no choice. `unit` is one of the ids that the container has.
        """
        shares = self._shares
        node, closed = self._open(shares.state.get().node)
        while True:
            found = choose(pod, node, shares.records, (shares.pods.known or {}).values())
            if found is None:
                raise AllocationRefusedError(closed or shares.state.get().closed_by or self._no_room(pod, node))
            if pod.unconfined is not None:
                raise AllocationRefusedError(pod.unconfined)
            new = record_of(pod.namespace, pod.name, pod.demand, found.containers)
            record = with_limits(new, node, requires=pod.requires_limits, soft=pod.soft_memory)
            if isinstance(record, Reason):
                raise AllocationRefusedError(record)
            try:
                with self._pending(pod.uid, record, unit):
                    await shares.store.save(shares.store.records.get().with_pod(pod.uid, record))
            except RefusedError as error:
                closed = error.reason
                node = replace(
                    node, capacity={gpu: units for gpu, units in node.capacity.items() if gpu not in found.used}
                )
                continue
            moved = pod.desired is not None and pod.desired.containers != found.containers
            log.info("pod %s/%s gets %s", pod.namespace, pod.name, dict(found.used), extra={"moved": moved})
            return record

    def claim_again(self, pod: PodRecord, container: ContainerName, unit: DeviceId) -> None:
        """Claim the GPUs of a container that does not start first of its pod; raise AllocationRefusedError."""
        share = pod.containers.get(container)
        try:
            self._claims.claim(share.gpus if share is not None else (), unit, lambda: None)
        except RefusedError as error:
            raise AllocationRefusedError(error.reason) from error

    @contextmanager
    def _pending(self, uid: PodUid, record: PodRecord, unit: DeviceId) -> Iterator[None]:
        """Claim the GPUs of a pod, and let changes see its share until it is on disk; raise RefusedError."""
        pending = self._shares.pending
        self._claims.claim(record.placement.used, unit, lambda: pending.set({**pending.get(), uid: record}))
        try:
            yield
        finally:
            pending.set({other: share for other, share in pending.get().items() if other != uid})

    def _open(self, node: NodeSharing) -> tuple[NodeSharing, Reason | None]:
        """Return a node without the GPUs that can't be claimed now, with the reason against the first of them."""
        reasons = {gpu: self._claims.why_closed(gpu) for gpu in sorted(node.capacity)}
        capacity = {gpu: units for gpu, units in node.capacity.items() if reasons[gpu] is None}
        return replace(node, capacity=capacity), next((reason for reason in reasons.values() if reason), None)

    def _no_room(self, pod: PodOnNode, node: NodeSharing) -> Reason:
        records = self._shares.records
        left = {str(gpu): int(units) for gpu, units in records.usage(node.capacity).free.items()}
        kept, placed = self._shares.state.get().kept_texts(records), pod.desired is not None
        return sharing.no_room(f"pod {pod.namespace}/{pod.name}", pod.demand.total, left, kept, placed=placed)


T = TypeVar("T")

ROOM_S = 1.5
"""How long Allocate waits for room before it refuses: the API server reports an ended pod a moment after the kubelet
has freed its units, and a refused pod fails for good. The kubelet admits no other pod meanwhile."""
POD_S = 10.0
"""How long PreStartContainer waits for the API server to report a pod, of the kubelet's 30 s."""
FILES_S = 5.0
READ_S = 5.0
"""The longest wait for the processes of the host; a walk through 2,000 takes less than a tenth of a second."""
TIDY_S = 30.0
KEPT_S = 2.0
"""Between readings while a pod that the API server lacks keeps its share."""
RECHECK_S = 0.1
"""From the first reading that lacks a pod to the second, which ends its share."""


class Dependencies(msgspec.Struct, frozen=True):
    """The dependencies of the allocator."""

    shares: NodeShares
    clock: Clock
    worker: SerialWorker
    """The worker that reads and writes CDI specs."""
    accounts: Accounts
    claims: GpuClaims
    decide: Callable[[], None]
    """Decides by what was observed of shares, and has them follow."""
    nonce: Callable[[], str] = msgspec.field(default=lambda: uuid.uuid4().hex)
    room_s: float = ROOM_S
    pod_s: float = POD_S
    recheck_s: float = RECHECK_S
    kept_s: float = KEPT_S


class ShareAllocator:
    """Answers the kubelet, and keeps the records and CDI specs of shares."""

    def __init__(self, dependencies: Dependencies) -> None:
        self._on = dependencies
        self._shares = dependencies.shares
        self._turn = asyncio.Lock()
        """Decisions and their records are made one after another."""
        self._choice = GpuChoice(dependencies.shares, dependencies.claims)

    @property
    def records(self) -> ShareRecords:
        """The shares of all containers."""
        return self._shares.store.records.get()

    def prefer(
        self, _resource: ResourceName, available: Sequence[DeviceId], must_include: Sequence[DeviceId], size: int
    ) -> tuple[DeviceId, ...]:
        """Return any units, since all are equal; the options of the plugin say that it prefers none."""
        return (*must_include, *(unit for unit in available if unit not in must_include))[:size]

    async def allocate(self, request: AllocationRequest) -> tuple[Attachment, ...]:
        """Return an answer for each container; raise AllocationRefusedError where no GPU has as many units."""
        for ids in request.containers:
            await self._until_room(Units(len(ids)))
        devices = (sharespec.device_name(self._on.nonce()) for _ in request.containers)
        return tuple(Attachment(sharespec.NO_GPUS, (), (device,)) for device in devices)

    async def pre_start(self, _resource: ResourceName, ids: Sequence[DeviceId]) -> None:
        """Write the CDI spec of the container that is about to start; raise AllocationRefusedError.

        An init container and an app container of a pod may have the same ids, and the kubelet does not say which of
        them starts. So the specs of all containers with these ids are written, and one that is refused has none.
        """
        found = self._recorded(frozenset(ids))
        await self._until_known(found)
        refused: list[AllocationRefusedError] = []
        for allocation in found:
            try:
                await self._prepare(allocation)
            except AllocationRefusedError as error:
                refused.append(error)
                self._shares.refusals.add(RefusedCall.PRE_START, error.reason, self._pod_of(allocation.pod))
                log.warning("share refused: %s", error, extra={"reason": str(error.reason.code)})
        if len(refused) == len(found):
            raise refused[0]

    async def run(self) -> None:
        """Remove the records and CDI specs of pods that have ended, until cancelled."""
        changed = Signal()
        with self._shares.pods.cell.notifying(changed):
            while True:
                try:
                    await self.tidy()
                except (OSError, GpuvirtError) as error:
                    # unknown: the shares are kept
                    log.warning("the shares of pods that have ended are kept: %s", error)
                await changed.wait_for(self._on.clock, self._pause_s)

    @property
    def _pause_s(self) -> float:
        state = self._shares.state.get()
        if state.lacking:
            return self._on.recheck_s
        return self._on.kept_s if state.kept else TIDY_S

    async def judge(self, every_s: float) -> None:
        """Conclude which GPUs containers can get, until cancelled: NVIDIA's CDI specs may change at any time."""
        shares, clock, changed = self._shares, self._on.clock, Signal()
        with shares.state.notifying(changed):
            while True:
                judged, until_s = shares.state.get(), clock.monotonic_s() + every_s
                if shares.in_use or judged.node.capacity:
                    await self._judge()
                while shares.state.get().is_judged_as(judged) and (left_s := until_s - clock.monotonic_s()) > 0:
                    await changed.wait_for(clock, left_s)

    async def _judge(self) -> None:
        shares = self._shares
        by = shares.state.get().published.enforcement

        def read() -> CdiReading:
            return CdiReading(shares.files.nvidia_specs(), shares.cdi_enabled(), shares.why_unlimited(by))

        try:
            reading = await self._in_worker(read)
        except (OSError, GpuvirtError) as error:
            # unknown: the offered units stay as they are
            log.warning("NVIDIA's CDI specs can't be read, so the offered units stay as they are: %s", error)
        else:
            state = shares.state.get()
            if state.with_cdi(reading) != state:
                shares.observed.set(replace(shares.observed.get(), cdi=reading))

    async def tidy(self) -> None:
        """Remove the files of pods that have ended; raise AllocationRefusedError or OSError."""
        async with self._turn:
            await self._end_shares()
            devices = self.records.devices
            await self._in_worker(lambda: self._shares.files.keep_only(devices))

    async def _end_shares(self) -> None:
        """Read the accounts of pods once, and end the shares of pods that two readings lack."""
        shares = self._shares
        gone = gone_pods(self.records, shares.pods.known)
        reading = await self._read_accounts(gone) if gone else NONE_GONE
        state = shares.state.get()
        if state.with_accounts(reading) != state:  # else the decisions would be the same
            shares.observed.set(replace(shares.observed.get(), accounts=reading))
            self._on.decide()
            state = shares.state.get()
        if KeptShare.RECORDED in state.kept.values():
            self._on.accounts.outdated.set()
        if state.ended:
            await shares.store.save(self.records.without(state.ended))

    async def _read_accounts(self, gone: frozenset[PodUid]) -> PodReading:
        """Read whether the kubelet's record and the processes of the host have pods; raise WorkerBlockedError."""
        accounts = self._on.accounts
        recorded = accounts.recorded()
        running = await self._on.worker.run(
            lambda: accounts.running(gone), name="the processes of deleted pods", timeout_s=READ_S
        )
        in_kubelet = recorded if isinstance(recorded, Unknown) else frozenset(allocation.pod for allocation in recorded)
        return PodReading(gone, in_kubelet, running)

    async def _until_room(self, units: Units) -> None:
        on, store, changed = self._on, self._shares.store, Signal()
        with closing(Deadline(on.clock, on.room_s)) as deadline, store.records.notifying(changed):
            while (reason := self._choice.why_refused(units)) is not None:
                if (left_s := deadline.left_s) <= 0:
                    self._shares.refusals.add(RefusedCall.ALLOCATE, reason)
                    raise AllocationRefusedError(reason)
                with suppress(OSError, GpuvirtError):  # unknown: the shares are kept
                    await self.tidy()
                await changed.wait_for(on.clock, min(left_s, on.recheck_s))

    def _recorded(self, ids: frozenset[DeviceId]) -> list[UnitAllocation]:
        """Return the containers that have exactly these units in the kubelet's record; there is at least one."""
        recorded = self._on.accounts.recorded()
        if isinstance(recorded, Unknown):
            raise self._not_recorded(len(ids), recorded.reason.text if recorded.reason is not None else "not read")
        found = [allocation for allocation in recorded if allocation.ids == ids and allocation.device is not None]
        if not found:
            raise self._not_recorded(len(ids), "no container with these units")
        return found

    def _not_recorded(self, units: int, why: str) -> AllocationRefusedError:
        reason = _not_recorded(self._shares.resource, units, why)
        self._shares.refusals.add(RefusedCall.PRE_START, reason)
        return AllocationRefusedError(reason)

    def _pod_of(self, uid: PodUid) -> RefusedPod | None:
        """Return the namespace and name of a pod; None if neither the API server nor a record has named it."""
        found = (self._shares.pods.known or {}).get(uid) or self.records.pods.get(uid)
        return RefusedPod(uid, found.namespace, found.name) if found is not None else None

    async def _until_known(self, found: Sequence[UnitAllocation]) -> None:
        """Wait until the API server has reported the pod of one of these containers, if none has started before.

        The kubelet knows a new pod a moment earlier or later than this agent.
        """
        known = self._shares.pods.known or {}
        if not any(allocation.pod in self.records.pods or allocation.pod in known for allocation in found):
            await asyncio.gather(
                *(self._shares.pods.wait_for(allocation.pod, self._on.clock, self._on.pod_s) for allocation in found)
            )

    async def _prepare(self, allocation: UnitAllocation) -> None:
        pod = await self._record(allocation)
        device = allocation.device or ""
        nonce = sharespec.nonce_of(device)
        if nonce is None:
            raise AllocationRefusedError(_not_recorded(device, len(allocation.ids), "an answer of another plugin"))
        async with self._turn:
            if allocation.pod not in self.records.pods:
                raise AllocationRefusedError(sharing.pod_unknown(f"pod {pod.namespace}/{pod.name}", "it has ended"))
            await self._shares.store.save(self.records.with_device(allocation.pod, allocation.container, device))
            await self._write(nonce, allocation, pod)

    async def _record(self, allocation: UnitAllocation) -> PodRecord:
        """Return the record of the container's pod, which is made when its first container starts."""
        record, unit = self.records.pods.get(allocation.pod), min(allocation.ids)
        known = (self._shares.pods.known or {}).get(allocation.pod)
        if (record is None or allocation.container not in record.containers) and (known is None or known.ended):
            detail = "it has ended" if known is not None else f"pod {allocation.pod} is not known"
            raise AllocationRefusedError(sharing.pod_unknown(f"container {allocation.container}", detail))
        async with self._turn:
            record = self.records.pods.get(allocation.pod)
            if record is not None:
                self._choice.claim_again(record, allocation.container, unit)
            elif known is not None:
                record = await self._choice.choose(known, unit)
            else:
                raise AllocationRefusedError(sharing.pod_unknown(f"container {allocation.container}", "it has ended"))
        if allocation.container not in record.containers:
            detail = "its requests have no such container with units"
            raise AllocationRefusedError(sharing.pod_unknown(f"container {allocation.container}", detail))
        requested = record.containers[allocation.container].units
        if requested != len(allocation.ids):
            subject = f"container {record.namespace}/{record.name}/{allocation.container}"
            raise AllocationRefusedError(
                notoffered.not_recorded(
                    subject,
                    f"has {count_of(len(allocation.ids), 'unit')} in the kubelet's record, but requests {requested}",
                    "create the pod again",
                    Seen(CHECKPOINT),
                )
            )
        return record

    async def _write(self, nonce: str, allocation: UnitAllocation, pod: PodRecord) -> None:
        minors, files = self._shares.state.get().node.minors, self._shares.files
        share = pod.containers[allocation.container]
        gpus = [NvidiaGpu(gpu, minors.get(gpu)) for gpu in sorted(share.gpus)]

        def write() -> None:
            edits = container_edits(files.nvidia_specs(), gpus)
            paths = self._limit_paths(share, edits.fields)
            files.write(nonce, sharespec.spec(nonce, allocation.pod, allocation.container, pod, edits, paths))

        try:
            await self._in_worker(write)
        except AllocationRefusedError:
            raise
        except NoCdiDeviceError as error:
            reason = sharing.no_cdi_device(", ".join(gpu.id for gpu in gpus), FOLDERS, str(error))
            raise AllocationRefusedError(reason) from error
        except (OSError, GpuvirtError) as error:
            path = files.folder / sharespec.file_name(nonce)
            raise AllocationRefusedError(nodeproblems.cdi_not_written(path, str(error), is_share=True)) from error

    def _limit_paths(self, share: ContainerRecord, edits: Fields) -> LimitPaths:
        """Return what the limit of a container needs; raise AllocationRefusedError if it would have no effect."""
        if share.limit is None:
            return NO_PATHS
        by, paths, gpu = share.limit.by, NO_PATHS, next(iter(share.gpus))
        if by.has_library:
            paths = self._shares.limit_files.ensure()
        if by.has_daemon:
            paths = replace(paths, pipes=self._shares.mps.ensure(gpu))
        if by.has_driver:
            paths = replace(paths, program=self._shares.driver.ensure(gpu, edits))
        return paths

    async def _in_worker(self, job: Callable[[], T]) -> T:
        return await self._on.worker.run(job, name="CDI specs of shares", timeout_s=FILES_S)


def _not_recorded(resource: str, units: int, why: str) -> Reason:
    """The kubelet's checkpoint names the container of each allocation."""
    message = f"can't be assigned: the kubelet's checkpoint names no container with these {count_of(units, 'unit')}"
    return notoffered.not_recorded(resource, message, RETRIES, Seen(CHECKPOINT, why))
