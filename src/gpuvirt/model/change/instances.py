"""Decides which GPU instances are made and taken away, so that MIG-backed vGPUs find one each.

Nothing tells which of several equal instances a vGPU stands on, so of a kind that carries any, all stay. Only where
room is short are the vGPUs of that kind moved, and only while nobody has one of them.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuvirt.facts.ids import VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import GpuInstance
from gpuvirt.model import catalog
from gpuvirt.model.change.gpustate import (
    Counts,
    GpuState,
    is_mig,
    profile_of,
)
from gpuvirt.model.change.steps import CreateInstance, DestroyInstance
from gpuvirt.model.profiles import Profile, resolve_type

_KIND = re.compile(r"([0-9]+)g\.[0-9]+gb")


@dataclass(frozen=True, slots=True)
class Cut:
    """How a GPU's instances change."""

    destroys: tuple[DestroyInstance, ...] = ()
    creates: tuple[CreateInstance, ...] = ()
    crowded: frozenset[str] = frozenset()
    """Kinds of which more are there than needed, and that must make room, though they carry vGPUs."""
    left: Mapping[str, int] | None = None
    """How many of each profile there are then; None where they are left alone."""


def instance_of(gpu_state: GpuState, vgpu_type: str) -> catalog.GpuInstance | None:
    """Return the GPU instance that a type stands on, None where that is not known."""
    profile = profile_of(vgpu_type)
    return gpu_state.card.gpu_instance(profile) if gpu_state.card is not None and profile is not None else None


def kind_of(profile: str) -> str:
    """Return what instances are told apart by: `1g.24gb` for `1g.24gb+gfx`, since a type may stand on both."""
    match = _KIND.match(profile)
    return match[0] if match else profile


def slices_of(profile: str) -> int:
    """Return how many of the GPU's compute slices an instance takes."""
    match = _KIND.match(profile)
    return int(match[1]) if match else 0


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


def cut(gpu_state: GpuState, needed: Counter[str], standing: Iterable[VgpuType]) -> Cut:
    """Return how instances change, so that there are as many as needed; `standing` vGPUs stay where they are.

    Where another is to be made, all free ones of a kind that has too many go, so that larger ones find places first.
    """
    there = sorted(instances_of(gpu_state), key=lambda one: (one.start, one.id))
    carrying = {
        kind_of(one.profile) for vgpu_type in standing if (one := instance_of(gpu_state, vgpu_type)) is not None
    }
    have = Counter(one.profile for one in there)
    surplus = have - needed
    if needed - have:
        surplus = Counter({profile: have[profile] for profile in surplus})
    gone: list[GpuInstance] = []
    for last in reversed(there):
        if surplus[last.profile] > 0 and kind_of(last.profile) not in carrying:
            surplus[last.profile] -= 1
            gone.append(last)
    staying = [one for one in there if one not in gone]
    missing = needed - Counter(one.profile for one in staying)
    slices = gpu_state.card.slices if gpu_state.card is not None else 0
    free = slices - sum(slices_of(one.profile) for one in staying)
    made: list[str] = []
    for profile in sorted(missing.elements(), key=lambda one: (-slices_of(one), one)):
        if slices_of(profile) <= free:
            free -= slices_of(profile)
            made.append(profile)
    short = len(made) < missing.total()
    gpu = gpu_state.host.gpu
    return Cut(
        tuple(DestroyInstance(gpu, one.id, one.profile) for one in gone),
        tuple(CreateInstance(gpu, profile) for profile in made),
        frozenset(kind_of(profile) for profile in +surplus if kind_of(profile) in carrying) if short else frozenset(),
        Counter((*(one.profile for one in staying), *made)),
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


def known(gpu_state: GpuState, types: Iterable[str]) -> bool:
    """Return whether it is known on which instances all of these MIG-backed types stand."""
    return all(instance_of(gpu_state, one) is not None for one in types if is_mig(VgpuType(one)))
