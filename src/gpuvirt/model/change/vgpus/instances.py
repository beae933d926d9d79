"""Decides which GPU instances are created and destroyed, so that each MIG-backed vGPU finds one.

Neither the kernel nor nvidia-smi shows on which of several equal instances a vGPU is, so all instances of a kind stay
while a vGPU is on any of them. Only where room is short are the vGPUs of that kind moved, and only if all are free.

An instance's share of the card's memory slices is its share of the card's framebuffer. It starts at a multiple of its
size, and its compute slices must end by the card's last. These are the placements that `nvidia-smi mig -lgipp` lists
(NVIDIA's MIG user guide), and they give the number of instances that NVIDIA documents for each card of the catalog.
"""

import re
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import Framework, GpuInstance, LiveVgpu
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.steps import CreateInstance, CreateVgpu, DestroyInstance
from gpuvirt.model.change.vgpus.gpustate import (
    Counts,
    GpuState,
    is_mig,
    profile_of,
)
from gpuvirt.model.reasons import Reason, shortfalls
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.catalog import Card
from gpuvirt.model.vgputypes.profiles import Profile, resolve_type


# The id of a new mediated device follows from the host, the parent, the type and a number, so the same desired state
# leads to the same ids.
class VgpuPlaces:
    """The free parents of one GPU, and the ids of its new vGPUs."""

    def __init__(self, gpu_state: GpuState, removed: Mapping[VgpuId, VgpuType]) -> None:
        """Take the state of a GPU, and the vGPUs that are removed first; new vGPUs of their types get their ids."""
        staying = [vgpu for vgpu in gpu_state.host.live if vgpu.id not in removed]
        self._gpu_state = gpu_state
        self._taken = {vgpu.id for vgpu in staying} | gpu_state.leaving.keys()
        self._on_gpu = gpu_state.host.gpu in gpu_state.host.creatable
        used = {vgpu.parent for vgpu in staying}
        closed = used | gpu_state.host.quarantined.keys()
        self._free = [gpu_state.host.gpu] if self._on_gpu else sorted(gpu_state.host.creatable.keys() - closed)
        self._parents: dict[VgpuType, Mapping[VgpuId, PciAddress]] = {}
        # vGPUs that pods had come before those that are only removed for a moment.
        before = {**gpu_state.remembered, **removed}
        self._remembered = {id_: type_ for id_, type_ in before.items() if id_ not in self._taken}

    def creates(self, vgpu_type: VgpuType, number: int) -> Iterator[CreateVgpu]:
        """Yield the steps that create vGPUs of a type, as far as there are parents; ids that pods had come first."""
        former_ids = [vgpu for vgpu, had in self._remembered.items() if had == vgpu_type][: max(number, 0)]
        missing = number
        for vgpu in former_ids:
            if (parent := self._parent_of(vgpu, vgpu_type)) is not None:
                missing -= 1
                yield self._take(vgpu, vgpu_type, parent)
        for _ in range(missing):
            if not self._free:
                return
            parent = self._free[0]
            yield self._take(self._new_id(parent, vgpu_type), vgpu_type, parent)

    def create_again(self, vgpu: VgpuId, vgpu_type: VgpuType) -> CreateVgpu | None:
        """Return the step that creates a vGPU with a former id, which takes its parent; None if there is none."""
        parent = self._parent_of(vgpu, vgpu_type)
        return self._take(vgpu, vgpu_type, parent) if parent is not None else None

    def _take(self, vgpu: VgpuId, vgpu_type: VgpuType, parent: PciAddress) -> CreateVgpu:
        self._taken.add(vgpu)
        self._remembered.pop(vgpu, None)
        if not self._on_gpu:
            self._free.remove(parent)
        return CreateVgpu(vgpu, vgpu_type, parent)

    def _parent_of(self, vgpu: VgpuId, vgpu_type: VgpuType) -> PciAddress | None:
        """Return the free parent of an id: the one that it names or follows from, else the first.

        None if there is no such parent, as with an id that is the address of another VF.
        """
        if self._gpu_state.host.framework is not Framework.MDEV:
            return next((parent for parent in self._free if vgpu == VgpuId(parent)), None)
        if vgpu_type not in self._parents:
            numbers = range(len(self._gpu_state.host.creatable) + 1)
            self._parents[vgpu_type] = {
                self._id(parent, vgpu_type, number): parent for parent in self._free for number in numbers
            }
        parent = self._parents[vgpu_type].get(vgpu)
        return parent if parent in self._free else next(iter(self._free), None)

    def _new_id(self, parent: PciAddress, vgpu_type: VgpuType) -> VgpuId:
        if self._gpu_state.host.framework is not Framework.MDEV:
            return VgpuId(parent)
        unavailable = {*self._taken, *self._remembered}
        return next(id_ for number in count() if (id_ := self._id(parent, vgpu_type, number)) not in unavailable)

    def _id(self, parent: PciAddress, vgpu_type: VgpuType, number: int) -> VgpuId:
        return VgpuId(str(uuid.uuid5(self._gpu_state.namespace, f"{parent} {vgpu_type} {number}")))


_KIND = re.compile(r"([0-9]+)g\.([0-9]+)gb")
_MIB_PER_GB = 1024


def kind_of(profile: str) -> str:
    """Return the kind of a profile, `1g.24gb` for `1g.24gb+gfx`: a type may use instances of both."""
    match = _KIND.match(profile)
    return match[0] if match else profile


def place(card: Card, standing: Iterable[GpuInstance], profiles: Iterable[str]) -> list[tuple[str, int]]:
    """Return the profiles that fit beside the `standing` instances, each with the memory slice at which it starts.

    Large instances come first, and each takes the last place that is free, which leaves the most room for others: only
    an instance of more than one memory slice can use the last of an A100's eight.
    """
    taken = {number for instance in standing for number in range(instance.start, instance.start + instance.size)}
    placed: list[tuple[str, int]] = []
    for profile in sorted(profiles, key=lambda name: (-_size(card, name), -_compute_slices(name), name)):
        size = _size(card, profile)
        free = (start for start in reversed(starts(card, profile)) if taken.isdisjoint(range(start, start + size)))
        if (start := next(free, None)) is not None:
            taken |= set(range(start, start + size))
            placed.append((profile, start))
    return placed


def starts(card: Card, profile: str) -> list[int]:
    """Return the memory slices at which an instance may start; none if `profile` is not one of a GPU instance."""
    size, compute_slices = _size(card, profile), _compute_slices(profile)
    if not size:
        return []
    return [start for start in range(0, _memory_slices(card), size) if start + compute_slices <= card.slices]


def _memory_slices(card: Card) -> int:
    """Return the number of memory slices: the next power of two, so eight for seven compute slices."""
    return 1 << (card.slices - 1).bit_length()


def _size(card: Card, profile: str) -> int:
    match = _KIND.match(profile)
    return round(int(match[2]) * _MIB_PER_GB * _memory_slices(card) / card.framebuffer_mib) if match else 0


def _compute_slices(profile: str) -> int:
    match = _KIND.match(profile)
    return int(match[1]) if match else 0


class InstanceChanges(msgspec.Struct, frozen=True):
    """The changes of a GPU's instances."""

    destroys: tuple[DestroyInstance, ...] = ()
    creates: tuple[CreateInstance, ...] = ()
    short: int = 0
    """The number of needed instances that find no place."""
    crowded: tuple[frozenset[str], ...] = ()
    """Kinds that carry vGPUs and could make room: first those with too many instances, then all."""
    left: Mapping[str, int] | None = None
    """The number of instances of each profile afterwards; None if they do not change."""


def instance_of(gpu_state: GpuState, vgpu_type: str) -> catalog.NeededInstance | None:
    """Return the GPU instance that a type needs, None if that is not known."""
    profile = profile_of(vgpu_type)
    return gpu_state.card.gpu_instance(profile) if gpu_state.card is not None and profile is not None else None


def needed_instances(
    gpu_state: GpuState, desired: Counts | Mapping[str, int], others: Iterable[VgpuType] = ()
) -> Counter[str]:
    """Return how many instances of each profile the desired types need, with those of `others`, which stay."""
    if gpu_state.card is None:
        return Counter()
    types: Counter[Profile] = Counter()
    for name, number in [*desired.items(), *((other, 1) for other in others)]:
        if (profile := profile_of(name)) is not None:
            types[profile] += number
    return Counter(dict(catalog.gpu_instances(gpu_state.card, types)))


def instances_of(gpu_state: GpuState) -> tuple[GpuInstance, ...]:
    """Return the GPU's instances, none if nvidia-smi has not reported them."""
    found = gpu_state.smi.modes.gpu_instances if gpu_state.smi is not None else ()
    return () if isinstance(found, Unread) else found  # unknown: refused by `modes`


def too_many(gpu_state: GpuState, desired_counts: Counts, desired: DesiredVgpus) -> Iterator[Reason]:
    """Yield why the desired vGPUs would find too few GPU instances even on an empty GPU."""
    gpu = gpu_state.host.gpu
    needed = needed_instances(gpu_state, desired.types or desired_counts)
    for vgpu_type, number in desired_counts.items():
        if number > gpu_state.most.get(vgpu_type, number):
            yield shortfalls.too_many(gpu, {vgpu_type: number}, gpu_state.most[vgpu_type], added=desired.added)
            return
        existing = sum(1 for vgpu in gpu_state.host.live if vgpu.type == vgpu_type)
        left = offered(gpu_state, vgpu_type)
        if instance_of(gpu_state, vgpu_type) is None and gpu_state.smi is not None and number > existing + left:
            yield shortfalls.no_room(
                gpu,
                vgpu_type,
                "no GPU instance is left for this type, and the profile that it needs is not known",
                f"create the instances by hand: nvidia-smi mig -i {gpu} -lgip, then -cgi PROFILE",
            )
    if gpu_state.card is not None and len(place(gpu_state.card, (), needed.elements())) < needed.total():
        yield shortfalls.no_room(
            gpu,
            f"the GPU instances {shortfalls.counted(needed)}",
            "they don't fit side by side",
            "name fewer or smaller vGPUs in the vGPU config",
        )


def plan(
    gpu_state: GpuState,
    desired_counts: Counts,
    desired: Mapping[str, int],
    live: Mapping[LiveVgpu, VgpuType],
    kept: set[VgpuId],
) -> tuple[InstanceChanges, set[VgpuId], list[Reason]]:
    """Return the changes of GPU instances, the kept vGPUs that move to make room, and why others can't move.

    The instances do not change if no MIG-backed vGPU is desired, or if it is not known which instance a type needs.
    """
    in_mig_mode = gpu_state.smi is not None and gpu_state.smi.modes.mig is True  # unknown: no instance changes
    if not in_mig_mode or not any(is_mig(name) for name in desired_counts) or not _known(gpu_state, desired_counts):
        return InstanceChanges(), set(), []
    others = [live[vgpu] for vgpu in live if vgpu.id not in kept and vgpu.id in gpu_state.users]
    others += gpu_state.leaving.values()
    needed = needed_instances(gpu_state, desired or desired_counts, others)
    staying = {vgpu: vgpu_type for vgpu, vgpu_type in live.items() if vgpu.id in kept}
    in_use = {vgpu: vgpu_type for vgpu, vgpu_type in staying.items() if vgpu.id in gpu_state.users}
    busy = {_kind(gpu_state, vgpu_type) for vgpu_type in (*others, *in_use.values())}
    changes = _changes(gpu_state, needed, [*others, *staying.values()])
    moved: set[VgpuId] = set()
    for kinds in changes.crowded:
        movable = {vgpu.id for vgpu, vgpu_type in staying.items() if _kind(gpu_state, vgpu_type) in kinds - busy}
        rest = [vgpu_type for vgpu, vgpu_type in staying.items() if vgpu.id not in movable]
        roomier = _changes(gpu_state, needed, [*others, *rest])
        if roomier.short < changes.short:
            changes, moved = roomier, movable
    crowded = changes.crowded[0] if changes.crowded else frozenset[str]()
    kept_by_users = [
        shortfalls.vgpu_in_use(
            vgpu, gpu_state.users[vgpu.id], f"is on an unknown one of its GPU's {kind} instances, so all of them stay"
        )
        for vgpu, vgpu_type in in_use.items()
        if (kind := _kind(gpu_state, vgpu_type)) is not None and kind in crowded
    ]
    return changes, moved, kept_by_users


def _changes(gpu_state: GpuState, needed: Counter[str], remaining: Iterable[VgpuType]) -> InstanceChanges:
    """Return the changes that lead to the needed instances while vGPUs of the `remaining` types stay where they are.

    If an instance is to be created, all free ones of each kind that has too many are destroyed, so that larger ones
    find places first. If that is not enough, all free ones are, since they may lie across the place of a larger one.
    """
    existing = sorted(instances_of(gpu_state), key=lambda instance: (instance.start, instance.id))
    needed_by_vgpus = (instance_of(gpu_state, vgpu_type) for vgpu_type in remaining)
    carrying = frozenset(kind_of(instance.profile) for instance in needed_by_vgpus if instance is not None)
    free = [instance for instance in reversed(existing) if kind_of(instance.profile) not in carrying]
    have = Counter(instance.profile for instance in existing)
    surplus = have - needed
    crowded = frozenset(kind_of(profile) for profile in surplus) & carrying
    changes = _without(gpu_state, existing, _first(free, have if needed - have else surplus, surplus), needed)
    if not changes.short:
        return changes
    thorough = _without(gpu_state, existing, free, needed)
    best = thorough if thorough.short < changes.short else changes
    carried = frozenset(kind_of(instance.profile) for instance in existing) & carrying
    return replace(best, crowded=tuple(dict.fromkeys(kinds for kinds in (crowded, carried) if kinds)))


def _first(free: Iterable[GpuInstance], numbers: Counter[str], surplus: Counter[str]) -> list[GpuInstance]:
    """Return the first free instances of each profile that has too many, up to a number for each profile."""
    left = Counter({profile: numbers[profile] for profile in surplus})
    found: list[GpuInstance] = []
    for instance in free:
        if left[instance.profile] > 0:
            left[instance.profile] -= 1
            found.append(instance)
    return found


def _without(
    gpu_state: GpuState, existing: Iterable[GpuInstance], gone: Sequence[GpuInstance], needed: Counter[str]
) -> InstanceChanges:
    """Return the changes that destroy the `gone` instances, and create the missing ones that find a place."""
    gpu, staying = gpu_state.host.gpu, [instance for instance in existing if instance not in gone]
    missing = needed - Counter(instance.profile for instance in staying)
    placed = place(gpu_state.card, staying, missing.elements()) if gpu_state.card is not None else []
    return InstanceChanges(
        tuple(DestroyInstance(gpu, instance.id, instance.profile) for instance in gone),
        tuple(CreateInstance(gpu, profile, start) for profile, start in placed),
        missing.total() - len(placed),
        left=Counter((*(instance.profile for instance in staying), *(profile for profile, _ in placed))),
    )


def room(
    gpu_state: GpuState,
    changes: InstanceChanges,
    desired: Iterable[str],
    vgpu_type: VgpuType,
    existing: Counter[VgpuType],
) -> int:
    """Return how many more vGPUs of a type find an instance beside the existing ones; types do not share instances.

    `desired` has the types' names in the config, whose suffix may ask for another instance than the host's name does.
    """
    instance = instance_of(gpu_state, vgpu_type)
    if instance is None or changes.left is None:
        return offered(gpu_state, vgpu_type)
    names = tuple(desired)
    ours = _profiles(gpu_state, names, vgpu_type)
    others = sum(
        -(-number // shared.each)
        for other, number in existing.items()
        if other != vgpu_type and (shared := instance_of(gpu_state, other)) is not None
        if ours & _profiles(gpu_state, names, other)
    )
    left = sum(number for profile, number in changes.left.items() if profile in ours)
    return instance.each * (left - others) - existing[vgpu_type]


def certain_room(gpu_state: GpuState, vgpu_type: VgpuType, carried: Counts) -> int | None:
    """Return how many more vGPUs of a type find a GPU instance beside those that the GPU carries, None if unknown.

    Each carried vGPU of another type counts as having an instance for itself: several of them may share one, and after
    removals each may be on another.
    """
    instance, smi = instance_of(gpu_state, vgpu_type), gpu_state.smi
    if instance is None or smi is None or smi.modes.mig is not True:  # unknown: the number of instances is unknown, too
        return None
    if isinstance(smi.modes.gpu_instances, Unread):
        return None
    kind = kind_of(instance.profile)
    number = sum(existing.profile == instance.profile for existing in smi.modes.gpu_instances)
    others = sum(
        count
        for other, count in carried.items()
        if other != vgpu_type and _kind(gpu_state, other) in {kind, None}  # unknown: may be on an instance of this kind
    )
    return instance.each * (number - others) - carried.get(vgpu_type, 0)


def _profiles(gpu_state: GpuState, desired: Iterable[str], vgpu_type: VgpuType) -> frozenset[str]:
    """Return the profiles of the instances that a type needs, by all names under which it is desired."""
    known = gpu_state.known_types
    names = [name for name in desired if resolve_type(name, known) == vgpu_type] or [vgpu_type]
    return frozenset(found.profile for name in names if (found := instance_of(gpu_state, name)) is not None)


def offered(gpu_state: GpuState, vgpu_type: VgpuType) -> int:
    """Return how many more vGPUs of a type can be created now, by the host's files."""
    return sum(types.get(vgpu_type, 0) for types in gpu_state.host.creatable.values())


def _known(gpu_state: GpuState, types: Iterable[str]) -> bool:
    """Return whether the instance that each of these MIG-backed types needs is known."""
    return all(instance_of(gpu_state, name) is not None for name in types if is_mig(VgpuType(name)))


def _kind(gpu_state: GpuState, vgpu_type: VgpuType) -> str | None:
    instance = instance_of(gpu_state, vgpu_type)
    return kind_of(instance.profile) if instance is not None else None
