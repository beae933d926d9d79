"""Plans the vGPUs of a GPU, with the fewest vGPUs removed and created.

A vGPU that is allocated or in use stays, desired or not, and the plan waits for its user. A desired vGPU that exists
stays with its id. A switch of the GPU's mode needs a GPU without vGPUs: these are created again with their ids.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from gpuvirt.facts import sysfs
from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import NVIDIA, PciFunction, Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.vgpu import Framework, LiveVgpu
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.steps import (
    CreateVgpu,
    DestroyInstance,
    DisableVfs,
    EnableVfs,
    ModeStep,
    RemoveVgpu,
    VgpuStep,
)
from gpuvirt.model.change.vgpus import instances, modes, scheduling
from gpuvirt.model.change.vgpus.gpustate import (
    Counts,
    GpuState,
    is_mig,
    size_of,
)
from gpuvirt.model.change.vgpus.instances import VgpuPlaces
from gpuvirt.model.reasons import Reason, Seen, refusals, shortfalls
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.profiles import profile_name, resolve_type


# Allocate creates all others, so a plan never creates a vGPU that no pod has.
def plan(gpu_state: GpuState, desired: DesiredVgpus) -> VgpuPlan:
    """Return the plan of a GPU: a vGPU that is allocated, or that a process has open, stays."""
    gpu, live = gpu_state.host.gpu, gpu_state.host.live
    refused = tuple(_on_demand_refusals(gpu_state, desired))
    if refused:
        return VgpuPlan(gpu, refusals=refused)
    free = [vgpu for vgpu in live if vgpu.id not in gpu_state.users]
    orphans = [vgpu for vgpu in live if vgpu.id in gpu_state.users and vgpu.id not in gpu_state.allocated]
    undesired = frozenset(vgpu.id for vgpu in (*free, *orphans))
    removes = tuple(RemoveVgpu(vgpu.id, vgpu.type, vgpu.parent) for vgpu in free if not isinstance(vgpu.type, Unread))
    pending = [shortfalls.vgpu_in_use(vgpu, gpu_state.users[vgpu.id]) for vgpu in orphans]
    pending += [refusals.unbind_pending(gpu, (), vgpu=vgpu) for vgpu in sorted(gpu_state.leaving)]
    switches = modes.switches(gpu_state, {}, desired)
    if switches and len(free) == len(live) and not gpu_state.leaving:
        return VgpuPlan(gpu, (*removes, *switches), undesired=undesired)
    if switches:
        staying = (vgpu for vgpu in live if vgpu.id in gpu_state.users)
        pending += [shortfalls.vgpu_keeps_mode(vgpu, gpu_state.users[vgpu.id], switches[0].text) for vgpu in staying]
    return VgpuPlan(gpu, (*removes, *_restores(gpu_state)), tuple(pending), undesired=undesired)


def _on_demand_refusals(gpu_state: GpuState, desired: DesiredVgpus) -> Iterator[Reason]:
    for unread in gpu_state.host.unread:
        yield refusals.unread(gpu_state.host.gpu, unread)
    for vgpu in gpu_state.host.live:
        if isinstance(vgpu.type, Unread):
            yield refusals.unread(vgpu.id, vgpu.type)
    yield from modes.refuse(gpu_state, {}, desired)


def _restores(gpu_state: GpuState) -> Iterator[CreateVgpu]:
    """Yield the steps that create the vGPUs of pods again which a reboot has removed, with their ids."""
    places = VgpuPlaces(gpu_state, {})
    for vgpu, vgpu_type in gpu_state.lost.items():
        if (step := places.create_again(vgpu, vgpu_type)) is not None:
            yield step


NO_DESIRED_VGPUS = DesiredVgpus()


def plan_gpu(facts: Facts, gpu: PciAddress, gpu_state: GpuState | None, desired: DesiredVgpus) -> VgpuPlan:
    """Return the plan for a GPU. The GPU is observed and planned again after its steps.

    If the GPU's VFs are off, the plan switches them on and nothing else, since the GPU names its types only then.
    """
    function = facts.functions[gpu]
    if desired.whole:
        return _plan_whole(function, gpu_state)
    if gpu_state is None:
        if not (desired.on_demand or any(desired.types.values())):
            return VgpuPlan(gpu)
        # unknown: without an observation, as in a plan for another node; that node's own plan has one
        if lacks_vfs(function) and facts.platform.vgpu_manager in {True, None}:
            return VgpuPlan(gpu, steps=(EnableVfs(gpu),))
        return VgpuPlan(gpu, refusals=(no_host(facts, gpu),))
    if desired.on_demand:
        return plan(gpu_state, desired)
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
            unknown.append(shortfalls.no_such_type(gpu, name, [profile_name(known_type) for known_type in known]))
    return VgpuPlan(gpu, refusals=tuple(unknown)) if unknown else plan_vgpus(gpu_state, desired_counts, desired)


def _plan_whole(function: PciFunction, state: GpuState | None) -> VgpuPlan:
    """Return a plan that removes a GPU's vGPUs, and then switches its VFs off."""
    plan = plan_vgpus(state, {}) if state is not None else VgpuPlan(function.address)
    steps_remove_vfs = state is not None and state.host.framework is Framework.SRIOV_VF and bool(plan.steps)
    if plan.pending or plan.refusals or not function.virtfns or steps_remove_vfs:
        return plan
    return replace(plan, steps=(*plan.steps, DisableVfs(function.address)))


def _is_native(function: PciFunction) -> bool:
    return isinstance(function.driver, str) and not function.on_vfio and not function.is_idle


def lacks_vfs(function: PciFunction) -> bool:
    """Return whether a GPU on NVIDIA's driver carries vGPUs only once its VFs are on."""
    has_vfs = bool(function.sriov_total_vfs)
    return _is_native(function) and function.id.vendor == NVIDIA and has_vfs and not function.virtfns


def no_host(facts: Facts, gpu: PciAddress) -> Reason:
    """Return why a GPU can't carry vGPUs with its present driver."""
    function, manager = facts.functions[gpu], facts.platform.vgpu_manager
    if _is_native(function) and catalog.in_display_mode(function):
        return shortfalls.display_mode(function)
    if lacks_vfs(function) and isinstance(manager, Unread):
        return refusals.unread(gpu, manager)
    if _is_native(function) and function.id.vendor == NVIDIA and manager is False:  # unknown: below
        return shortfalls.no_vgpu_manager(function, _why_no_host(function))
    if lacks_vfs(function):
        return shortfalls.vfs_off(gpu)
    return shortfalls.no_vgpu_host(function, _why_no_host(function))


def no_manager_after_bind(facts: Facts, gpu: PciAddress) -> Reason | None:
    """Return why a GPU can't carry vGPUs on its native driver either; None if it may, or before that is loaded."""
    function, platform = facts.functions[gpu], facts.platform
    is_loaded = function.id.vendor == NVIDIA and platform.nvidia_version is not None
    # unknown: after the bind the GPU is planned again, with what is known then
    if not is_loaded or platform.vgpu_manager is not False:
        return None
    return shortfalls.no_vgpu_manager(function, "NVIDIA's loaded driver is not the vGPU manager's")


def unknown_after_bind(facts: Facts, gpu: PciAddress) -> Reason | None:
    """Return why it is not known whether a GPU of NVIDIA can carry vGPUs on its native driver; None if it is known."""
    platform = facts.platform
    if facts.functions[gpu].id.vendor != NVIDIA or platform.vgpu_manager is True:  # unknown: below
        return None
    if isinstance(platform.vgpu_manager, Unread):
        return refusals.unread(gpu, platform.vgpu_manager)
    return shortfalls.driver_not_loaded(gpu) if platform.nvidia_version is None else None


def _why_no_host(function: PciFunction) -> str:
    if isinstance(function.driver, Unread):
        return "its driver could not be read"
    if function.on_vfio:
        return "it is bound to a VFIO driver, which gives it whole to one VM"
    if function.driver is None:
        return "it has no driver"
    if function.is_idle:
        return f"it is bound to {function.driver}, a driver that only reserves it"
    return f"its driver {function.driver} creates no vGPUs on it; the vGPU manager's driver does, on cards with vGPUs"


def plan_vgpus(gpu_state: GpuState, desired_counts: Counts, desired: DesiredVgpus = NO_DESIRED_VGPUS) -> VgpuPlan:
    """Return the plan that leads to the desired numbers of vGPUs, by the host's names of types.

    `desired` has the modes, the scheduler, and the types' names in the config.
    """
    desired_counts = {vgpu_type: number for vgpu_type, number in desired_counts.items() if number}
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
    """Return a plan that removes all vGPUs, switches the modes, and then creates the desired vGPUs."""
    gpu, live = gpu_state.host.gpu, _typed(gpu_state.host.live)
    in_use = [vgpu for vgpu in live if vgpu.id in gpu_state.users]
    removed = {vgpu.id: vgpu_type for vgpu, vgpu_type in live.items() if vgpu.id not in gpu_state.users}
    removes = _removes(live, removed)
    pending = [shortfalls.vgpu_keeps_mode(vgpu, gpu_state.users[vgpu.id], switches[0].text) for vgpu in in_use]
    pending += [refusals.unbind_pending(gpu, (), vgpu=vgpu) for vgpu in sorted(gpu_state.leaving)]
    undesired = frozenset(vgpu.id for vgpu in live)
    if pending or gpu_state.smi is None:
        return VgpuPlan(gpu, removes, tuple(pending), undesired=undesired)
    then = modes.modes_then(gpu_state.smi.modes, desired_counts, desired)
    # unknown: nvidia-smi was not asked for instances then, so that there are none to destroy
    destroyed = instances.instances_of(gpu_state) if then.mig is not True else ()
    cleared = replace(
        gpu_state,
        host=replace(gpu_state.host, live=()),
        smi=replace(gpu_state.smi, modes=then),
    )
    rest = _plan_vgpus(cleared, desired_counts, desired, removed)
    if rest.refusals:
        return rest
    destroys = (DestroyInstance(gpu, instance.id, instance.profile) for instance in destroyed)
    steps = (*removes, *destroys, *switches, *rest.steps)
    return VgpuPlan(gpu, steps, rest.pending, undesired=undesired)


def _plan_vgpus(
    gpu_state: GpuState, desired_counts: Counts, desired: DesiredVgpus, gone: Mapping[VgpuId, VgpuType] | None = None
) -> VgpuPlan:
    """Return a plan for a GPU in its desired modes; vGPUs that are `gone` were removed before, and may be restored."""
    gpu, live = gpu_state.host.gpu, _typed(gpu_state.host.live)
    kept = {
        vgpu.id for vgpu_type, number in desired_counts.items() for vgpu in _kept(gpu_state, live, vgpu_type, number)
    }
    changes, moved, kept_by_users = instances.plan(gpu_state, desired_counts, desired.types, live, kept)
    kept -= moved or _moved_for_larger(gpu_state, desired_counts, live, kept)
    in_use = [vgpu for vgpu in live if vgpu.id not in kept and vgpu.id in gpu_state.users]
    removed = {vgpu.id: live[vgpu] for vgpu in live if vgpu.id not in kept and vgpu.id not in gpu_state.users}
    pending = [shortfalls.vgpu_in_use(vgpu, gpu_state.users[vgpu.id]) for vgpu in in_use]
    pending += [refusals.unbind_pending(gpu, (), vgpu=vgpu) for vgpu in sorted(gpu_state.leaving)]
    pending += kept_by_users
    if len(live) == len(kept) == sum(desired_counts.values()) and not (pending or changes.destroys or changes.creates):
        return VgpuPlan(gpu)  # as most GPUs of a node at most times
    undesired_types = [*(live[vgpu] for vgpu in in_use), *gpu_state.leaving.values()]
    present = Counter(live[vgpu] for vgpu in live if vgpu.id in kept)
    missing = {vgpu_type: number - present[vgpu_type] for vgpu_type, number in desired_counts.items()}
    places = VgpuPlaces(gpu_state, {**removed, **(gone or {})})
    creates: list[VgpuStep] = []
    for vgpu_type in sorted(missing, key=_largest_first):
        most = (
            instances.room(
                gpu_state, changes, desired.types or desired_counts, vgpu_type, present + Counter(undesired_types)
            )
            if gpu_state.smi is not None and is_mig(vgpu_type)
            else _room(gpu_state, desired_counts, vgpu_type, present, undesired_types)
        )
        created = tuple(places.creates(vgpu_type, min(missing[vgpu_type], most)))
        present[vgpu_type] += len(created)
        creates += created
    short = sum(missing.values()) - len(creates)
    if short > 0 and not pending:
        return VgpuPlan(
            gpu,
            refusals=(
                shortfalls.no_room(
                    gpu,
                    f"{short} of the desired vGPUs",
                    "each needs its own VF",
                    "name fewer in the vGPU config, or see why VFs are missing or reject types: gpuvirt doctor",
                    Seen(sysfs.device_path(gpu, "virtfn*"), f"{short} too few"),
                ),
            ),
        )
    steps = (*_removes(live, removed), *changes.destroys, *changes.creates, *creates)
    return VgpuPlan(gpu, steps, tuple(pending), undesired=frozenset({*removed, *(vgpu.id for vgpu in in_use)}))


def _moved_for_larger(
    gpu_state: GpuState, desired_counts: Counts, live: Mapping[LiveVgpu, VgpuType], kept: set[VgpuId]
) -> set[VgpuId]:
    """Return the kept vGPUs that are created again in mixed-size mode, since they may lie where a larger one fits.

    While any vGPU of the GPU is in use there are none: its place is not known, so room can't be planned.
    """
    if not gpu_state.mixed_sizes or gpu_state.users.keys() & {vgpu.id for vgpu in live}:
        return set()
    present = Counter(live[vgpu] for vgpu in live if vgpu.id in kept)
    missing_sizes = (size_of(name) or 0 for name, number in desired_counts.items() if number > present[name])
    largest = max(missing_sizes, default=0)
    return kept if any((size_of(vgpu_type) or 0) < largest for vgpu_type in present) else set()


def _with_scheduler(gpu_state: GpuState, plan: VgpuPlan, desired: DesiredVgpus) -> VgpuPlan:
    """Return the plan with the desired scheduler set at its end, unless the plan waits or is refused."""
    if desired.scheduler is None or plan.refusals or plan.pending:
        return plan
    then = scheduling.plan(gpu_state, desired.scheduler)
    if then.refusals:
        # nvidia-smi may report the scheduler once the GPU carries a vGPU.
        return plan if plan.steps else then
    return replace(plan, steps=(*plan.steps, *then.steps), pending=then.pending)


def _typed(live: Iterable[LiveVgpu]) -> Mapping[LiveVgpu, VgpuType]:
    return {vgpu: vgpu.type for vgpu in sorted(live, key=_by_place) if not isinstance(vgpu.type, Unread)}


def _removes(live: Mapping[LiveVgpu, VgpuType], removed: Mapping[VgpuId, VgpuType]) -> tuple[VgpuStep, ...]:
    return tuple(RemoveVgpu(vgpu.id, vgpu_type, vgpu.parent) for vgpu, vgpu_type in live.items() if vgpu.id in removed)


def _refusals(gpu_state: GpuState, desired_counts: Counts, desired: DesiredVgpus) -> Iterator[Reason]:
    for unread in gpu_state.host.unread:
        yield refusals.unread(gpu_state.host.gpu, unread)
    for vgpu in gpu_state.host.live:
        if isinstance(vgpu.type, Unread):
            yield refusals.unread(vgpu.id, vgpu.type)
    unfit = tuple(modes.refuse(gpu_state, desired_counts, desired))
    yield from unfit or _too_many(gpu_state, desired_counts, desired)


def _too_many(gpu_state: GpuState, desired_counts: Counts, desired: DesiredVgpus) -> Iterator[Reason]:
    """Yield why more vGPUs are desired than fit; types of one size share the largest number that fits of any."""
    gpu = gpu_state.host.gpu
    if gpu_state.host.framework is Framework.SRIOV_VF:
        if sum(desired_counts.values()) > 1:
            yield shortfalls.no_room(
                gpu,
                " and ".join(sorted(desired_counts)),
                "a GPU is split into VFs of one size, all at once",
                f"when no VM uses a VF: gpuvirt vgpu delete {gpu}; then create the new number of VFs",
            )
        return
    if any(is_mig(vgpu_type) for vgpu_type in desired_counts):
        yield from instances.too_many(gpu_state, desired_counts, desired)
        return
    if modes.is_mixed(gpu_state, desired):
        if not modes.fits(gpu_state.card, desired_counts):
            yield _too_many_mixed(gpu_state, desired_counts, desired)
        return
    known = [gpu_state.most[vgpu_type] for vgpu_type in desired_counts if vgpu_type in gpu_state.most]
    if known and len(known) == len(desired_counts) and sum(desired_counts.values()) > max(known):
        yield shortfalls.too_many(gpu, desired_counts, max(known), added=desired.added)


def _too_many_mixed(gpu_state: GpuState, desired_counts: Counts, desired: DesiredVgpus) -> Reason:
    gpu = gpu_state.host.gpu
    if len({size_of(vgpu_type) for vgpu_type in desired_counts}) > 1:
        existing, asked = sum(desired_counts.values()) - desired.added, shortfalls.counted(desired_counts)
        fix = "name fewer vGPUs, or vGPUs of one size, of which more fit"
        if desired.added:
            fix = f"remove some of the {existing} existing ones first: gpuvirt vgpu delete VGPU"
        return shortfalls.no_room(gpu, asked, "they don't fit side by side in mixed-size mode", fix)
    numbers, any_type = range(sum(desired_counts.values())), next(iter(desired_counts))
    most = max(number for number in numbers if modes.fits(gpu_state.card, {any_type: number}))
    most_equal = max(gpu_state.most.get(vgpu_type, 0) for vgpu_type in desired_counts)
    return shortfalls.too_many(gpu, desired_counts, most, added=desired.added, most_equal=most_equal)


def _kept(gpu_state: GpuState, live: Mapping[LiveVgpu, VgpuType], vgpu_type: VgpuType, number: int) -> list[LiveVgpu]:
    """Return the vGPUs that are kept for a desired type: those in use or allocated first, then remembered ones."""
    of_type = [vgpu for vgpu, live_type in live.items() if live_type == vgpu_type]

    def preference(vgpu: LiveVgpu) -> tuple[bool, bool, tuple[PciAddress, VgpuId]]:
        return vgpu.id not in gpu_state.users, vgpu.id not in gpu_state.remembered, _by_place(vgpu)

    return sorted(of_type, key=preference)[:number]


def _room(
    gpu_state: GpuState,
    desired_counts: Counts,
    vgpu_type: VgpuType,
    present: Counter[VgpuType],
    undesired: Sequence[VgpuType],
) -> int:
    """Return how many more vGPUs of a type fit beside the present desired ones and the undesired ones.

    If it is not known how many fit, each undesired vGPU counts as taking the place of a desired one.
    """
    if gpu_state.mixed_sizes and gpu_state.card is not None:
        existing = present + Counter(undesired)
        numbers = range(1, desired_counts[vgpu_type] + 1)
        too_many = (
            number for number in numbers if not modes.fits(gpu_state.card, existing + Counter({vgpu_type: number}))
        )
        return next(too_many, desired_counts[vgpu_type] + 1) - 1
    if not gpu_state.mixed_sizes and any(size_of(other) != size_of(vgpu_type) for other in undesired):
        return 0
    most = (
        sum(desired_counts.values())
        if gpu_state.mixed_sizes
        else gpu_state.most.get(vgpu_type, sum(desired_counts.values()))
    )
    return max(most - present.total() - len(undesired), 0)


def _by_place(vgpu: LiveVgpu) -> tuple[PciAddress, VgpuId]:
    return vgpu.parent, vgpu.id


def _largest_first(vgpu_type: VgpuType) -> tuple[int, VgpuType]:
    return -(size_of(vgpu_type) or 0), vgpu_type
