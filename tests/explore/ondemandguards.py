"""The guards of on-demand vGPUs, each with its replacement when it is removed."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from gpuvirt.agent.change.gate.gate import Gate
from gpuvirt.agent.change.steps import vgpusteps
from gpuvirt.agent.change.steps.changes import Changes
from gpuvirt.agent.kubelet.accountwatch import AccountWatch
from gpuvirt.agent.kubelet.checkpoint import without_gone
from gpuvirt.agent.ondemand.ondemandallocator import OnDemandAllocator, _Request
from gpuvirt.agent.reconcile.podaccount import PodAccount
from gpuvirt.facts.ids import DeviceId, ResourceName, VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.vgpu import mdev
from gpuvirt.model.allocation import ledger, nodeledger
from gpuvirt.model.allocation.ledger import Entry, Known
from gpuvirt.model.change.plan import Scope
from gpuvirt.model.change.vgpus import gpustate
from gpuvirt.model.change.vgpus.gpustate import GpuState
from gpuvirt.model.devices.candidates import Candidate
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.node import recentvgpus
from gpuvirt.model.offers.ondemand import offer, ondemandstarts
from gpuvirt.model.offers.ondemand.offer import Carried
from gpuvirt.model.offers.ondemand.ondemandviews import candidate_of
from tests.explore.guard import DRAINS, GOES_ON, NEWEST, UNSETTLED, Guard, always, never, nothing, without_lease


async def _at_any_stage(allocating: OnDemandAllocator, request: _Request, device: DeviceId) -> Candidate | None:
    entry = allocating._entry(request.resource, device)
    return candidate_of(allocating._inventory(request.resource), entry) if entry is not None else None


async def _as_observed(allocating: OnDemandAllocator, resource: ResourceName, _: object) -> Inventory:
    return allocating._inventory(resource)


async def _without_record(*_: object) -> None:
    return None


_locate = ledger.locate


def _of_this_boot(entries: Iterable[Entry], known: Known, *, same_boot: bool) -> tuple[Entry, ...]:
    del same_boot
    return _locate(entries, known, same_boot=True)


@contextmanager
def _without_gate(*_: object) -> Iterator[int]:
    yield 0


_carried_by = offer.carried_by


def _without_removals(gpu_state: GpuState, intended: Iterable[VgpuType] = ()) -> Carried | Unread:
    coming = list(intended)
    found = _carried_by(gpu_state, coming)
    if isinstance(found, Unread):
        return found
    types = [vgpu.type for vgpu in gpu_state.host.live if vgpu.id in gpu_state.allocated]
    return Carried(Counter([*(kept for kept in types if not isinstance(kept, Unread)), *coming]), found.intended)


def _by_the_catalog(gpu_state: GpuState, _: Carried) -> Counter[VgpuType]:
    return Counter(dict(gpu_state.most))


_OWN_NODES = Guard(ondemandstarts, "_why_foreign", nothing, ("on-demand-power-loss-after-a-start",))
_FOLDERS = Guard(
    AccountWatch,
    "_without_gone",
    lambda watch, listed, in_api: without_gone(watch._paths, listed, in_api),
    ("on-demand-without-folder", "slow-neighbour"),
)

_LISTED_ROOM = Guard(mdev, "verify_room", nothing, ("on-demand-create-is-blocked",))

RARELY_NOTICED: Mapping[str, Guard] = {
    "on demand: a vGPU that is created as a change of its GPU ends": Guard(
        recentvgpus, "_is_allocated", never, ("on-demand-removal-ends",)
    ),
    "on demand: a container starts only with its vGPU's own nodes": _OWN_NODES,
    "on demand: no creation where the driver lists no room": _LISTED_ROOM,
}
"""Guards whose removal shows only in few of the schedules with two departures."""

ON_DEMAND_GUARDS: Mapping[str, Guard] = {
    "on demand: no vGPU with which a container has started": Guard(
        OnDemandAllocator, "_untouched", _at_any_stage, ("on-demand-id-again",)
    ),
    "on demand: the start is recorded": Guard(OnDemandAllocator, "pre_start", _without_record, ("on-demand-id-again",)),
    "on demand: the intent is on disk before the creation": Guard(
        OnDemandAllocator, "_write", _without_record, ("on-demand-power-loss",)
    ),
    "on demand: allocations of an earlier boot": Guard(nodeledger, "locate", _of_this_boot, ("on-demand-power-loss",)),
    "on demand: a container starts only with the recorded vGPU": Guard(
        ondemandstarts, "_why_not_its_vgpu", nothing, ("on-demand-power-loss",), beside=(_OWN_NODES,)
    ),
    "on demand: a vGPU is read again before a container starts": Guard(
        OnDemandAllocator, "_read_again", _as_observed, ("on-demand-removed-by-hand",)
    ),
    "on demand: an allocation is as new as the last request for its id": Guard(
        OnDemandAllocator, "_renewed", always, ("on-demand-id-of-a-refused-pod",)
    ),
    "account: a pod that has not got its folder": _FOLDERS,
    "on demand: both accounts are known": Guard(
        PodAccount,
        "_unknown",
        property(lambda _: None),
        ("on-demand-lost-ledger-and-account",),
        beside=(NEWEST, UNSETTLED),
    ),
    "on demand: no process has a vGPU open that is removed": Guard(
        vgpusteps,
        "leased",
        without_lease,
        ("on-demand-deleted-by-force",),
        beside=(Guard(gpustate, "_processes", lambda *_: {}, ()),),
    ),
    "on demand: a vGPU takes room until it is removed": Guard(
        offer,
        "carried_by",
        _without_removals,
        ("on-demand-two-types",),
        beside=(Guard(offer, "_creatable", _by_the_catalog, ()), _LISTED_ROOM),
    ),
    "gate: no creation where a change may touch the GPU": Guard(
        Changes,
        "_why_closed",
        nothing,
        ("on-demand-back-at-once",),
        beside=(Guard(Changes, "closed", property(lambda _: Scope()), ()),),
    ),
    "gate on disk: a creation": Guard(
        Gate, "creation", _without_gate, ("on-demand-or-command",), beside=(DRAINS, GOES_ON)
    ),
}
