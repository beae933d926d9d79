"""Plans one isolation unit: vGPUs removed, VFs off, drivers, VFs on, modes, vGPUs created, schedulers."""

from collections.abc import Iterator

from msgspec.structs import replace

from gpuvirt.facts.ids import PciAddress, VgpuId
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.vgpu import Framework, Scheduler
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.podallocations import unmapped_reasons
from gpuvirt.model.change import driverplanning
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu, DesiredUnit, DesiredVgpus, desired_drivers
from gpuvirt.model.change.plan import Plan, VgpuPlan
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.change.steps import EnableVfs, RemoveVgpu
from gpuvirt.model.change.vgpus import scheduling
from gpuvirt.model.change.vgpus.gpustate import GpuState
from gpuvirt.model.change.vgpus.vgpuplanning import no_host, no_manager_after_bind, plan_gpu
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import refusals, shortfalls


def plan_unit(state: UnitState, unit: UnitId, desired: DesiredUnit) -> Plan:
    """Return the plan that brings the GPUs of a unit to their desired state; GPUs that the host lacks are left out.

    Drivers are planned as if the GPUs that will be used whole were empty already.
    """
    present = {gpu: target for gpu, target in sorted(desired.items()) if gpu in state.inventory.facts.functions}
    vgpus = {gpu: _plan(state, gpu, target) for gpu, target in present.items() if target.vgpus is not None}
    emptied = [plan for gpu, plan in vgpus.items() if present[gpu].is_whole]
    filled = [plan for gpu, plan in vgpus.items() if not present[gpu].is_whole]
    then = state.emptied([plan.gpu for plan in emptied if not plan.met])
    functions = state.inventory.facts.functions
    # A GPU without a driver is bound all the same: that takes it from nobody.
    staying = {plan.gpu for plan in filled if plan.refusals and functions[plan.gpu].on_vfio}
    bound = {gpu: target for gpu, target in present.items() if gpu not in staying}
    drivers = driverplanning.plan_drivers(then, unit, desired_drivers(bound))
    later = tuple(text for plan in filled for text in _later(state, plan, present[plan.gpu].vgpus))
    return Plan(unit, tuple(emptied), drivers, tuple(filled), later)


def plan_vgpus(facts: Facts, gpu: PciAddress, gpu_state: GpuState | None, desired: DesiredGpu) -> VgpuPlan:
    """Return the plan that brings one GPU to its desired vGPUs, before allocations are taken into account."""
    function = facts.functions[gpu]
    if desired.vgpus is None or (desired.is_whole and function.on_vfio):
        return VgpuPlan(gpu)
    if (function.on_vfio or function.is_idle) and desired.driver is DesiredDriver.NATIVE and not desired.is_whole:
        refusal = no_manager_after_bind(facts, gpu)
        return VgpuPlan(gpu, follows=True) if refusal is None else VgpuPlan(gpu, refusals=(refusal,))
    if desired.is_whole and desired.driver is DesiredDriver.NATIVE and _has_vfs_of_native_driver(gpu_state):
        return VgpuPlan(gpu)
    return plan_gpu(facts, gpu, gpu_state, desired.vgpus)


def _has_vfs_of_native_driver(gpu_state: GpuState | None) -> bool:
    """Return whether the GPU's native driver serves its VFs, also to containers, as AMD's and Intel's drivers do."""
    return gpu_state is not None and gpu_state.host.framework is Framework.SRIOV_VF


def _plan(state: UnitState, gpu: PciAddress, desired: DesiredGpu) -> VgpuPlan:
    plan = plan_vgpus(state.inventory.facts, gpu, state.gpu_states.get(gpu), desired)
    return _unless_allocated(state, plan)


def plan_removal(state: UnitState, gpu: PciAddress, vgpu: VgpuId) -> VgpuPlan:
    """Return the plan that removes one vGPU; it has no steps while the vGPU is in use."""
    gpu_state = state.gpu_states.get(gpu)
    live = next((live for live in gpu_state.host.live if live.id == vgpu), None) if gpu_state is not None else None
    if gpu_state is None or live is None:
        return VgpuPlan(gpu)
    if isinstance(live.type, Unread):
        return VgpuPlan(gpu, refusals=(refusals.unread(vgpu, live.type),))
    if users := gpu_state.users.get(vgpu, ()):
        return VgpuPlan(gpu, pending=(shortfalls.vgpu_in_use(live, users, "can't be removed"),))
    return _unless_allocated(state, VgpuPlan(gpu, steps=(RemoveVgpu(vgpu, live.type, live.parent),)))


def plan_scheduler(state: UnitState, gpu: PciAddress, scheduler: Scheduler) -> VgpuPlan:
    """Return the plan that sets a GPU's scheduler and keeps its vGPUs."""
    gpu_state = state.gpu_states.get(gpu)
    if gpu_state is None:
        return VgpuPlan(gpu, refusals=(no_host(state.inventory.facts, gpu),))
    if gpu_state.smi is None:
        return VgpuPlan(gpu, refusals=(scheduling.not_nvidias(gpu),))
    unfit = scheduling.refuse(gpu_state.smi.modes, scheduler)
    return VgpuPlan(gpu, refusals=unfit) if unfit else _unless_allocated(state, scheduling.plan(gpu_state, scheduler))


def _unless_allocated(state: UnitState, plan: VgpuPlan) -> VgpuPlan:
    """Return a plan, without its steps if the GPU is allocated whole to a pod, or if allocations are unknown."""
    if not plan.steps:
        return plan
    gpu, pods = plan.gpu, state.pods
    against = [refusals.allocated_to_pod(gpu, allocated)] if (allocated := state.whole.get(gpu)) else []
    against += unmapped_reasons(state.inventory.facts.functions[gpu], state.unmapped)
    if state.unknown is not None:
        against.append(replace(state.unknown, subject=gpu))
    elif isinstance(pods, Unknown) and plan.destroys:
        against.append(pods.reason_for(gpu) or refusals.allocations_unknown(gpu))
    return replace(plan, steps=(), pending=(*plan.pending, *against)) if against else plan


def _later(state: UnitState, plan: VgpuPlan, vgpus: DesiredVgpus | None) -> Iterator[str]:
    """Yield the later steps as text: a GPU names its vGPU types only on its native driver, with its VFs on."""
    gpu, vfs_first = plan.gpu, any(isinstance(step, EnableVfs) for step in plan.steps)
    if vgpus is None or not (plan.follows or vfs_first):
        return
    if plan.follows and state.inventory.facts.functions[gpu].sriov_total_vfs:
        yield f"{gpu}: switch its VFs on, if its driver makes vGPUs on VFs"
    if counts := ", ".join(f"{number} {name}" for name, number in vgpus.types.items() if number):
        yield f"{gpu}: create {counts}"
    if vgpus.scheduler is not None:
        yield f"{gpu}: set the vGPU scheduler to {vgpus.scheduler.text}"
