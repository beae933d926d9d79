"""Decides in which modes a GPU must be for the vGPUs that are wanted of it, and why it can't be in them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpuvirt.facts.pci import NVIDIA, PciFunction, Unread
from gpuvirt.facts.vgpu import Framework, GpuModes
from gpuvirt.model import catalog
from gpuvirt.model.change import scheduling
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.gpustate import (
    Counts,
    GpuState,
    is_mig,
    profile_of,
    size_of,
)
from gpuvirt.model.change.steps import ModeStep, SetMigMode, SetMixedSizes
from gpuvirt.model.profiles import resolve_type
from gpuvirt.model.reasons import Reason, refusals, shortfalls
from gpuvirt.model.vgpuentries import Sizes


@dataclass(frozen=True, slots=True)
class Questions:
    """What nvidia-smi is to be asked of a GPU, beside its modes."""

    types: bool = False
    """What its types are called: the host does not name one that is wished, or one that is there."""
    scheduler: bool = False


def questions(function: PciFunction, board: GpuState, wish: DesiredVgpus) -> Questions | None:
    """Return what must be asked before a plan is made, None where the host's files say enough.

    Asking takes seconds, and opens the GPU for a moment.
    """
    if function.id.vendor != NVIDIA or board.host.framework is Framework.SRIOV_VF:
        return None
    names = [name for name, number in wish.types.items() if number]
    profiles = [profile for name in names if (profile := profile_of(name)) is not None]
    live = [profile for one in board.host.live if (profile := profile_of(str(one.type))) is not None]
    unnamed = any(isinstance(one.type, Unread) and one.type_id is not None for one in board.host.live)
    needed = (
        unnamed
        or wish.sizes is not None
        or wish.scheduler is not None
        or any(one.is_mig for one in profiles)
        or len({one.gb for one in profiles}) > 1
        or (bool(names) and len({one.gb for one in live}) > 1)
        or (bool(names) and _may_be_cut(function, board) and not board.shares_time)
    )
    if not needed:
        return None
    known = board.known_types
    return Questions(unnamed or any(resolve_type(name, known) is None for name in names), wish.scheduler is not None)


def _may_be_cut(function: PciFunction, board: GpuState) -> bool:
    cards = catalog.cards_of(function.id, function.subsystem)
    return any(card.is_mig for card in cards) or any(is_mig(one) for one in board.known_types)


def switches(board: GpuState, wanted: Counts, wish: DesiredVgpus) -> tuple[ModeStep, ...]:
    """Return the switches that bring a GPU into the modes that are wanted; nothing of it may be there then."""
    if board.smi is None:
        return ()
    gpu, modes = board.host.gpu, board.smi.modes
    then = modes_then(modes, wanted, wish)
    steps: list[ModeStep] = []
    if isinstance(then.mig, bool) and then.mig is not modes.mig:
        steps.append(SetMigMode(gpu, then.mig))
    mixed = wish.sizes is Sizes.MIXED
    if then.mig is not True and wish.sizes is not None and mixed is not (modes.mixed_sizes is True):
        steps.append(SetMixedSizes(gpu, mixed))
    return tuple(steps)


def modes_then(modes: GpuModes, wanted: Counts, wish: DesiredVgpus) -> GpuModes:
    """Return the modes that a GPU is to be in."""
    if any(is_mig(one) for one in wanted):
        return replace(modes, mig=True, mixed_sizes=None)
    then = replace(modes, mig=False, gpu_instances=()) if modes.mig is True and wanted else modes
    if wish.sizes is not None and then.mig is not True:
        then = replace(then, mixed_sizes=wish.sizes is Sizes.MIXED)
    return then


def is_mixed(board: GpuState, wish: DesiredVgpus) -> bool:
    """Return whether vGPUs of several sizes may share a GPU once it is as it is wished."""
    return board.mixed_sizes if wish.sizes is None else wish.sizes is Sizes.MIXED


def refuse(board: GpuState, wanted: Counts, wish: DesiredVgpus) -> Iterator[Reason]:
    """Yield why a GPU can't be in the modes that are wanted, or is in one that they don't fit."""
    gpu, cut = board.host.gpu, sorted(one for one in wanted if is_mig(one))
    shared = sorted(one for one in wanted if profile_of(one) is not None and not is_mig(one))
    if cut and shared:
        yield shortfalls.modes_differ(gpu, [*cut, *shared])
        return
    if board.smi is not None:
        yield from _refuse_mig(board, board.smi.modes, wanted)
        if not cut:
            yield from _refuse_sizes(board, board.smi.modes, wanted, wish)
        if wish.scheduler is not None:
            yield from scheduling.refuse(modes_then(board.smi.modes, wanted, wish), wish.scheduler)
    sizes = {size: one for one in shared if (size := size_of(one)) is not None}
    unread = board.smi is not None and isinstance(board.smi.modes.mixed_sizes, Unread)
    if len(sizes) > 1 and not is_mixed(board, wish) and not unread:
        yield shortfalls.sizes_differ(gpu, sorted(sizes.values()))


def _refuse_mig(board: GpuState, modes: GpuModes, wanted: Counts) -> Iterator[Reason]:
    gpu, on = board.host.gpu, any(is_mig(one) for one in wanted)
    if not wanted:
        return
    for said in (modes.mig, modes.mig_pending, modes.gpu_instances):
        if isinstance(said, Unread):
            yield refusals.unread(gpu, said)
            return
    if on and modes.mig is None:
        yield shortfalls.no_mode(gpu, "MIG mode", "MIG Mode / Current", "N/A")
    elif bool(modes.mig) is not on and modes.mig_pending is on:
        yield shortfalls.mode_pending(gpu, on=on)


def _refuse_sizes(board: GpuState, modes: GpuModes, wanted: Counts, wish: DesiredVgpus) -> Iterator[Reason]:
    several = len({size_of(one) for one in wanted}) > 1
    if isinstance(modes.mixed_sizes, Unread):
        if several or wish.sizes is not None:
            yield refusals.unread(board.host.gpu, modes.mixed_sizes)
        return
    if wish.sizes is not Sizes.MIXED:
        return
    # In MIG mode it may not say whether it could; the catalog does then.
    by_catalog = modes.mig is True and board.card is not None and bool(board.card.mixed_sizes)
    if modes.can_mix_sizes is False:
        yield shortfalls.no_mode(board.host.gpu, "mixed-size mode", "Heterogeneous Time-Slice Sizes", "Not Supported")
    elif modes.mixed_sizes is None and modes.can_mix_sizes is not True and not by_catalog:
        yield shortfalls.no_mode(board.host.gpu, "mixed-size mode", "vGPU Heterogeneous Mode", "N/A")
