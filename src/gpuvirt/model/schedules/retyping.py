"""How a worker gets the vGPU type of its phase: its VM leaves, is seen off, and its type is set and read back.

A hypervisor changes the vGPU of a VM that is off, and of no other: a suspended VM has the vGPU's memory on disk.
"""

from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.schedules.hypervisor import Action, Power, WorkerVm
from gpuvirt.model.schedules.leaving import leaving
from gpuvirt.model.schedules.moves import Move, Round, call, mark
from gpuvirt.model.schedules.spec import Profile
from gpuvirt.model.schedules.status import Step, Worker


def retyping(worker: Worker, vm: WorkerVm, profile: Profile, around: Round) -> Move:
    """Return the next move of a worker of the phase whose VM has another vGPU type."""
    desired = profile.vgpu_type
    if len(vm.vgpu_types) != 1:
        return Move(Step.SET_TYPE, reason=reasons.not_one_vgpu(worker.node, vm.name, vm.vgpu_types, desired))
    if vm.power is Power.SUSPENDED and not vm.is_changing:
        return Move(Step.SET_TYPE, reason=reasons.suspended_with_type(worker.node, vm.name, vm.vgpu_types[0], desired))
    if vm.power is Power.OFF and vm.is_changing:
        return Move(Step.SET_TYPE, reason=reasons.step_pending(worker.node, Step.SET_TYPE))
    if not is_seen_off(vm):
        return leaving(worker, around)
    node = around.node_of(worker)
    if node is not None and not node.is_unschedulable:  # its labels are those of the other type until it is uncordoned
        return Move(Step.CORDON, (mark(node, cordon=True),), reasons.step_pending(worker.node, Step.CORDON))
    return call(worker, Step.SET_TYPE, Action.SET_VGPU_TYPE, around, desired)


def is_seen_off(vm: WorkerVm) -> bool:
    """Return whether the hypervisor shows a VM off, and nothing under way."""
    return vm.power is Power.OFF and not vm.is_changing
