"""Whether a switch may begin: no worker is drained before the hypervisor says that each VM which leaves can leave.

Otherwise a single VM that can't be suspended would take the pods of all workers, and free the GPU for nobody.
"""

from collections.abc import Iterable, Iterator, Mapping

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.hypervisor import Abilities, VmKey, VmsUnknown, WorkerVm
from gpuvirt.model.workers.spec import Begin, Leave, OnTimeout
from gpuvirt.model.workers.status import Worker, WorkerStep
from gpuvirt_schedules.decide.moves import Move, Round, found_vm, is_off, proven_vm
from gpuvirt_schedules.decide.profiles import keeps_type, type_fault

BEGUN = frozenset({WorkerStep.DRAIN, WorkerStep.DETACH, WorkerStep.LEAVE})
"""The steps of a worker whose node needs no cordon of the schedule, since an admin has cordoned it."""


def unbegun(workers: Iterable[Worker], around: Round) -> tuple[Worker, ...]:
    """Return the workers that have to leave, and from which nothing was taken yet."""
    if around.schedule.begin is Begin.ANYWAY:
        return ()
    return tuple(
        worker
        for worker in workers
        if worker.node in around.others
        and not is_off(around.observed.vms, worker.vm)
        and not _has_begun(worker, around)
    )


def vms_to_check(workers: Iterable[Worker], around: Round) -> frozenset[VmKey]:
    """Return the VMs of which it has to be known whether they can leave, before the first of their nodes is drained."""
    if isinstance(around.observed.vms, VmsUnknown):
        return frozenset()
    return frozenset(worker.vm for worker in unbegun(workers, around) if worker.vm)


def waits(workers: Iterable[Worker], around: Round) -> Mapping[NodeName, Move]:
    """Return the moves of workers that do not begin to leave, as one of them can't; nothing if all can."""
    leaving = unbegun(workers, around)
    staying = {worker.node: move for worker in leaving for move in _stays(worker, around)}
    if not staying:
        return {}
    waiting = {worker.node: reasons.others_stay(worker.node, sorted(staying)) for worker in leaving}
    return {node: staying.get(node, Move(WorkerStep.CHECK, reason=reason)) for node, reason in waiting.items()}


def _has_begun(worker: Worker, around: Round) -> bool:
    node = around.node_of(worker)
    return worker.step in BEGUN or (node is not None and node.cordoned_by == around.schedule.name)


def _stays(worker: Worker, around: Round) -> Iterator[Move]:
    """Yield the move of a worker that can't leave, or of which that is unknown; nothing if it can."""
    proof, vm, abilities = proven_vm(worker, around), found_vm(worker, around), around.observed.abilities
    if isinstance(proof, Move) or isinstance(vm, Move):
        yield proof if isinstance(proof, Move) else Move(WorkerStep.MATCH)
    elif around.node_of(worker) is None:
        yield Move(WorkerStep.CHECK, reason=reasons.node_not_registered(worker.node))
    elif (lacking := type_fault(worker, vm, around)) is not None:
        yield lacking
    elif isinstance(abilities, VmsUnknown):
        yield Move(WorkerStep.READ, reason=reasons.hypervisor_unknown(abilities.code, abilities.text))
    elif worker.vm not in abilities:
        yield Move(WorkerStep.CHECK, reason=reasons.step_pending(worker.node, WorkerStep.CHECK))
    else:
        yield from _refusals(worker, vm, abilities[worker.vm], around)


def _refusals(worker: Worker, vm: WorkerVm, abilities: Abilities, around: Round) -> Iterator[Move]:
    """Yield the move of a worker whose VM certainly can't leave, or not get the vGPU type of the phase.

    An ability that is not proven keeps nothing: a vCenter says nothing of a type that no host offers, and libvirt
    nothing without QEMU's answer. `onTimeout: Force` takes the power of a guest that can't be shut down.
    """
    is_suspended = around.schedule.leave is Leave.SUSPEND and keeps_type(worker, vm)
    is_forced = not is_suspended and around.schedule.drain.on_timeout is OnTimeout.FORCE
    needed = () if is_forced else (abilities.suspend if is_suspended else abilities.shut_down,)
    if around.phase in worker.phases:
        needed = (*needed, abilities.set_vgpu_type)
    for ability in needed:
        if ability.is_possible is False:
            yield Move(WorkerStep.CHECK, reason=reasons.call_refused(worker.node, ability.code, ability.text))
