"""The profile of a worker: which vGPU type its VM has in a phase, and the labels that its node has then."""

from gpuvirt.model.reasons import Reason, ReasonCode, Seen
from gpuvirt.model.workers.hypervisor import VmsReading, VmsUnknown, WorkerVm
from gpuvirt.model.workers.observed import WorkerNode
from gpuvirt.model.workers.spec import PhaseName, Schedule, WorkerProfile
from gpuvirt.model.workers.status import Worker, WorkerStep
from gpuvirt_schedules.decide.moves import Move, Round, is_off


def profile_of(schedule: Schedule, worker: Worker, phase: PhaseName | None) -> WorkerProfile | None:
    """Return the profile of a worker in a phase; None if the phase leaves its VM as it is."""
    vgpu_type = next((vgpu_type for name, vgpu_type in worker.types if name == phase), None)
    found = (profile for entry in schedule.phases if entry.name == phase for profile in entry.profiles)
    return next((profile for profile in found if profile.vgpu_type == vgpu_type), None)


def has_type(vm: WorkerVm, vgpu_type: str) -> bool:
    """Return whether the hypervisor shows a VM with one vGPU of a type."""
    return vm.vgpu_types == (vgpu_type,)


def is_type_read(worker: Worker, vm: WorkerVm, profile: WorkerProfile, around: Round) -> bool:
    """Return whether a worker's VM was read with the type of a profile; that a call was accepted proves nothing."""
    del worker, around
    return has_type(vm, profile.vgpu_type)


def keeps_type(worker: Worker, vm: WorkerVm) -> bool:
    """Return whether a VM may be suspended: no phase gives it another type, which a suspended VM can't get."""
    return all(has_type(vm, vgpu_type) for _, vgpu_type in worker.types)


def is_changing_type(worker: Worker, profile: WorkerProfile | None, vms: VmsReading) -> bool:
    """Return whether a worker of the phase may have part of the GPU by a vGPU of another type."""
    if profile is None or isinstance(vms, VmsUnknown) or is_off(vms, worker.vm):
        return False
    vm = vms.get(worker.vm)
    return vm is None or not has_type(vm, profile.vgpu_type)


def type_fault(worker: Worker, vm: WorkerVm, around: Round) -> Move | None:
    """Return the move of a worker whose VM can't get the vGPU type of the phase, since it has not one vGPU."""
    profile = profile_of(around.schedule, worker, around.phase)
    if profile is None or len(vm.vgpu_types) == 1:
        return None
    reason = Reason(
        ReasonCode.NOT_ONE_VGPU,
        f"node {worker.node}",
        f"is on VM {vm.name} with {len(vm.vgpu_types)} vGPUs; its type can't be changed to {profile.vgpu_type}",
        (Seen("vGPUs", ", ".join(vm.vgpu_types)),),
        "give the VM exactly one vGPU, or remove the profile",
    )
    return Move(WorkerStep.SET_TYPE, reason=reason)


def label_changes(
    schedule: Schedule, worker: Worker, node: WorkerNode, phase: PhaseName | None
) -> tuple[tuple[str, str | None], ...]:
    """Return the labels to change on a node whose VM has the type of a phase.

    A key that a profile of the worker names in another phase is removed; other labels stay.
    """
    profile = profile_of(schedule, worker, phase)
    if profile is None:
        return ()
    others = (profile_of(schedule, worker, name) for name, _ in worker.types)
    named = {key for other in others if other is not None for key, _ in other.labels}
    desired: dict[str, str | None] = {**dict.fromkeys(sorted(named)), **dict(profile.labels)}
    return tuple((key, value) for key, value in desired.items() if node.labels.get(key) != value)
