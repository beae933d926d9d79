"""Decides how a GPU comes to carry the vGPUs that are wanted of it: the least that must be removed and made.

What is in somebody's hands stays, wanted or not, and is waited for; what is wanted and there stays with its id. Ids of
new mediated devices follow from host, slot, type and a number, so that the same wish makes the same ids again.
"""

import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import NVIDIA, PciFunction, Unread
from gpuvirt.facts.vgpu import Framework, LiveVgpu, Scheduler
from gpuvirt.model import shortfalls
from gpuvirt.model.board import Board, Counts, is_mig, size_of
from gpuvirt.model.profiles import host_type, parse_profile, profile_name
from gpuvirt.model.reasons import Reason
from gpuvirt.model.vgpuentries import Sizes


@dataclass(frozen=True, slots=True)
class CarveWish:
    """What is wished of one GPU."""

    types: Mapping[str, int] = field(default_factory=dict)
    """How many of each type, as somebody has named it: `A10-4Q` as configs do, or `NVIDIA A10-4Q` as the host does."""
    sizes: Sizes | None = None
    """None leaves alone whether vGPUs of several sizes may be on it."""
    scheduler: Scheduler | None = None
    """None leaves its scheduler alone."""


@dataclass(frozen=True, slots=True)
class EnableVfs:
    """Have the VFs of a GPU, on which its vGPUs stand."""

    gpu: PciAddress

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.gpu}: switch its VFs on"


@dataclass(frozen=True, slots=True)
class RemoveVgpu:
    """Take a vGPU away that nobody has."""

    vgpu: VgpuId
    type: VgpuType
    slot: PciAddress

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.slot}: remove {self.type} {self.vgpu}"


@dataclass(frozen=True, slots=True)
class CreateVgpu:
    """Make a vGPU."""

    vgpu: VgpuId
    type: VgpuType
    slot: PciAddress

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.slot}: create {self.type} {self.vgpu}"


CarveStep = EnableVfs | RemoveVgpu | CreateVgpu


@dataclass(frozen=True, slots=True)
class CarvePlan:
    """What is to be done to one GPU."""

    gpu: PciAddress
    steps: tuple[CarveStep, ...] = ()
    pending: tuple[Reason, ...] = ()
    """What is waited for; the steps are what can be done meanwhile."""
    refusals: tuple[Reason, ...] = ()
    """Why nothing is done; there are no steps then."""

    @property
    def met(self) -> bool:
        """Whether the GPU carries what is wanted, and nothing else."""
        return not (self.steps or self.pending or self.refusals)


def plan_gpu(function: PciFunction, board: Board | None, wish: CarveWish) -> CarvePlan:
    """Return what is to be done to a GPU next; once that is done, the next plan follows from what is there then.

    A GPU whose VFs are not there yet says of no type that it knows it: they come first.
    """
    gpu = function.address
    if board is None:
        if not any(wish.types.values()):
            return CarvePlan(gpu)
        if _lacks_vfs(function):
            return CarvePlan(gpu, steps=(EnableVfs(gpu),))
        return CarvePlan(gpu, refusals=(shortfalls.no_vgpu_host(function, _why_no_host(function)),))
    wanted: Counter[VgpuType] = Counter()
    unknown: list[Reason] = []
    known = board.known_types
    for name, number in wish.types.items():
        vgpu_type = meant(name, known)
        if vgpu_type is None:
            unknown.append(shortfalls.no_such_type(gpu, name, [profile_name(one) for one in known]))
        else:
            wanted[vgpu_type] += number
    return CarvePlan(gpu, refusals=tuple(unknown)) if unknown else plan_carving(board, wanted)


def meant(name: str, known: Iterable[VgpuType]) -> VgpuType | None:
    """Return which of the types that a host knows somebody has named, by its own name or that of configs."""
    known = tuple(known)
    if VgpuType(name) in known:
        return VgpuType(name)
    try:
        return host_type(parse_profile(name), known)
    except InvalidIdError:
        return None


def _lacks_vfs(function: PciFunction) -> bool:
    native = isinstance(function.driver, str) and not function.on_vfio
    return native and function.id.vendor == NVIDIA and bool(function.sriov_total_vfs) and not function.virtfns


def _why_no_host(function: PciFunction) -> str:
    if isinstance(function.driver, Unread):
        return "it could not be read which driver it has"
    if function.on_vfio:
        return "it is bound to a VFIO driver, whole"
    if function.driver is None:
        return "no driver has it"
    return f"its driver {function.driver} makes no vGPUs of it; the one of the vGPU manager does, on a card that can"


def plan_carving(board: Board, wanted: Counts) -> CarvePlan:
    """Return what is to be done to a GPU so that it carries what is wanted."""
    wanted = {one: number for one, number in wanted.items() if number}
    refusals = tuple(_refusals(board, wanted))
    if refusals:
        return CarvePlan(board.host.gpu, refusals=refusals)
    live = _typed(board.host.live)
    kept = {one.id for vgpu_type, number in wanted.items() for one in _kept(board, live, vgpu_type, number)}
    excess = [one for one in board.host.live if one.id not in kept]
    stuck = [one for one in excess if one.id in board.users]
    removed = [one for one in excess if one.id not in board.users]
    missing = {
        vgpu_type: number - sum(1 for one in live if one.id in kept and live[one] == vgpu_type)
        for vgpu_type, number in wanted.items()
    }
    pending = [shortfalls.vgpu_in_use(one, board.users[one.id]) for one in stuck]
    pending += [shortfalls.vgpu_leaving(board.host.gpu, vgpu) for vgpu in sorted(board.leaving)]
    places = _Places(board, frozenset(one.id for one in removed))
    in_the_way = [*(live[one] for one in stuck), *board.leaving.values()]
    creates: list[CarveStep] = []
    for vgpu_type in sorted(missing, key=_largest_first):
        room = _room(board, wanted, vgpu_type, len(kept) + len(creates), in_the_way)
        creates += places.creates(vgpu_type, min(missing[vgpu_type], room))
    steps = (*(RemoveVgpu(one.id, live[one], one.slot) for one in sorted(removed, key=_by_place)), *creates)
    if not pending:
        short = sum(missing.values()) - len(creates)
        if short > 0:
            return CarvePlan(board.host.gpu, refusals=(shortfalls.no_slot(board.host.gpu, short),))
    return CarvePlan(board.host.gpu, steps, tuple(pending))


def _typed(live: Iterable[LiveVgpu]) -> Mapping[LiveVgpu, VgpuType]:
    return {one: one.type for one in live if not isinstance(one.type, Unread)}


def _refusals(board: Board, wanted: Counts) -> Iterator[Reason]:
    gpu = board.host.gpu
    for unread in board.host.unread:
        yield shortfalls.unread(gpu, unread)
    for one in board.host.live:
        if isinstance(one.type, Unread):
            yield shortfalls.unread(one.id, one.type)
    sizes = {size: vgpu_type for vgpu_type in sorted(wanted) if (size := size_of(vgpu_type)) is not None}
    if len(sizes) > 1 and not board.mixed_sizes and not any(is_mig(one) for one in wanted):
        yield shortfalls.sizes_differ(gpu, sorted(sizes.values()))
    elif not board.mixed_sizes:
        yield from _too_many(board, wanted)


def _too_many(board: Board, wanted: Counts) -> Iterator[Reason]:
    """Yield what is more than fits: types of one size share what the largest count of them allows."""
    known = [board.most[one] for one in wanted if one in board.most]
    total = sum(wanted.values())
    if known and len(known) == len(wanted) and total > max(known) and not any(is_mig(one) for one in wanted):
        yield shortfalls.too_many(board.host.gpu, wanted, max(known))


def _kept(board: Board, live: Mapping[LiveVgpu, VgpuType], vgpu_type: VgpuType, number: int) -> list[LiveVgpu]:
    """Return the vGPUs that fulfil a wish: first those in somebody's hands, then those that were there before."""
    found = [one for one, is_type in live.items() if is_type == vgpu_type]
    return sorted(found, key=lambda one: (one.id not in board.users, one.id not in board.remembered, _by_place(one)))[
        :number
    ]


def _room(board: Board, wanted: Counts, vgpu_type: VgpuType, there: int, in_the_way: Sequence[VgpuType]) -> int:
    """Return how many more of a type fit beside what is there as wanted, and what is there although it is not.

    Where it is not known how many fit, what is not wanted is taken to stand in the place of something that is.
    """
    if not board.mixed_sizes and any(size_of(other) != size_of(vgpu_type) for other in in_the_way):
        return 0
    most = sum(wanted.values()) if board.mixed_sizes else board.most.get(vgpu_type, sum(wanted.values()))
    return max(most - there - len(in_the_way), 0)


def _by_place(one: LiveVgpu) -> tuple[PciAddress, VgpuId]:
    return one.slot, one.id


def _largest_first(vgpu_type: VgpuType) -> tuple[int, VgpuType]:
    return -(size_of(vgpu_type) or 0), vgpu_type


class _Places:
    """Where new vGPUs of one GPU go, and what they are called."""

    def __init__(self, board: Board, removed: frozenset[VgpuId]) -> None:
        staying = [one for one in board.host.live if one.id not in removed]
        self._board = board
        self._taken = {one.id for one in staying} | board.leaving.keys()
        self._on_gpu = board.host.gpu in board.host.slots
        used = {one.slot for one in staying}
        closed = used | board.host.quarantined.keys()
        self._free = [board.host.gpu] if self._on_gpu else sorted(board.host.slots.keys() - closed)
        self._remembered = {id_: type_ for id_, type_ in sorted(board.remembered.items()) if id_ not in self._taken}

    def creates(self, vgpu_type: VgpuType, number: int) -> Iterator[CreateVgpu]:
        """Yield the steps that make so many of a type, as far as there are places; what pods had before comes first."""
        wanted_ids = [one for one, had in self._remembered.items() if had == vgpu_type][: max(number, 0)]
        for vgpu in wanted_ids:
            if (slot := self._slot_of(vgpu, vgpu_type)) is not None:
                yield self._take(vgpu, vgpu_type, slot)
        for _ in range(number - len(wanted_ids)):
            if not self._free:
                return
            slot = self._free[0]
            yield self._take(self._new_id(slot, vgpu_type), vgpu_type, slot)

    def _take(self, vgpu: VgpuId, vgpu_type: VgpuType, slot: PciAddress) -> CreateVgpu:
        self._taken.add(vgpu)
        self._remembered.pop(vgpu, None)
        if not self._on_gpu:
            self._free.remove(slot)
        return CreateVgpu(vgpu, vgpu_type, slot)

    def _slot_of(self, vgpu: VgpuId, vgpu_type: VgpuType) -> PciAddress | None:
        """Return where an id belongs: the slot that it names or follows from, else the first that is free."""
        here = [slot for slot in self._free if vgpu == VgpuId(slot) or vgpu in self._ids(slot, vgpu_type)]
        return next(iter(here or self._free), None)

    def _ids(self, slot: PciAddress, vgpu_type: VgpuType) -> list[VgpuId]:
        return [self._id(slot, vgpu_type, number) for number in range(len(self._board.host.slots) + 1)]

    def _new_id(self, slot: PciAddress, vgpu_type: VgpuType) -> VgpuId:
        if self._board.host.framework is not Framework.MDEV:
            return VgpuId(slot)
        later = {*self._taken, *self._remembered}
        return next(one for number in count() if (one := self._id(slot, vgpu_type, number)) not in later)

    def _id(self, slot: PciAddress, vgpu_type: VgpuType, number: int) -> VgpuId:
        return VgpuId(str(uuid.uuid5(self._board.namespace, f"{slot} {vgpu_type} {number}")))
