"""Decides how a GPU comes to carry the vGPUs that are wanted of it: the least that must be removed and made.

What is in somebody's hands stays, wanted or not, and is waited for; what is wanted and there stays with its id, but for
a switch of the GPU's mode, for which it must carry nothing: then it comes back with its id.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import NVIDIA, PciFunction, Unread
from gpuvirt.facts.vgpu import Framework, LiveVgpu
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.steps import (
    DestroyInstance,
    DisableVfs,
    EnableVfs,
    ModeStep,
    RemoveVgpu,
    VgpuStep,
)
from gpuvirt.model.change.vgpus import instances, mixedsizes, modes, scheduling
from gpuvirt.model.change.vgpus.gpustate import (
    Counts,
    GpuState,
    is_mig,
    size_of,
)
from gpuvirt.model.change.vgpus.places import VgpuPlaces
from gpuvirt.model.reasons import Reason, refusals, shortfalls
from gpuvirt.model.vgputypes.profiles import profile_name, resolve_type

NO_DESIRED_VGPUS = DesiredVgpus()


def plan_gpu(function: PciFunction, gpu_state: GpuState | None, desired: DesiredVgpus) -> VgpuPlan:
    """Return what is to be done to a GPU next; once that is done, the next plan follows from what is there then.

    A GPU whose VFs are not there yet says of no type that it knows it: they come first.
    """
    gpu = function.address
    if desired.whole:
        return _plan_whole(function, gpu_state)
    if gpu_state is None:
        if not any(desired.types.values()):
            return VgpuPlan(gpu)
        if _lacks_vfs(function):
            return VgpuPlan(gpu, steps=(EnableVfs(gpu),))
        return VgpuPlan(gpu, refusals=(no_host(function),))
    desired_counts: Counter[VgpuType] = Counter()
    unknown: list[Reason] = []
    known = gpu_state.known_types
    for name, number in desired.types.items():
        vgpu_type = resolve_type(name, known)
        if vgpu_type is not None:
            desired_counts[vgpu_type] += number
        elif gpu_state.smi is not None and isinstance(gpu_state.smi.types, Unread):
            unknown.append(refusals.unread(gpu, gpu_state.smi.types))
        else:
            unknown.append(shortfalls.no_such_type(gpu, name, [profile_name(one) for one in known]))
    return VgpuPlan(gpu, refusals=tuple(unknown)) if unknown else plan_vgpus(gpu_state, desired_counts, desired)


def _plan_whole(function: PciFunction, state: GpuState | None) -> VgpuPlan:
    """Return a plan by which a GPU comes to carry nothing, and then to have no VFs."""
    plan = plan_vgpus(state, {}) if state is not None else VgpuPlan(function.address)
    goes_with_its_vgpus = state is not None and state.host.framework is Framework.SRIOV_VF and bool(plan.steps)
    if plan.pending or plan.refusals or not function.virtfns or goes_with_its_vgpus:
        return plan
    return replace(plan, steps=(*plan.steps, DisableVfs(function.address)))


def _lacks_vfs(function: PciFunction) -> bool:
    native = isinstance(function.driver, str) and not function.on_vfio and not function.is_idle
    return native and function.id.vendor == NVIDIA and bool(function.sriov_total_vfs) and not function.virtfns


def no_host(function: PciFunction) -> Reason:
    """Return why nothing makes vGPUs of a GPU."""
    return shortfalls.no_vgpu_host(function, _why_no_host(function))


def _why_no_host(function: PciFunction) -> str:
    if isinstance(function.driver, Unread):
        return "it could not be read which driver it has"
    if function.on_vfio:
        return "it is bound to a VFIO driver, whole"
    if function.driver is None:
        return "no driver has it"
    if function.is_idle:
        return f"it is on {function.driver}, which serves nobody"
    return f"its driver {function.driver} makes no vGPUs of it; the one of the vGPU manager does, on a card that can"


def plan_vgpus(gpu_state: GpuState, desired_counts: Counts, desired: DesiredVgpus = NO_DESIRED_VGPUS) -> VgpuPlan:
    """Return what is to be done to a GPU so that it carries what is wanted, by the host's names of types.

    Of `desired`, the modes and the scheduler count, and the names by which it has the types.
    """
    desired_counts = {one: number for one, number in desired_counts.items() if number}
    refusals = tuple(_refusals(gpu_state, desired_counts, desired))
    if refusals:
        return VgpuPlan(gpu_state.host.gpu, refusals=refusals)
    switches = modes.switches(gpu_state, desired_counts, desired)
    plan = (
        _plan_switches(gpu_state, desired_counts, desired, switches)
        if switches
        else _plan_vgpus(gpu_state, desired_counts, desired)
    )
    return _with_scheduler(gpu_state, plan, desired)


def _plan_switches(
    gpu_state: GpuState, desired_counts: Counts, desired: DesiredVgpus, switches: Sequence[ModeStep]
) -> VgpuPlan:
    """Return a plan in which all goes first, then modes are switched, then what is wanted is made."""
    gpu, live = gpu_state.host.gpu, _typed(gpu_state.host.live)
    stuck = [one for one in live if one.id in gpu_state.users]
    removed = {one.id: vgpu_type for one, vgpu_type in live.items() if one.id not in gpu_state.users}
    removes = _removes(live, removed)
    pending = [shortfalls.vgpu_keeps_mode(one, gpu_state.users[one.id], switches[0].text) for one in stuck]
    pending += [shortfalls.vgpu_leaving(gpu, vgpu) for vgpu in sorted(gpu_state.leaving)]
    undesired = frozenset(one.id for one in live)
    if pending or gpu_state.smi is None:
        return VgpuPlan(gpu, removes, tuple(pending), undesired=undesired)
    then = modes.modes_then(gpu_state.smi.modes, desired_counts, desired)
    destroyed = instances.instances_of(gpu_state) if then.mig is not True else ()
    cleared = replace(
        gpu_state,
        host=replace(gpu_state.host, live=()),
        smi=replace(gpu_state.smi, modes=then),
    )
    rest = _plan_vgpus(cleared, desired_counts, desired, removed)
    if rest.refusals:
        return rest
    destroys = (DestroyInstance(gpu, one.id, one.profile) for one in destroyed)
    steps = (*removes, *destroys, *switches, *rest.steps)
    return VgpuPlan(gpu, steps, rest.pending, undesired=undesired)


def _plan_vgpus(
    gpu_state: GpuState, desired_counts: Counts, desired: DesiredVgpus, gone: Mapping[VgpuId, VgpuType] | None = None
) -> VgpuPlan:
    """Return a plan for a GPU that is in the modes that are wanted; `gone` went before, and may come back."""
    gpu, live = gpu_state.host.gpu, _typed(gpu_state.host.live)
    kept = {one.id for vgpu_type, number in desired_counts.items() for one in _kept(gpu_state, live, vgpu_type, number)}
    cut, moved, held = instances.plan(gpu_state, desired_counts, desired.types, live, kept)
    kept -= moved or _moved_for_larger(gpu_state, desired_counts, live, kept)
    stuck = [one for one in live if one.id not in kept and one.id in gpu_state.users]
    removed = {one.id: live[one] for one in live if one.id not in kept and one.id not in gpu_state.users}
    pending = [shortfalls.vgpu_in_use(one, gpu_state.users[one.id]) for one in stuck]
    pending += [shortfalls.vgpu_leaving(gpu, vgpu) for vgpu in sorted(gpu_state.leaving)]
    pending += held
    in_the_way = [*(live[one] for one in stuck), *gpu_state.leaving.values()]
    standing = Counter(live[one] for one in live if one.id in kept)
    missing = {vgpu_type: number - standing[vgpu_type] for vgpu_type, number in desired_counts.items()}
    places = VgpuPlaces(gpu_state, {**removed, **(gone or {})})
    creates: list[VgpuStep] = []
    for vgpu_type in sorted(missing, key=_largest_first):
        most = (
            instances.room(gpu_state, cut, desired.types or desired_counts, vgpu_type, standing + Counter(in_the_way))
            if gpu_state.smi is not None and is_mig(vgpu_type)
            else _room(gpu_state, desired_counts, vgpu_type, standing, in_the_way)
        )
        made = tuple(places.creates(vgpu_type, min(missing[vgpu_type], most)))
        standing[vgpu_type] += len(made)
        creates += made
    short = sum(missing.values()) - len(creates)
    if short > 0 and not pending:
        return VgpuPlan(gpu, refusals=(shortfalls.no_slot(gpu, short),))
    steps = (*_removes(live, removed), *cut.destroys, *cut.creates, *creates)
    return VgpuPlan(gpu, steps, tuple(pending), undesired=frozenset({*removed, *(one.id for one in stuck)}))


def _moved_for_larger(
    gpu_state: GpuState, desired_counts: Counts, live: Mapping[LiveVgpu, VgpuType], kept: set[VgpuId]
) -> set[VgpuId]:
    """Return the kept vGPUs that make room in mixed-size mode, where they may lie across the place of a larger one.

    None does while any of the GPU's is in use, since that one's place is not known either.
    """
    if not gpu_state.mixed_sizes or gpu_state.users.keys() & {one.id for one in live}:
        return set()
    standing = Counter(live[one] for one in live if one.id in kept)
    made = max((size_of(one) or 0 for one, number in desired_counts.items() if number > standing[one]), default=0)
    return kept if any((size_of(one) or 0) < made for one in standing) else set()


def _with_scheduler(gpu_state: GpuState, plan: VgpuPlan, desired: DesiredVgpus) -> VgpuPlan:
    """Return the plan with the scheduler set at its end, when what is wanted is there."""
    if desired.scheduler is None or plan.refusals or plan.pending:
        return plan
    then = scheduling.plan(gpu_state, desired.scheduler)
    if then.refusals:
        # It may say more once it carries something.
        return plan if plan.steps else then
    return replace(plan, steps=(*plan.steps, *then.steps), pending=then.pending)


def _typed(live: Iterable[LiveVgpu]) -> Mapping[LiveVgpu, VgpuType]:
    return {one: one.type for one in sorted(live, key=_by_place) if not isinstance(one.type, Unread)}


def _removes(live: Mapping[LiveVgpu, VgpuType], removed: Mapping[VgpuId, VgpuType]) -> tuple[VgpuStep, ...]:
    return tuple(RemoveVgpu(one.id, vgpu_type, one.slot) for one, vgpu_type in live.items() if one.id in removed)


def _refusals(gpu_state: GpuState, desired_counts: Counts, desired: DesiredVgpus) -> Iterator[Reason]:
    for unread in gpu_state.host.unread:
        yield refusals.unread(gpu_state.host.gpu, unread)
    for one in gpu_state.host.live:
        if isinstance(one.type, Unread):
            yield refusals.unread(one.id, one.type)
    unfit = tuple(modes.refuse(gpu_state, desired_counts, desired))
    yield from unfit or _too_many(gpu_state, desired_counts, desired)


def _too_many(gpu_state: GpuState, desired_counts: Counts, desired: DesiredVgpus) -> Iterator[Reason]:
    """Yield what is more than fits: types of one size share what the largest count of them allows."""
    gpu = gpu_state.host.gpu
    if any(is_mig(one) for one in desired_counts):
        yield from instances.too_many(gpu_state, desired_counts, desired.types)
        return
    if modes.is_mixed(gpu_state, desired):
        if not mixedsizes.fits(gpu_state.card, desired_counts):
            yield shortfalls.no_room_mixed(gpu, desired_counts)
        return
    known = [gpu_state.most[one] for one in desired_counts if one in gpu_state.most]
    if known and len(known) == len(desired_counts) and sum(desired_counts.values()) > max(known):
        yield shortfalls.too_many(gpu, desired_counts, max(known))


def _kept(gpu_state: GpuState, live: Mapping[LiveVgpu, VgpuType], vgpu_type: VgpuType, number: int) -> list[LiveVgpu]:
    """Return the vGPUs that are kept for a desired type: those in use or allocated first, then those of before."""
    found = [one for one, is_type in live.items() if is_type == vgpu_type]
    return sorted(
        found, key=lambda one: (one.id not in gpu_state.users, one.id not in gpu_state.remembered, _by_place(one))
    )[:number]


def _room(
    gpu_state: GpuState,
    desired_counts: Counts,
    vgpu_type: VgpuType,
    standing: Counter[VgpuType],
    in_the_way: Sequence[VgpuType],
) -> int:
    """Return how many more of a type fit beside what is there as wanted, and what is there although it is not.

    Where it is not known how many fit, what is not wanted is taken to stand in the place of something that is.
    """
    if gpu_state.mixed_sizes and gpu_state.card is not None:
        there = standing + Counter(in_the_way)
        numbers = range(1, desired_counts[vgpu_type] + 1)
        fitting = (
            number for number in numbers if not mixedsizes.fits(gpu_state.card, there + Counter({vgpu_type: number}))
        )
        return next(fitting, desired_counts[vgpu_type] + 1) - 1
    if not gpu_state.mixed_sizes and any(size_of(other) != size_of(vgpu_type) for other in in_the_way):
        return 0
    most = (
        sum(desired_counts.values())
        if gpu_state.mixed_sizes
        else gpu_state.most.get(vgpu_type, sum(desired_counts.values()))
    )
    return max(most - standing.total() - len(in_the_way), 0)


def _by_place(one: LiveVgpu) -> tuple[PciAddress, VgpuId]:
    return one.slot, one.id


def _largest_first(vgpu_type: VgpuType) -> tuple[int, VgpuType]:
    return -(size_of(vgpu_type) or 0), vgpu_type
