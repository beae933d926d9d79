"""Prepares the claims of pods (DRA): each GPU gets the driver of its shape, by the reconciler, and then its container.

A claim is recorded on disk before anything is changed for it: from then on it decides on the mode of its GPUs, so that
the one planner and the one reconciler convert them, with their proofs. A GPU is given through the gate, as a device
plugin's is. The call for a claim may come again at any time, and then finds what is left to do: after a kill at any
step there is one record, one spec and one driver, or none.

Contract: NodePrepareResources and NodeUnprepareResources of DRA v1. The kubelet gives up after 45 s and calls again.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from gpuvirt.agent.allocation.allocator import READ_TIMEOUT_S, Allocator
from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.agent.known.requests import AllocationRefusedError, AllocationRequest
from gpuvirt.agent.known.state import NodeState
from gpuvirt.agent.options import NodeOptions
from gpuvirt.agent.store.files import replace_file
from gpuvirt.agent.store.persisted import NotWrittenError, WriteBehind
from gpuvirt.clock import Signal
from gpuvirt.facts.ids import BootId, ClaimUid, DeviceId, PciAddress, PodUid
from gpuvirt.facts.snapshot import FreshFacts, UsersUnknown
from gpuvirt.hardware.devicefacts import AskedDevice, read_devices
from gpuvirt.loops.cell import Cell
from gpuvirt.loops.serialworker import WorkerBlockedError
from gpuvirt.model.allocation.claims import DRIVER, Claim, ClaimedGpu
from gpuvirt.model.allocation.ledger import Ledger
from gpuvirt.model.dra import claimfiles
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import Reason, claims, nodeproblems, refusals
from gpuvirt.paths import HostPath

log = logging.getLogger(__name__)

CALL_S = 40.0
"""How long a call waits for conversions: the kubelet gives up after 45 s."""


class ClaimRef(msgspec.Struct, frozen=True):
    """A claim, as the kubelet names it."""

    uid: ClaimUid
    namespace: str
    name: str


class PreparedGpu(msgspec.Struct, frozen=True):
    """A GPU of a claim, with the CDI device that a container gets for it."""

    claimed: ClaimedGpu
    pool: str
    cdi_device: str


class ReservedClaim(msgspec.Struct, frozen=True):
    """A claim as the API server has it, with the pods that may use it."""

    claim: Claim
    pods: frozenset[PodUid]


ReadClaim = Callable[[ClaimRef], Awaitable[ReservedClaim]]
"""Reads a claim at the API server; raises AllocationRefusedError where it can't be prepared."""


class ClaimParts(msgspec.Struct, frozen=True):
    """The parts of an agent by which claims are prepared."""

    state: NodeState
    options: NodeOptions
    change_host: ChangeHost
    allocator: Allocator
    ledger: WriteBehind[Ledger]
    views: Cell[NodeView]
    publish: Callable[[], None]
    """Decides by the claims that are recorded now."""

    async def write_ledger(self) -> None:
        """Write the ledger, and return when it would survive a power cut; raise NotWrittenError."""
        self.ledger.save(self.state.ledger.content)
        await self.ledger.write_now()


class ClaimFiles:
    """The CDI specs and the metadata of claims. Both folders have the same paths on the host."""

    def __init__(self, specs: Path, folder: Path) -> None:
        self._specs, self._folder = specs, folder

    def write(self, claim: Claim, nodes: Sequence[Sequence[HostPath]]) -> None:
        """Write a claim's files, the CDI spec last; raise OSError."""
        own = self._folder / claim.uid
        own.mkdir(parents=True, exist_ok=True, mode=0o755)
        for claimed in claim.gpus:
            content = claimfiles.metadata_of(claim, claimed)
            replace_file(own / claimfiles.metadata_name(claimed), content, durable=False, mode=0o644)
        self._specs.mkdir(parents=True, exist_ok=True, mode=0o755)
        spec = claimfiles.spec_of(claim, nodes, str(own))
        replace_file(self._specs / claimfiles.spec_name(claim.uid), spec, durable=False, mode=0o644)

    def exist(self, claim: Claim) -> bool:
        """Return whether a claim's CDI spec is there."""
        return (self._specs / claimfiles.spec_name(claim.uid)).is_file()

    def remove(self, uid: ClaimUid) -> None:
        """Remove a claim's files, if there are any; raise OSError."""
        (self._specs / claimfiles.spec_name(uid)).unlink(missing_ok=True)
        own = self._folder / uid
        with suppress(FileNotFoundError):
            for path in own.iterdir():
                path.unlink(missing_ok=True)
            own.rmdir()


class Preparing:
    """Prepares and unprepares the claims of one node's pods."""

    def __init__(self, parts: ClaimParts, files: ClaimFiles) -> None:
        self._state, self._clock = parts.state, parts.options.clock
        self._parts, self._files = parts, files
        self._locks = defaultdict[ClaimUid, asyncio.Lock](asyncio.Lock)
        """The kubelet may call again for a claim while its last call still works."""
        self.read: ReadClaim | None = None
        """Reads claims at the API server; None while the agent has no client of it."""

    async def prepare(self, ref: ClaimRef) -> tuple[PreparedGpu, ...]:
        """Return the GPUs of a claim, each on the driver of its shape; raise AllocationRefusedError."""
        async with self._locks[ref.uid]:
            claim = self._known(ref.uid) or await self._recorded(ref)
            if claim.prepared_in != self._boot or not self._files.exist(claim):
                until_s = self._clock.monotonic_s() + CALL_S
                nodes = [await self._given(claim, claimed, until_s) for claimed in claim.gpus]
                self._write(claim, nodes)
                await self._keep(replace(claim, prepared_in=self._boot or UNSET))
                log.info("prepared %s: %s", claim.text, ", ".join(claimed.device for claimed in claim.gpus))
            return tuple(
                PreparedGpu(claimed, claim.pool, claimfiles.cdi_device(claim, claimed)) for claimed in claim.gpus
            )

    async def unprepare(self, ref: ClaimRef) -> None:
        """End a claim; raise AllocationRefusedError while a process still has one of its GPUs open."""
        async with self._locks[ref.uid]:
            claim = self._known(ref.uid)
            for claimed in claim.gpus if claim is not None else ():
                if (reason := await self._why_in_use(claimed.gpu)) is not None:
                    raise AllocationRefusedError(claims.waits(ref.name, reason.text, is_ending=True))
            try:
                self._files.remove(ref.uid)
            except OSError as error:
                raise AllocationRefusedError(claims.not_written(ref.name, str(error))) from error
            if claim is not None:
                await self._forget(claim)
                log.info("unprepared %s", claim.text)
        self._locks.pop(ref.uid, None)

    @property
    def _boot(self) -> BootId | None:
        """The boot of the host, None before it was observed: the ledger may be from the boot before."""
        inventory = self._state.inventory
        return inventory.facts.platform.boot_id if inventory is not None else None

    def _known(self, uid: ClaimUid) -> Claim | None:
        return next((claim for claim in self._state.ledger.claims if claim.uid == uid), None)

    async def _recorded(self, ref: ClaimRef) -> Claim:
        """Return a claim that is on disk, and that decides on its GPUs from now on; raise AllocationRefusedError."""
        if self.read is None:
            raise AllocationRefusedError(claims.unknown(ref.name, "the agent has no client of the API server"))
        found = await self.read(ref)
        if (reason := next(self._against(found), None)) is not None:
            raise AllocationRefusedError(reason)
        await self._keep(found.claim)
        return found.claim

    def _against(self, found: ReservedClaim) -> Iterator[Reason]:
        """Yield why a claim can't have its GPUs, whatever the scheduler says: this is the last line."""
        name, inventory, ledger = found.claim.name, self._state.inventory, self._state.ledger
        if inventory is None:
            yield claims.waits(name, "the agent has not observed its host yet")
            return
        units = {address: gpu.unit for address, gpu in inventory.gpus.items()}
        for claimed in found.claim.gpus:
            unit = units.get(claimed.gpu) if claimed.gpu in self._state.memory.claimed else None
            if unit is None:
                yield claims.not_for_claims(name, claimed.gpu, is_present=claimed.gpu in units)
                continue
            for other in ledger.claims:
                if any(units.get(had.gpu) == unit for had in other.gpus):
                    yield claims.waits(name, f"{other.text} has {claimed.gpu}, or a GPU of its isolation unit")
            for entry in ledger.entries:  # of a device plugin, or of a claim that a lost ledger had
                pod = entry.consumer.pod_uid if entry.consumer is not None else None
                if units.get(entry.target.gpu) == unit and pod not in found.pods:
                    yield claims.waits(name, f"{entry.target.gpu} is allocated to {entry.allocated_to}")

    async def _given(self, claim: Claim, claimed: ClaimedGpu, until_s: float) -> tuple[HostPath, ...]:
        """Return the nodes of a GPU, which is recorded as the claim's; raise AllocationRefusedError."""
        changed = Signal()
        with self._parts.views.notifying(changed):
            while (waits := self._why_not_yet(claim, claimed.gpu)) is not None:
                lasting = waits.code is not claims.WAITS
                if lasting or not await changed.wait_for(self._clock, until_s - self._clock.monotonic_s()):
                    raise AllocationRefusedError(waits)
        request = AllocationRequest(DRIVER, ((DeviceId(claimed.gpu),),))
        (attachment,) = await self._parts.allocator.allocate(request)
        return attachment.device_nodes

    def _why_not_yet(self, claim: Claim, gpu: PciAddress) -> Reason | None:
        """Return why a GPU can't be given yet, or why its conversion is refused; None if it can be given."""
        device = self._state.memory.offers.for_claims.devices.get(DeviceId(gpu))
        if device is not None and device.health.healthy and gpu not in self._state.counted.functions:
            return None
        inventory = self._state.inventory
        unit = inventory.gpus[gpu].unit if inventory is not None and gpu in inventory.gpus else gpu
        noted = [reason for who, reason in self._state.picture.problems.items() if who.startswith(f"change {unit} ")]
        if lasting := next((reason for reason in noted if not reason.code.passes), None):
            return lasting
        seen = noted or list(device.health.against if device is not None else ())
        return claims.waits(claim.name, seen[0].text if seen else f"{gpu} is not on a VFIO driver yet")

    def _write(self, claim: Claim, nodes: Sequence[Sequence[HostPath]]) -> None:
        try:
            self._files.write(claim, nodes)
        except OSError as error:
            raise AllocationRefusedError(claims.not_written(claim.name, str(error))) from error

    async def _keep(self, claim: Claim) -> None:
        """Record a claim, and return when that would survive a power cut; raise AllocationRefusedError."""
        others = (other for other in self._state.ledger.claims if other.uid != claim.uid)
        await self._record(claim, (*others, claim))

    async def _forget(self, claim: Claim) -> None:
        gpus = {claimed.gpu for claimed in claim.gpus}
        entries = self._state.ledger.entries
        self._state.record_allocation(
            tuple(entry for entry in entries if entry.resource != DRIVER or entry.target.gpu not in gpus)
        )
        await self._record(claim, tuple(other for other in self._state.ledger.claims if other.uid != claim.uid))

    async def _record(self, claim: Claim, now: tuple[Claim, ...]) -> None:
        self._state.record_claims(now)
        try:
            await self._parts.write_ledger()
        except NotWrittenError as error:
            if claim.prepared_in is UNSET:  # it is not known yet, and nothing was changed for it
                self._state.record_claims(tuple(other for other in now if other != claim))
            raise AllocationRefusedError(claims.not_written(claim.name, str(error))) from error
        self._parts.publish()

    async def _why_in_use(self, gpu: PciAddress) -> Reason | None:
        """Return who has a GPU's group open, or why that is unknown; None if nobody has."""
        inventory = self._state.inventory
        function = inventory.facts.functions.get(gpu) if inventory is not None else None
        if inventory is None or function is None or not isinstance(function.iommu_group, int):
            return None  # its group is gone with it
        group, kernel, facts = function.iommu_group, self._parts.options.kernel, inventory.facts
        asked = AskedDevice(gpu, gpu, None, None, group, inventory.groups.get(group, ()), True, had_tenant=False)
        try:
            fresh: FreshFacts = await self._parts.options.workers("allocating").run(
                lambda: read_devices(kernel, facts, [asked]), name=f"read {gpu}", timeout_s=READ_TIMEOUT_S
            )
        except WorkerBlockedError as error:
            return nodeproblems.scan_blocked(gpu, str(error), "its claim stays until it can be read")
        busy, users = fresh.facts.busy_groups.get(group), fresh.users.get(group)
        if busy is None and (users is None or isinstance(users, UsersUnknown)):
            return refusals.users_unseen(gpu)
        known = users if isinstance(users, tuple) else ()  # unknown: that it is open is known
        unseen = busy if not known else None
        return refusals.in_use(gpu, known, forcible=False, unseen=unseen) if known or busy is not None else None
