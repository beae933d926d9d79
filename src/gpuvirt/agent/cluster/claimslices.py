"""Publishes a node's GPUs for claims as ResourceSlices, and reads the claims of its pods, at the API server.

Slices are written only where they differ: an allocation writes none. What a claim may have stays published: a GPU that
claims shall get no more is tainted first, so that no scheduler gives it, and goes when no claim has it after that. The
kubelet deletes the slices of a node when it starts; the watch tells, and they are written again.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.claims.preparing import ClaimRef, ReservedClaim
from gpuvirt.agent.claims.publishing import Publishing
from gpuvirt.agent.cluster.keeping import KeeperDependencies, ReportOutcome
from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.agent.store.persisted import NotWrittenError
from gpuvirt.clock import Signal
from gpuvirt.facts.ids import ClaimUid, NodeName, PciAddress, PodUid
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ApiError
from gpuvirt.kube.kinds.resourceclaims import (
    ALL_CLAIMS,
    OF_POD,
    SLICES,
    ResourceClaim,
    ResourceSlice,
    Result,
    resource_claims,
)
from gpuvirt.model.allocation.claims import DRIVER, PREPARED_SHAPES, Claim, ClaimedGpu, named_gpu
from gpuvirt.model.dra.claimfiles import base_request
from gpuvirt.model.dra.pool import pool_of
from gpuvirt.model.dra.shapes import STANDARD, UNKNOWN
from gpuvirt.model.dra.slices import Fields, PoolContent, content_of, pool_name, slices_of
from gpuvirt.model.reasons import Reason, claims
from gpuvirt.plain import Plain

ReportProblem = Callable[[Reason | None], None]
"""Reports why GPUs are not published, None where all are."""
LOWEST = (1, 36, 3)
"""Older schedulers give a device twice (#139040, #140431 of kubernetes/kubernetes)."""
EVERY_S = 5.0
"""The time between two looks, and so the shortest one between two rewrites of slices that nobody deletes."""
TAINT: Mapping[str, Plain] = {"key": f"{DRIVER}/leaving", "effect": "NoSchedule"}
PCI_BUS_ID = f"{STANDARD}/pciBusID"


def reserved(found: ResourceClaim, uid: ClaimUid) -> ReservedClaim | Reason:
    """Return a claim with its GPUs of this driver, or why they can't be prepared."""
    metadata, allocation = found.metadata, found.status.allocation
    if metadata.uid != uid:
        return claims.unknown(metadata.name, f"it has the UID {metadata.uid}, and the kubelet asks for {uid}")
    results = [result for result in allocation.devices.results if result.driver == DRIVER] if allocation else []
    if allocation is None or not results:
        return claims.unknown(metadata.name, "no GPU is allocated to it")
    if any(config.opaque is not None and config.opaque.driver == DRIVER for config in allocation.devices.config):
        fix = "remove the configuration for gpuvirt.io from the claim and from its DeviceClass"
        return claims.invalid(metadata.name, "$.status.allocation.devices.config", "gpuvirt.io has no settings", fix)
    requests = [base_request(result.request) for result in results]
    if len(set(requests)) < len(requests):
        what, fix = "a request has two GPUs, and a VM takes one of each", "write two requests in place of count: 2"
        return claims.invalid(metadata.name, "$.spec.devices.requests", what, fix)
    gpus = [_claimed(metadata.name, result) for result in results]
    if (reason := next((gpu for gpu in gpus if isinstance(gpu, Reason)), None)) is not None:
        return reason
    template = metadata.annotations.get(OF_POD)
    given = tuple(gpu for gpu in gpus if isinstance(gpu, ClaimedGpu))
    claim = Claim(uid, metadata.namespace, metadata.name, results[0].pool, given, template or msgspec.UNSET)
    return ReservedClaim(claim, frozenset(PodUid(pod.uid) for pod in found.status.reserved_for))


def _claimed(claim: str, result: Result) -> ClaimedGpu | Reason:
    path, named = "$.status.allocation.devices.results", named_gpu(result.device)
    if result.admin_access:
        fix = "request the GPU without adminAccess: gpuvirt's metrics and gpuvirt doctor show its state"
        return claims.invalid(claim, path, "a GPU that is given by adminAccess may be a VM's", fix)
    if named is None or named[1] not in PREPARED_SHAPES:
        fix = "delete the pod and the claim: a new claim gets a device that this version publishes"
        return claims.invalid(claim, path, f"{result.device} is no device that this version prepares", fix)
    return ClaimedGpu(result.request, named[0], named[1], result.device)


async def read_claim(client: Client, ref: ClaimRef) -> ReservedClaim:
    """Return a claim as the API server has it; raise AllocationRefusedError."""
    try:
        found = reserved(await client.get(resource_claims(ref.namespace), ref.name, ResourceClaim), ref.uid)
    except ApiError as error:
        raise AllocationRefusedError(claims.unknown(ref.name, str(error))) from error
    if isinstance(found, Reason):
        raise AllocationRefusedError(found)
    return found


class SliceKeeper:
    """Keeps the slices of one node."""

    def __init__(self, dependencies: KeeperDependencies, publishing: Publishing) -> None:
        self._client, self._clock = dependencies.client, dependencies.clock
        self._node = NodeName(dependencies.node)
        self._publishing = publishing
        self._found: tuple[ResourceSlice, ...] | None = None
        self._node_uid = ""
        self._listed = False
        """Whether claims were listed in this run: what they have must be published before anything else is."""
        self._version: tuple[int, ...] | None = None
        self._desired = frozenset[str]()
        """The names of the slices that were written, or found, last."""
        self._deleted = Signal()

    def observe(self, delta: Delta[ResourceSlice]) -> None:
        """Record the slices of the node, of all drivers."""
        before = {found.metadata.name for found in self._found or ()}
        self._found = tuple(delta.objects.values())
        if self._desired & before - {found.metadata.name for found in self._found}:
            self._deleted.set()

    def observe_node(self, uid: str) -> None:
        """Record the node's UID: it owns the slices."""
        self._node_uid = uid

    async def run(self, report: ReportOutcome, report_problem: ReportProblem) -> None:
        """Keep the slices until cancelled; `report` gets each error of the API server, None after a success.

        Slices that are deleted are back at once, but not more often than every `EVERY_S`.
        """
        again_s = 0.0
        while True:
            try:
                report_problem(await self.look())
                report(None)
            except ApiError as error:
                report(error)
            except NotWrittenError as error:
                report_problem(claims.not_published(claims.THE_GPUS, f"the ledger can't be written: {error}"))
            if await self._deleted.wait_for(self._clock, EVERY_S):
                if (left_s := again_s - self._clock.monotonic_s()) > 0:
                    await self._clock.sleep(left_s)
                again_s = self._clock.monotonic_s() + EVERY_S

    async def look(self) -> Reason | None:
        """Write what differs; return why a GPU is not published as it should be."""
        if self._found is None or not self._node_uid:
            return None
        own = sorted((found for found in self._found if found.driver == DRIVER), key=lambda found: found.metadata.name)
        if not (self._publishing.in_use or own):
            return None
        if (old := await self._why_too_old()) is not None and not own:
            return old
        if not self._listed:
            await self._publishing.record(self._publishing.published | await self._held())
            self._listed = True
        if (shaped := await self._publishing.shaped()) is None:  # what is published stays so
            return self._publishing.problem
        others = dict(self._of_others())
        gpus = [gpu for gpu in shaped.gpus if gpu.address not in others]
        before = _published(own)
        leaving = await self._leaving(frozenset(gpu.address for gpu in gpus), before)
        await self._publishing.record(leaving | {gpu.address for gpu in gpus} | _addresses(before))
        desired = _with_known(content_of(pool_of(gpus)), before)
        problem = await self._write(own, _with_leaving(desired, leaving, before))
        if problem is None:
            await self._publishing.record(leaving | {gpu.address for gpu in gpus})
        refused = (claims.offered_by_other(gpu, *others[gpu]) for gpu in sorted(shaped.desired & others.keys()))
        return problem or shaped.problem or next(refused, None)

    async def _why_too_old(self) -> Reason | None:
        if self._version is None:
            text = await self._client.server_version()
            self._version = tuple(int(number) for number in re.findall(r"[0-9]+", text)[:3])
        lowest = ".".join(map(str, LOWEST))
        return claims.too_old(".".join(map(str, self._version)), lowest) if self._version < LOWEST else None

    def _of_others(self) -> Iterator[tuple[PciAddress, tuple[str, str]]]:
        """Yield the GPUs that other drivers publish, with the driver and its slice."""
        for found in self._found or ():
            for device in found.devices if found.driver != DRIVER else ():
                attribute = device.attributes.get(PCI_BUS_ID)
                if attribute is not None and attribute.string is not None:
                    yield PciAddress(attribute.string), (found.driver, found.metadata.name)

    async def _held(self) -> frozenset[PciAddress]:
        """Return the GPUs of this node that claims have at the API server: one paged list."""
        held = set[PciAddress]()
        for claim in (await self._client.list(ALL_CLAIMS)).items:
            for result in claim.status.allocation.devices.results if claim.status.allocation is not None else ():
                named = named_gpu(result.device)
                if result.driver == DRIVER and result.pool == pool_name(self._node) and named is not None:
                    held.add(named[0])
        return frozenset(held)

    async def _leaving(self, desired: frozenset[PciAddress], before: PoolContent) -> frozenset[PciAddress]:
        """Return the published GPUs that are not desired, and that a claim has, or may get before the taint."""
        leaving = self._publishing.published - desired
        tainted = {_gpu_of(device) for device in before.devices if device.get("taints")}
        free = leaving - self._publishing.claimed
        free -= {_gpu_of(device) for device in before.devices} - tainted
        return leaving - (free - await self._held()) if free else leaving

    async def _write(self, own: Sequence[ResourceSlice], content: PoolContent) -> Reason | None:
        """Make the slices as they should be, counters first; return why the API server can't have them."""
        generation = max((_generation(found) for found in own), default=0)
        known = {found.metadata.name: found for found in own}
        desired = slices_of(content, self._node, generation)
        differ = [written for written in desired if not _is_same(known.get(_name(written)), written)]
        self._desired = frozenset(map(_name, desired))
        surplus = known.keys() - self._desired
        if not differ and not surplus:
            return None
        if len(differ) > 1 or surplus or len(known) < len(desired):
            differ = list(slices_of(content, self._node, generation + 1))
        for written in differ:
            answer = await self._put(written, known.get(_name(written)))
            if (dropped := _dropped(written, answer)) is not None:
                return claims.fields_dropped(_name(written), dropped)
        for name in sorted(surplus):
            await self._client.delete(SLICES, name)
        return None

    async def _put(self, written: Fields, known: ResourceSlice | None) -> ResourceSlice:
        owner: Plain = {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": self._node_uid}
        metadata: dict[str, Plain] = {"name": _name(written), "ownerReferences": [owner]}
        if known is None:
            return await self._client.create(SLICES, {**written, "metadata": metadata}, ResourceSlice)
        metadata["resourceVersion"] = known.metadata.resource_version
        return await self._client.update(SLICES, _name(written), {**written, "metadata": metadata}, ResourceSlice)


def _name(written: Fields) -> str:
    return str(cast("Fields", written["metadata"])["name"])


def _generation(found: ResourceSlice) -> int:
    pool = found.content.get("pool")
    generation = pool.get("generation") if isinstance(pool, dict) else None
    return generation if isinstance(generation, int) else 0


def _published(own: Iterable[ResourceSlice]) -> PoolContent:
    """Return the content of the slices at the API server."""
    devices, sets = list[Fields](), list[Fields]()
    for found in own:
        devices += _items(found.content.get("devices"))
        sets += _items(found.content.get("sharedCounters"))
    return PoolContent(tuple(devices), tuple(sets))


def _items(value: Plain) -> Iterator[Fields]:
    yield from (item for item in value if isinstance(item, dict)) if isinstance(value, list) else ()


def _gpu_of(device: Fields) -> PciAddress:
    named = named_gpu(str(device.get("name")))
    return named[0] if named is not None else PciAddress("")


def _addresses(content: PoolContent) -> frozenset[PciAddress]:
    return frozenset(filter(None, map(_gpu_of, content.devices)))


def _with_known(content: PoolContent, before: PoolContent) -> PoolContent:
    """Return the content with the attributes that were known before: a GPU on a VFIO driver shows no UUID."""
    known = {str(device.get("name")): device.get("attributes") for device in before.devices}
    devices = (_remembering(device, known.get(str(device["name"]))) for device in content.devices)
    return replace(content, devices=tuple(devices))


def _remembering(device: Fields, before: Plain) -> Fields:
    now = device["attributes"]
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return device
    kept = {
        name: before[name] if value == {"string": UNKNOWN} and name in before else value for name, value in now.items()
    }
    return {**device, "attributes": kept}


def _with_leaving(content: PoolContent, leaving: frozenset[PciAddress], before: PoolContent) -> PoolContent:
    """Return the content with the devices of leaving GPUs as they are published, tainted, and with their counters."""
    stay = [device for device in before.devices if _gpu_of(device) in leaving]
    left: tuple[Fields, ...] = tuple({**device, "taints": [dict(TAINT)]} for device in stay)
    consumed = {str(found.get("counterSet")) for device in stay for found in _items(device.get("consumesCounters"))}
    names = {str(counters["name"]) for counters in content.counter_sets}
    sets = tuple(found for found in before.counter_sets if str(found.get("name")) in consumed - names)
    return PoolContent((*content.devices, *left), (*content.counter_sets, *sets))


def _is_same(known: ResourceSlice | None, written: Fields) -> bool:
    return known is not None and _without_times(known.content) == _without_times(cast("Fields", written["spec"]))


def _without_times(spec: Fields) -> Plain:
    """Return the content of a slice without the times of taints, which the API server adds."""
    devices: list[Plain] = [
        {**device, "taints": [{**taint, "timeAdded": None} for taint in _items(device.get("taints"))]}
        for device in _items(spec.get("devices"))
    ]
    return {**spec, "devices": devices}


def _dropped(written: Fields, answer: ResourceSlice) -> str | None:
    """Return a field that the API server has dropped, since its feature gate is off; None if it has all."""
    spec = cast("Fields", written["spec"])
    for field in ("sharedCounters", "devices"):
        theirs = list(_items(answer.content.get(field)))
        for item, stored in zip(_items(spec.get(field)), theirs, strict=False):
            if (lacking := next((name for name in item if name not in stored), None)) is not None:
                return f"{field}.{lacking}"
        if len(theirs) < len(list(_items(spec.get(field)))):
            return field
    return None
