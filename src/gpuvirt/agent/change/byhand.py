"""Changes of one GPU by a direct command: removing one vGPU, setting the vGPU scheduler."""

from collections.abc import Callable

from msgspec.structs import replace

from gpuvirt.agent.change.changehost import ChangeHost, ReportStep, changing
from gpuvirt.agent.change.inputs import Inputs
from gpuvirt.agent.change.observation import HostObservation, Learned, observe_unit
from gpuvirt.agent.change.steps.changes import by_hand
from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.agent.change.steps.vgpusteps import Run, VgpusInUseError, take_all
from gpuvirt.facts.ids import PciAddress, VgpuId
from gpuvirt.facts.vgpu import Scheduler
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.planner import plan_removal, plan_scheduler
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, shortfalls


def remove(
    change_host: ChangeHost, gpu: PciAddress, vgpu: VgpuId, inputs: Inputs, report: ReportStep, first: Inventory
) -> tuple[Reason, ...]:
    """Remove one vGPU, or return why it stays; `first` is an earlier inventory of the host. Raises UnitBusyError."""
    return _changed(change_host, gpu, inputs, report, first, lambda seen: removal(seen, gpu, vgpu))


def set_scheduler(
    change_host: ChangeHost, gpu: PciAddress, scheduler: Scheduler, inputs: Inputs, report: ReportStep, first: Inventory
) -> tuple[Reason, ...]:
    """Set a GPU's vGPU scheduler, which lasts until its driver is loaded again; return why not, or why not yet."""
    return _changed(change_host, gpu, inputs, report, first, lambda seen: scheduling(seen, gpu, scheduler))


def removal(seen: HostObservation, gpu: PciAddress, vgpu: VgpuId) -> VgpuPlan:
    """Return the plan that removes one vGPU."""
    return plan_removal(seen.vgpu_state({gpu: DesiredVgpus()}), gpu, vgpu)


def scheduling(seen: HostObservation, gpu: PciAddress, scheduler: Scheduler) -> VgpuPlan:
    """Return the plan that sets the scheduler of a GPU."""
    return plan_scheduler(seen.vgpu_state({gpu: DesiredVgpus(scheduler=scheduler)}), gpu, scheduler)


def _changed(
    change_host: ChangeHost,
    gpu: PciAddress,
    inputs: Inputs,
    report: ReportStep,
    first: Inventory,
    plan: Callable[[HostObservation], VgpuPlan],
) -> tuple[Reason, ...]:
    unit = first.gpus[gpu].unit
    change = by_hand(unit, inputs.newest)
    with changing(change_host, unit, first, inputs.readings) as (by_children, passed), change.under_way(passed):
        seen = observe_unit(by_children, inputs, unit, first, [gpu])
        if gpu not in seen.inventory.gpus:
            return (shortfalls.gone(gpu),)
        found, run = plan(seen), Run(report, change)
        run.change.plan_from(seen.inventory, seen.account.allocations.unmapped)
        try:
            take_all(by_children, seen.inventory, seen.gpu_state(gpu), found, run)
        except VgpusInUseError as error:
            found = plan(replace(seen, learned={gpu: Learned(in_use=error.users)}))
        except RefusedError as error:
            return (error.reason,)
        return (*found.refusals, *found.pending)
