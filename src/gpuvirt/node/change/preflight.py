"""Says what will stop a change of vGPUs on its way, before its first step: what is known to fail costs no vGPU."""

from collections.abc import Iterator

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA
from gpuvirt.facts.vgpu import Framework
from gpuvirt.hardware.tools import Program, ToolError, ToolMissingError
from gpuvirt.model.change.plan import (
    DriverPlan,
    Phase,
    Plan,
    VgpuPlan,
)
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.change.steps import (
    CreateInstance,
    DestroyInstance,
    DisableVfs,
    LoadModule,
    RemoveVgpu,
    SetMigMode,
    SetMixedSizes,
    SetScheduler,
    VgpuStep,
)
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, refusals, shortfalls
from gpuvirt.node.change.leasing import RefusedError
from gpuvirt.node.change.observation import Observation
from gpuvirt.node.change.site import Site
from gpuvirt.node.change.vgpusteps import claims, see_that_it_is_idle, see_that_vfs_can_go

NVIDIA_DRIVER = "nvidia"
"""The driver that lets only sriov-manage switch VFs: it has no `sriov_configure` (drivers/pci/iov.c: ENOENT)."""


def obstacles(observation: Observation, state: UnitState, plan: Plan, phase: Phase) -> tuple[Reason, ...]:
    """Return why a change can't be finished, as far as that is known now; nothing where it takes nothing away.

    What passes when its user ends is no obstacle to what can be done meanwhile.
    """
    if isinstance(phase, DriverPlan):
        return ()
    if not any(isinstance(step, RemoveVgpu | DestroyInstance) for step in phase.steps):
        return ()
    try:
        found = list(_obstacles(observation.site, state, phase, _all_steps(state, plan, phase)))
        if phase in plan.emptied:
            found += _obstacles_to_drivers(observation.site, plan.drivers)
        return tuple(dict.fromkeys(found))
    except RefusedError as error:
        return (error.reason,)


def _all_steps(state: UnitState, plan: Plan, phase: VgpuPlan) -> tuple[VgpuStep, ...]:
    """Return the steps of a phase, with the one that waits until the GPU carries nothing."""
    gpu_state, last = state.gpu_states.get(phase.gpu), DisableVfs(phase.gpu)
    carries_on_vfs = gpu_state is not None and gpu_state.host.framework is not Framework.SRIOV_VF
    waits = carries_on_vfs and phase in plan.emptied and last not in phase.steps
    has_vfs = bool(state.inventory.facts.functions[phase.gpu].virtfns)
    return (*phase.steps, last) if waits and has_vfs else phase.steps


def _obstacles(site: Site, state: UnitState, phase: VgpuPlan, steps: tuple[VgpuStep, ...]) -> Iterator[Reason]:
    gpu_state = state.gpu_states.get(phase.gpu)
    for step in steps:
        match step:
            case DisableVfs(gpu):
                if _needs_sriov_manage(state.inventory, gpu):
                    yield from _missing(site, phase.gpu, Program.SRIOV_MANAGE, step)
                if not phase.pending:
                    see_that_vfs_can_go(site.kernel, state.inventory, gpu)
            case SetMigMode(gpu):
                yield from _missing(site, phase.gpu, Program.NVIDIA_SMI, step)
                see_that_it_is_idle(site.kernel, gpu)
            case SetMixedSizes() | DestroyInstance() | CreateInstance() | SetScheduler():
                yield from _missing(site, phase.gpu, Program.NVIDIA_SMI, step)
            case RemoveVgpu(vgpu) if gpu_state is not None:
                live = next(one for one in gpu_state.host.live if one.id == vgpu)
                tuple(claims(site.kernel, state.inventory, gpu_state.host, live))
            case _:
                pass


def _obstacles_to_drivers(site: Site, plan: DriverPlan) -> Iterator[Reason]:
    """Yield why a unit's GPUs could not change their drivers even when they carry nothing and nobody uses them."""
    lasting = [reason for reason in plan.refusals if not reason.code.passes]
    yield from lasting
    for step in plan.steps if not lasting else ():
        if isinstance(step, LoadModule):
            try:
                site.tools.demand_module(step.driver)
            except ToolError as error:
                yield refusals.module_missing(_first_address(plan), step.driver, str(error))


def _first_address(plan: DriverPlan) -> str:
    return next((step.address for step in plan.steps if not isinstance(step, LoadModule)), plan.unit)


def _needs_sriov_manage(inventory: Inventory, gpu: PciAddress) -> bool:
    function = inventory.facts.functions[gpu]
    return function.id.vendor == NVIDIA and function.driver == NVIDIA_DRIVER


def _missing(site: Site, gpu: PciAddress, program: Program, step: VgpuStep) -> Iterator[Reason]:
    try:
        site.tools.demand(program)
    except ToolMissingError as error:
        yield shortfalls.program_missing(gpu, program, step.text, error.said or str(error))
