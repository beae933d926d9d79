"""Decides which modes the desired vGPUs of a GPU need, and why the GPU can't have these modes."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, islice

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import PciAddress, PciId, VgpuType
from gpuvirt.facts.pci import NVIDIA, PciFunction, Unread
from gpuvirt.facts.vgpu import Framework, GpuModes
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.steps import ModeStep, SetMigMode, SetMixedSizes
from gpuvirt.model.change.vgpus import scheduling
from gpuvirt.model.change.vgpus.gpustate import (
    Counts,
    GpuState,
    is_mig,
    profile_of,
    size_of,
)
from gpuvirt.model.desired.vgpuconfig import Sizes
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, refusals, shortfalls
from gpuvirt.model.reasons.shortfalls import SMI
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.catalog import Card, CardType
from gpuvirt.model.vgputypes.profiles import Profile, resolve_type

# The driver chooses placements by itself, so it may refuse vGPUs that fit by this module. vGPUs that do not fit by this
# module never fit.
MOST_LAYOUTS = 20_000
"""The most layouts of larger vGPUs that are tried. If there are more, the smaller vGPUs count as fitting."""
MIB_PER_GB = 1024


def fits(card: Card | None, counts: Mapping[VgpuType, int]) -> bool:
    """Return whether a card has room for these numbers of vGPUs at once; types that it does not have take no room."""
    if card is None:
        return True
    types = _by_size(card, counts)
    sizes = Counter({gb: sum(counts[vgpu_type] for vgpu_type in found) for gb, found in types.items()})
    known = {gb: card_type for gb, found in types.items() if (card_type := _card_type(card, found[0])) is not None}
    if any(card_type.most_mixed is not None and sizes[gb] > card_type.most_mixed for gb, card_type in known.items()):
        return False
    if sum((gb * MIB_PER_GB or MIB_PER_GB // 2) * number for gb, number in sizes.items()) > card.framebuffer_mib:
        return False
    placed = [
        (gb, sizes[gb], card_type.placements)
        for gb, card_type in known.items()
        if gb and card_type.placements is not None
    ]
    return _packs(sorted(placed, reverse=True))


def may_lack_room(function: PciFunction, counts: Mapping[VgpuType, int]) -> bool:
    """Return whether mixed-size mode, if the GPU is in it, has no room for these numbers of vGPUs."""
    cards = catalog.cards_of(function.id, function.subsystem)
    # unknown: counts as a card with the mode
    return any(card.mixed_sizes is not False and not fits(card, counts) for card in cards)


def _by_size(card: Card, counts: Mapping[VgpuType, int]) -> Mapping[int, list[VgpuType]]:
    found: dict[int, list[VgpuType]] = {}
    for vgpu_type in sorted(vgpu_type for vgpu_type, number in counts.items() if number):
        profile = profile_of(vgpu_type)
        if profile is not None and card.find(profile) is not None:
            found.setdefault(profile.gb, []).append(vgpu_type)
    return found


def _card_type(card: Card, vgpu_type: VgpuType) -> CardType | None:
    profile = profile_of(vgpu_type)
    return card.find(profile) if profile is not None else None


def _packs(sizes: Sequence[tuple[int, int, tuple[int, ...]]]) -> bool:
    """Return whether vGPUs fit side by side; `sizes` has their GB, number and placements, the largest first.

    A layout is a bit for each GB. Placements of one size never overlap, so for the smallest size it is enough to count
    the free placements.
    """
    layouts = {0}
    for number, (gb, desired_counts, placements) in enumerate(sizes, 1):
        spans = [((1 << gb) - 1) << place for place in placements]
        if number == len(sizes):
            return any(sum(1 for span in spans if not span & layout) >= desired_counts for layout in layouts)
        found = list(islice(_with(layouts, spans, desired_counts), MOST_LAYOUTS + 1))
        if len(found) > MOST_LAYOUTS:
            return True
        layouts = set(found)
    return bool(layouts)


def _with(layouts: Iterable[int], spans: Sequence[int], desired_counts: int) -> Iterable[int]:
    for layout in layouts:
        for chosen in combinations([span for span in spans if not span & layout], desired_counts):
            yield layout | sum(chosen)


class Questions(msgspec.Struct, frozen=True):
    """The queries of nvidia-smi about a GPU, beside its modes."""

    types: bool = False
    """The names of the GPU's types, if the host does not name a desired or an existing one."""
    scheduler: bool = False
    blocks: bool = True
    """Whether the GPU has no plan without the answer. In mode on-demand the number of GPU instances is asked for, which
    decides how many vGPUs are offered, and nothing else."""
    of_room: bool = False
    """Whether the answer decides nothing but whether all of the desired vGPUs fit."""


def questions(function: PciFunction, gpu_state: GpuState, desired: DesiredVgpus) -> Questions | None:
    """Return the queries that a plan needs, None if the host's files have everything.

    nvidia-smi takes seconds, and opens the GPU for a moment.
    """
    if function.id.vendor != NVIDIA or gpu_state.host.framework is Framework.SRIOV_VF:
        return None
    names = [name for name, number in desired.types.items() if number]
    unnamed = any(isinstance(vgpu.type, Unread) and vgpu.type_id is not None for vgpu in gpu_state.host.live)
    known = gpu_state.known_types
    unresolved = any(resolve_type(name, known) is None for name in names)
    decisive = (
        unnamed
        or (unresolved and gpu_state.host.framework is Framework.VENDOR_VFIO)  # names only what fits
        or _needs_modes(gpu_state, names, desired, may_be_mig=_may_be_mig(function.id, function.subsystem, known))
    )
    if decisive:
        return Questions(unnamed or unresolved, desired.scheduler is not None)
    counts = {VgpuType(name): desired.types[name] for name in names}
    if _grows(gpu_state, desired) and may_lack_room(function, counts):
        return Questions(of_room=True)
    return Questions(blocks=False) if desired.on_demand and gpu_state.has_mig_vgpus else None


def _needs_modes(gpu_state: GpuState, names: Collection[str], desired: DesiredVgpus, *, may_be_mig: bool) -> bool:
    """Return whether the modes of a GPU decide which vGPUs it can carry, and not only how many of one size."""
    profiles = [profile for name in names if (profile := profile_of(name)) is not None]
    live = _live_profiles(gpu_state)
    return (
        desired.sizes is not None
        or (desired.on_demand and len({profile.gb for profile in live if not profile.is_mig}) > 1)
        or desired.scheduler is not None
        or any(profile.is_mig for profile in profiles)
        or len({profile.gb for profile in profiles}) > 1
        or (bool(names) and len({profile.gb for profile in live}) > 1)
        or (bool(names) and may_be_mig and not gpu_state.shares_time)
    )


def _grows(gpu_state: GpuState, desired: DesiredVgpus) -> bool:
    """Return whether more vGPUs of a type are desired than the GPU carries."""
    counts = Counter[Profile | None]()
    for name, number in desired.types.items():
        counts[profile_of(name)] += number
    return bool(counts - Counter(_live_profiles(gpu_state)))


def _live_profiles(gpu_state: GpuState) -> list[Profile]:
    return [profile for vgpu in gpu_state.host.live if (profile := profile_of(str(vgpu.type))) is not None]


@lru_cache(1024)
def _may_be_mig(device: PciId, subsystem: PciId | None, known: tuple[VgpuType, ...]) -> bool:
    cards = catalog.cards_of(device, subsystem)
    return any(card.is_mig for card in cards) or any(is_mig(vgpu_type) for vgpu_type in known)


def switches(gpu_state: GpuState, desired_counts: Counts, desired: DesiredVgpus) -> tuple[ModeStep, ...]:
    """Return the steps that switch a GPU to its desired modes, for which it must carry no vGPU."""
    if gpu_state.smi is None:
        return ()
    gpu, modes = gpu_state.host.gpu, gpu_state.smi.modes
    then = modes_then(modes, desired_counts, desired)
    steps: list[ModeStep] = []
    if isinstance(then.mig, bool) and then.mig is not modes.mig:
        steps.append(SetMigMode(gpu, then.mig))
    mixed = desired.sizes is Sizes.MIXED
    # unknown: `_refuse_mig` and `_refuse_sizes` refuse the plan
    if then.mig is not True and desired.sizes is not None and mixed is not (modes.mixed_sizes is True):
        steps.append(SetMixedSizes(gpu, mixed))
    return tuple(steps)


def modes_then(modes: GpuModes, desired_counts: Counts, desired: DesiredVgpus) -> GpuModes:
    """Return the desired modes of a GPU, with its present ones where the desired vGPUs leave them open."""
    if any(is_mig(vgpu_type) for vgpu_type in desired_counts):
        return replace(modes, mig=True, mixed_sizes=None)
    # unknown: stays unknown, so that no step changes it
    then = replace(modes, mig=False, gpu_instances=()) if modes.mig is True and desired_counts else modes
    if desired.sizes is not None and then.mig is not True:  # unknown: `_refuse_mig` refuses the plan
        then = replace(then, mixed_sizes=desired.sizes is Sizes.MIXED)
    return then


def is_mixed(gpu_state: GpuState, desired: DesiredVgpus) -> bool:
    """Return whether vGPUs of several sizes may share a GPU in its desired state."""
    return gpu_state.mixed_sizes if desired.sizes is None else desired.sizes is Sizes.MIXED


def refuse(gpu_state: GpuState, desired_counts: Counts, desired: DesiredVgpus) -> Iterator[Reason]:
    """Yield why a GPU can't have its desired modes, or why the desired vGPUs do not fit its modes."""
    gpu, mig_backed = gpu_state.host.gpu, sorted(name for name in desired_counts if is_mig(name))
    time_sliced = sorted(name for name in desired_counts if profile_of(name) is not None and not is_mig(name))
    if mig_backed and time_sliced:
        yield refusals.mode_unsupported(
            gpu,
            f"can't carry time-sliced and MIG-backed vGPUs at once: {', '.join([*mig_backed, *time_sliced])}",
            "name types of one kind for a GPU in the vGPU config",
        )
        return
    if gpu_state.smi is not None:
        yield from _refuse_mig(gpu_state, gpu_state.smi.modes, desired_counts, desired)
        in_mig_mode = gpu_state.smi.modes.mig is True  # unknown: `_refuse_sizes` decides
        if not mig_backed and not (desired.on_demand and in_mig_mode):
            yield from _refuse_sizes(gpu_state, gpu_state.smi.modes, desired_counts, desired)
        if desired.scheduler is not None:
            yield from scheduling.refuse(modes_then(gpu_state.smi.modes, desired_counts, desired), desired.scheduler)
    sizes = {size: vgpu_type for vgpu_type in time_sliced if (size := size_of(vgpu_type)) is not None}
    unread = gpu_state.smi is not None and isinstance(gpu_state.smi.modes.mixed_sizes, Unread)
    if len(sizes) > 1 and not is_mixed(gpu_state, desired) and not unread:
        yield Reason(
            ReasonCode.SIZES_DIFFER,
            gpu,
            "can't carry vGPUs of several sizes, since mixed sizes are not switched on:"
            f" {', '.join(sorted(sizes.values()))}",
            fix="name one size in the vGPU config, or on cards with mixed sizes: sizes: mixed",
        )


def _refuse_mig(
    gpu_state: GpuState, modes: GpuModes, desired_counts: Counts, desired: DesiredVgpus
) -> Iterator[Reason]:
    gpu, on = gpu_state.host.gpu, any(is_mig(vgpu_type) for vgpu_type in desired_counts)
    if not desired_counts:
        return
    mig = modes.mig
    if isinstance(mig, Unread):
        may_be_mig = gpu_state.card is None or gpu_state.card.is_mig
        if not _needs_modes(gpu_state, desired_counts.keys(), desired, may_be_mig=may_be_mig):
            return  # unknown: counts as equal-size mode, a driver's default; what does not fit is rolled back
        yield refusals.unread(gpu, mig)
        return
    for reported in (modes.mig_pending, modes.gpu_instances):
        if isinstance(reported, Unread):
            yield refusals.unread(gpu, reported)
            return
    if on and mig is None:
        yield _no_mode(gpu, "MIG mode", "MIG Mode / Current", "N/A")
    elif bool(mig) is not on and modes.mig_pending is on:
        yield shortfalls.mode_pending(gpu, on=on)


def _refuse_sizes(
    gpu_state: GpuState, modes: GpuModes, desired_counts: Counts, desired: DesiredVgpus
) -> Iterator[Reason]:
    several = len({size_of(vgpu_type) for vgpu_type in desired_counts}) > 1
    if isinstance(modes.mixed_sizes, Unread):
        if several or desired.sizes is not None:
            yield refusals.unread(gpu_state.host.gpu, modes.mixed_sizes)
        return
    if desired.sizes is not Sizes.MIXED:
        return
    # In MIG mode nvidia-smi may not report whether the GPU has mixed-size mode; the catalog has it.
    # unknown: `_refuse_mig` refuses the plan
    by_catalog = modes.mig is True and gpu_state.card is not None and bool(gpu_state.card.mixed_sizes)
    if modes.can_mix_sizes is False:  # unknown: below
        yield _no_mode(gpu_state.host.gpu, "mixed-size mode", "Heterogeneous Time-Slice Sizes", "Not Supported")
    elif modes.mixed_sizes is None and modes.can_mix_sizes is not True and not by_catalog:  # unknown: counts as no
        yield _no_mode(gpu_state.host.gpu, "mixed-size mode", "vGPU Heterogeneous Mode", "N/A")


def _no_mode(gpu: PciAddress, mode: str, field: str, value: str) -> Reason:
    """The card or its driver has no such mode."""
    message = f"has no {mode}, which the desired vGPUs need"
    fix = "name other types in the vGPU config, without `sizes: mixed`; or install a vGPU manager that has the mode"
    return refusals.mode_unsupported(gpu, message, fix, Seen(SMI, f"{field}: {value}"))
