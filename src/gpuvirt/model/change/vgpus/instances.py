"""Decides which GPU instances are made and taken away, so that MIG-backed vGPUs find one each.

Nothing tells which of several equal instances a vGPU stands on, so of a kind that carries any, all stay. Only where
room is short are the vGPUs of that kind moved, and only while nobody has one of them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuvirt.facts.ids import VgpuId, VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import GpuInstance, LiveVgpu
from gpuvirt.model.change.steps import CreateInstance, DestroyInstance
from gpuvirt.model.change.vgpus.gpustate import (
    Counts,
    GpuState,
    is_mig,
    profile_of,
)
from gpuvirt.model.change.vgpus.instanceplaces import kind_of, place
from gpuvirt.model.reasons import Reason, shortfalls
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.profiles import Profile, resolve_type


@dataclass(frozen=True, slots=True)
class Cut:
    """How a GPU's instances change."""

    destroys: tuple[DestroyInstance, ...] = ()
    creates: tuple[CreateInstance, ...] = ()
    short: int = 0
    """How many of the needed instances find no place."""
    crowded: tuple[frozenset[str], ...] = ()
    """Kinds that carry vGPUs and could make room: first those of which there are too many, then all."""
    left: Mapping[str, int] | None = None
    """How many of each profile there are then; None where they are left alone."""


def instance_of(gpu_state: GpuState, vgpu_type: str) -> catalog.GpuInstance | None:
    """Return the GPU instance that a type stands on, None where that is not known."""
    profile = profile_of(vgpu_type)
    return gpu_state.card.gpu_instance(profile) if gpu_state.card is not None and profile is not None else None


def needed_instances(
    gpu_state: GpuState, desired: Counts | Mapping[str, int], others: Iterable[VgpuType] = ()
) -> Counter[str]:
    """Return how many instances of each profile wished types need, with those of `others` that stay beside them."""
    if gpu_state.card is None:
        return Counter()
    types: Counter[Profile] = Counter()
    for name, number in [*desired.items(), *((one, 1) for one in others)]:
        if (profile := profile_of(name)) is not None:
            types[profile] += number
    return Counter(dict(catalog.gpu_instances(gpu_state.card, types)))


def instances_of(gpu_state: GpuState) -> tuple[GpuInstance, ...]:
    """Return the instances that there are, none where that was not asked."""
    found = gpu_state.smi.modes.gpu_instances if gpu_state.smi is not None else ()
    return () if isinstance(found, Unread) else found


def too_many(gpu_state: GpuState, desired_counts: Counts, desired: Mapping[str, int]) -> Iterator[Reason]:
    """Yield what of the desired vGPUs finds no GPU instance, though the GPU carried nothing else."""
    gpu = gpu_state.host.gpu
    needed = needed_instances(gpu_state, desired or desired_counts)
    for vgpu_type, number in desired_counts.items():
        if number > gpu_state.most.get(vgpu_type, number):
            yield shortfalls.too_many(gpu, {vgpu_type: number}, gpu_state.most[vgpu_type])
            return
        there = sum(1 for one in gpu_state.host.live if one.type == vgpu_type)
        left = offered(gpu_state, vgpu_type)
        if instance_of(gpu_state, vgpu_type) is None and gpu_state.smi is not None and number > there + left:
            yield shortfalls.instance_unknown(gpu, vgpu_type)
    if gpu_state.card is not None and len(place(gpu_state.card, (), needed.elements())) < needed.total():
        yield shortfalls.no_slices(gpu, needed)


def plan(
    gpu_state: GpuState,
    desired_counts: Counts,
    desired: Mapping[str, int],
    live: Mapping[LiveVgpu, VgpuType],
    kept: set[VgpuId],
) -> tuple[Cut, set[VgpuId], list[Reason]]:
    """Return how GPU instances change, which kept vGPUs go for a moment to make room, and which can't.

    Instances are left alone where no MIG-backed vGPU is wanted, or where it is not known what one stands on.
    """
    cut_up = gpu_state.smi is not None and gpu_state.smi.modes.mig is True
    if not cut_up or not any(is_mig(one) for one in desired_counts) or not _known(gpu_state, desired_counts):
        return Cut(), set(), []
    others = [live[one] for one in live if one.id not in kept and one.id in gpu_state.users]
    others += gpu_state.leaving.values()
    needed = needed_instances(gpu_state, desired or desired_counts, others)
    staying = {one: vgpu_type for one, vgpu_type in live.items() if one.id in kept}
    in_use = {one: vgpu_type for one, vgpu_type in staying.items() if one.id in gpu_state.users}
    busy = {_kind(gpu_state, vgpu_type) for vgpu_type in (*others, *in_use.values())}
    found = _cut(gpu_state, needed, [*others, *staying.values()])
    moved: set[VgpuId] = set()
    for kinds in found.crowded:
        movable = {one.id for one, vgpu_type in staying.items() if _kind(gpu_state, vgpu_type) in kinds - busy}
        rest = [vgpu_type for one, vgpu_type in staying.items() if one.id not in movable]
        roomier = _cut(gpu_state, needed, [*others, *rest])
        if roomier.short < found.short:
            found, moved = roomier, movable
    crowded = found.crowded[0] if found.crowded else frozenset[str]()
    held = [
        shortfalls.vgpu_keeps_instances(one, gpu_state.users[one.id], kind)
        for one, vgpu_type in in_use.items()
        if (kind := _kind(gpu_state, vgpu_type)) is not None and kind in crowded
    ]
    return found, moved, held


def _cut(gpu_state: GpuState, needed: Counter[str], standing: Iterable[VgpuType]) -> Cut:
    """Return how instances change, so that there are as many as needed; `standing` vGPUs stay where they are.

    Where another is to be made, all free ones of a kind that has too many go, so that larger ones find places first.
    Where that is not enough, all free ones go, since they may lie across the place of a larger one.
    """
    there = sorted(instances_of(gpu_state), key=lambda one: (one.start, one.id))
    kinds = (kind_of(one.profile) for each in standing if (one := instance_of(gpu_state, each)) is not None)
    carrying = frozenset(kinds)
    free = [one for one in reversed(there) if kind_of(one.profile) not in carrying]
    have = Counter(one.profile for one in there)
    surplus = have - needed
    crowded = frozenset(kind_of(profile) for profile in surplus) & carrying
    found = _without(gpu_state, there, _first(free, have if needed - have else surplus, surplus), needed)
    if not found.short:
        return found
    thorough = _without(gpu_state, there, free, needed)
    best = thorough if thorough.short < found.short else found
    carried = frozenset(kind_of(one.profile) for one in there) & carrying
    return replace(best, crowded=tuple(dict.fromkeys(kinds for kinds in (crowded, carried) if kinds)))


def _first(free: Iterable[GpuInstance], numbers: Counter[str], surplus: Counter[str]) -> list[GpuInstance]:
    """Return so many of the free instances of each profile of which there are too many."""
    left = Counter({profile: numbers[profile] for profile in surplus})
    found: list[GpuInstance] = []
    for one in free:
        if left[one.profile] > 0:
            left[one.profile] -= 1
            found.append(one)
    return found


def _without(
    gpu_state: GpuState, there: Iterable[GpuInstance], gone: Sequence[GpuInstance], needed: Counter[str]
) -> Cut:
    """Return the cut by which some instances go, and what is missing then is made where it finds a place."""
    gpu, staying = gpu_state.host.gpu, [one for one in there if one not in gone]
    missing = needed - Counter(one.profile for one in staying)
    placed = place(gpu_state.card, staying, missing.elements()) if gpu_state.card is not None else []
    return Cut(
        tuple(DestroyInstance(gpu, one.id, one.profile) for one in gone),
        tuple(CreateInstance(gpu, profile, start) for profile, start in placed),
        missing.total() - len(placed),
        left=Counter((*(one.profile for one in staying), *(profile for profile, _ in placed))),
    )


def room(
    gpu_state: GpuState, made: Cut, desired: Iterable[str], vgpu_type: VgpuType, standing: Counter[VgpuType]
) -> int:
    """Return how many more of a type find an instance beside those that stand there; each type has its own.

    `wished` are names of types as somebody has them: a suffix may ask for another instance than the host's name does.
    """
    instance = instance_of(gpu_state, vgpu_type)
    if instance is None or made.left is None:
        return offered(gpu_state, vgpu_type)
    names = tuple(desired)
    ours = _profiles(gpu_state, names, vgpu_type)
    others = sum(
        -(-number // one.each)
        for other, number in standing.items()
        if other != vgpu_type and (one := instance_of(gpu_state, other)) is not None
        if ours & _profiles(gpu_state, names, other)
    )
    left = sum(number for profile, number in made.left.items() if profile in ours)
    return instance.each * (left - others) - standing[vgpu_type]


def _profiles(gpu_state: GpuState, desired: Iterable[str], vgpu_type: VgpuType) -> frozenset[str]:
    """Return the profiles of the instances that a type stands on, by all names under which it is wished."""
    known = gpu_state.known_types
    names = [name for name in desired if resolve_type(name, known) == vgpu_type] or [vgpu_type]
    return frozenset(one.profile for name in names if (one := instance_of(gpu_state, name)) is not None)


def offered(gpu_state: GpuState, vgpu_type: VgpuType) -> int:
    """Return how many more of a type the host says that it could make now."""
    return sum(types.get(vgpu_type, 0) for types in gpu_state.host.slots.values())


def _known(gpu_state: GpuState, types: Iterable[str]) -> bool:
    """Return whether it is known on which instances all of these MIG-backed types stand."""
    return all(instance_of(gpu_state, one) is not None for one in types if is_mig(VgpuType(one)))


def _kind(gpu_state: GpuState, vgpu_type: VgpuType) -> str | None:
    instance = instance_of(gpu_state, vgpu_type)
    return kind_of(instance.profile) if instance is not None else None
