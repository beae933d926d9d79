"""Finds what would stop a change of vGPUs half-way, before its first step: a change that will fail removes no vGPU."""

from collections.abc import Iterator

from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.agent.change.observation import HostObservation
from gpuvirt.agent.change.steps import proving
from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.agent.change.steps.vgpusteps import claims, verify_vfs_removable
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA
from gpuvirt.facts.vgpu import Framework
from gpuvirt.hardware.access.tools import Program, ToolError, ToolMissingError
from gpuvirt.model.change.plan import (
    DriverPlan,
    Phase,
    Plan,
    VgpuPlan,
)
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.change.steps import (
    DestroyInstance,
    DisableVfs,
    LoadModule,
    RemoveVgpu,
    SetMigMode,
    SetMixedSizes,
    VgpuStep,
)
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, Seen, refusals

NVIDIA_DRIVER = "nvidia"
"""The driver whose VFs only sriov-manage can switch: it has no `sriov_configure` (drivers/pci/iov.c: ENOENT)."""


def obstacles(observation: HostObservation, state: UnitState, plan: Plan, phase: Phase) -> tuple[Reason, ...]:
    """Return the known reasons why a change can't be finished; none if the phase removes nothing.

    A reason that passes when a process or a VM ends is no obstacle to the other steps.
    """
    if isinstance(phase, DriverPlan):
        return ()
    if not any(isinstance(step, RemoveVgpu | DestroyInstance) for step in phase.steps):
        return ()
    try:
        found = list(_obstacles(observation.change_host, state, phase, _all_steps(state, plan, phase)))
        if phase in plan.emptied:
            found += _obstacles_to_drivers(observation.change_host, plan.drivers)
        return tuple(dict.fromkeys(found))
    except RefusedError as error:
        return (error.reason,)


def _all_steps(state: UnitState, plan: Plan, phase: VgpuPlan) -> tuple[VgpuStep, ...]:
    """Return the steps of a phase, and the later step that disables VFs once the GPU carries no vGPU."""
    gpu_state, last = state.gpu_states.get(phase.gpu), DisableVfs(phase.gpu)
    carries_on_vfs = gpu_state is not None and gpu_state.host.framework is not Framework.SRIOV_VF
    waits = carries_on_vfs and phase in plan.emptied and last not in phase.steps
    has_vfs = bool(state.inventory.facts.functions[phase.gpu].virtfns)
    return (*phase.steps, last) if waits and has_vfs else phase.steps


def _obstacles(
    change_host: ChangeHost, state: UnitState, phase: VgpuPlan, steps: tuple[VgpuStep, ...]
) -> Iterator[Reason]:
    gpu_state = state.gpu_states.get(phase.gpu)
    for step in steps:
        match step:
            case DisableVfs(gpu):
                if _needs_sriov_manage(state.inventory, gpu):
                    yield from _missing(change_host, phase.gpu, Program.SRIOV_MANAGE, step)
                if not phase.pending:
                    verify_vfs_removable(change_host.kernel, state.inventory, gpu)
            case SetMigMode(gpu) | SetMixedSizes(gpu):
                proving.walked(change_host.kernel, [gpu], answered=True)
            case RemoveVgpu(vgpu) if gpu_state is not None:
                live = next(live for live in gpu_state.host.live if live.id == vgpu)
                tuple(claims(change_host.kernel, state.inventory, gpu_state.host, live))
            case _:
                pass


def _obstacles_to_drivers(change_host: ChangeHost, plan: DriverPlan) -> Iterator[Reason]:
    """Yield why a unit's GPUs could not change their drivers, even without vGPUs and users."""
    lasting = [reason for reason in plan.refusals if not reason.code.passes]
    yield from lasting
    for step in plan.steps if not lasting else ():
        if isinstance(step, LoadModule):
            try:
                change_host.tools.demand_module(step.driver)
            except ToolError as error:
                yield refusals.prerequisite_missing(
                    _first_address(plan),
                    f"needs the driver {step.driver}, which is not loaded, and the host has no such kernel module",
                    f"install the host's package of kernel modules with {step.driver}; then modprobe -n {step.driver}"
                    " finds the module",
                    Seen("", str(error)),
                )


def _first_address(plan: DriverPlan) -> str:
    return next((step.address for step in plan.steps if not isinstance(step, LoadModule)), plan.unit)


def _needs_sriov_manage(inventory: Inventory, gpu: PciAddress) -> bool:
    function = inventory.facts.functions[gpu]
    return function.id.vendor == NVIDIA and function.driver == NVIDIA_DRIVER


def _missing(change_host: ChangeHost, gpu: PciAddress, program: Program, step: VgpuStep) -> Iterator[Reason]:
    try:
        change_host.tools.demand(program)
    except ToolMissingError as error:
        yield refusals.prerequisite_missing(
            gpu,
            f"keeps its vGPUs, since a later step needs {program}, which is not installed: {step.text}",
            "install NVIDIA's vGPU manager on the host, or check that its container runs on this node (label"
            " nvidia.com/gpu.deploy.vgpu-manager=true)",
            Seen("", error.output or str(error)),
        )
