"""How a worker arrives: once the GPU is free, its VM is started, its kubelet is seen alive, and it is uncordoned.

Its VM has the vGPU type of the phase before it is started: a hypervisor changes the vGPU of a VM that is off, and of no
other, since a suspended VM has the vGPU's memory on disk. So the VM leaves, is seen off, and its type is set and read
back. The labels that name the type are set by the same write that uncordons the node, so that no pod meets a node with
the labels of another type.
"""

from datetime import datetime

from gpuvirt.model.reasons import Reason, ReasonCode, schedules
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.hypervisor import Action, Power, WorkerVm
from gpuvirt.model.workers.observed import WorkerNode
from gpuvirt.model.workers.spec import WorkerProfile
from gpuvirt.model.workers.status import Worker, WorkerStep
from gpuvirt_schedules.decide.leaving import leaving
from gpuvirt_schedules.decide.moves import Move, Round, call, found_vm, is_off, mark
from gpuvirt_schedules.decide.profiles import is_type_read, label_changes, profile_of, type_fault

SKEW_S = 30.0
RENEWAL_S = 12.0
"""The age of a Lease's renewal: the kubelet renews every 10 s, and a round may come later."""


def retyping(worker: Worker, vm: WorkerVm, profile: WorkerProfile, around: Round) -> Move:
    """Return the next move of a worker of the phase whose VM has another vGPU type."""
    desired = profile.vgpu_type
    if (fault := type_fault(worker, vm, around)) is not None:
        return fault
    if vm.power is Power.SUSPENDED and not vm.is_changing:
        return Move(
            WorkerStep.SET_TYPE,
            reason=Reason(
                ReasonCode.SUSPENDED_WITH_TYPE,
                f"node {worker.node}",
                f"is on VM {vm.name}, which is suspended with the vGPU type {vm.vgpu_types[0]}, so it can't get"
                f" {desired}",
                fix="resume the VM, and the schedule shuts it down; or power it off (its suspended memory is lost)",
            ),
        )
    if vm.power is Power.OFF and vm.is_changing:
        return Move(WorkerStep.SET_TYPE, reason=reasons.step_pending(worker.node, WorkerStep.SET_TYPE))
    if not is_seen_off(vm):
        return leaving(worker, around)
    node = around.node_of(worker)
    if node is not None and not node.is_unschedulable:  # its labels are those of the other type until it is uncordoned
        return Move(WorkerStep.CORDON, (mark(node, cordon=True),), reasons.step_pending(worker.node, WorkerStep.CORDON))
    return call(worker, WorkerStep.SET_TYPE, Action.SET_VGPU_TYPE, around, desired)


def is_seen_off(vm: WorkerVm) -> bool:
    """Return whether the hypervisor shows a VM off, and nothing under way."""
    return vm.power is Power.OFF and not vm.is_changing


def arriving(worker: Worker, around: Round, mine: str) -> Move:
    """Return the next move of a worker whose phase holds. `mine` is the name that the schedule's cordons have."""
    vm = found_vm(worker, around)
    if isinstance(vm, Move):
        return vm
    profile = profile_of(around.schedule, worker, around.phase)
    if profile is not None and not is_type_read(worker, vm, profile, around):
        return retyping(worker, vm, profile, around)
    if is_off(around.observed.vms, worker.vm):
        if not is_gpu_free(around):
            return Move(
                WorkerStep.WAIT_FOR_GPU,
                reason=Reason(
                    ReasonCode.GPU_STILL_USED,
                    f"node {worker.node}",
                    "waits for the GPU, which workers of another phase may still use:"
                    f" {schedules.listed(around.others)}",
                    fix="see what those workers wait for",
                ),
            )
        return call(worker, WorkerStep.START, Action.START, around)
    if vm.is_changing:
        return Move(WorkerStep.START, reason=reasons.step_pending(worker.node, WorkerStep.START))
    return _ready(worker, around, mine)


def is_gpu_free(around: Round) -> bool:
    """Return whether each worker of another phase, or with another vGPU type, was seen off by the hypervisor."""
    return not around.others


def is_cordon_of(node: WorkerNode, mine: str) -> bool:
    """Return whether the schedule has cordoned a node; an admin's cordon stays."""
    return node.cordoned_by == mine


def is_alive(worker: Worker, node: WorkerNode) -> bool:
    """Return whether a node's kubelet works: it is Ready, and has renewed its Lease since the VM was seen on."""
    return node.is_ready and worker.renewal is not None and node.renewal not in {None, worker.renewal}


def _ready(worker: Worker, around: Round, mine: str) -> Move:
    """Return the move of a worker whose VM is on. One that has never left needs no new heartbeat."""
    node = around.node_of(worker)
    if node is None:
        return Move(WorkerStep.HEARTBEAT, reason=reasons.node_not_registered(worker.node))
    labels = label_changes(around.schedule, worker, node, around.phase)
    has_marks = is_cordon_of(node, mine) or node.is_announced or bool(labels)
    has_stayed = worker.renewal is None and worker.step in {WorkerStep.NONE, WorkerStep.SERVING}
    if has_stayed and node.is_ready and not has_marks:
        return Move(WorkerStep.SERVING)
    if worker.step is WorkerStep.SERVING and not has_marks:
        return Move(WorkerStep.SERVING, renewal=worker.renewal)
    renewal = worker.renewal if worker.renewal is not None else node.renewal or ""
    if not is_alive(worker, node):
        return Move(
            WorkerStep.HEARTBEAT,
            reason=Reason(
                ReasonCode.NO_HEARTBEAT,
                f"node {worker.node}",
                "does not count as ready: its VM runs, but its kubelet has not renewed its Lease, or is not Ready",
                fix="see the kubelet's log in the VM",
            ),
            renewal=renewal,
        )
    if has_marks:
        uncordons = False if is_cordon_of(node, mine) else None
        action = mark(node, cordon=uncordons, taint=False, labels=labels)
        return Move(WorkerStep.UNCORDON, (action,), reasons.step_pending(worker.node, WorkerStep.UNCORDON), renewal)
    return Move(WorkerStep.SERVING, reason=_clock_skew(node, around.now), renewal=renewal)


def _clock_skew(node: WorkerNode, now: datetime) -> Reason | None:
    """Return how far the clock of a guest is off that has just renewed its Lease; None if it is right."""
    if node.renewed_at is None:
        return None
    age_s = (now - node.renewed_at).total_seconds()
    if -SKEW_S <= age_s <= SKEW_S + RENEWAL_S:
        return None
    return Reason(
        ReasonCode.CLOCK_SKEWED,
        f"node {node.name}",
        f"has a clock that differs from the controller's by {round(age_s)} s",
        fix="set the guest's clock at resume: VMware Tools or chrony with makestep",
    )
