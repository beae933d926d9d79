"""How a worker leaves: its node is cordoned and drained, and its VM is suspended or shut down, and seen off.

Source: kubectl drain (staging/src/k8s.io/kubectl/pkg/drain): mirror pods, pods of DaemonSets and ended pods stay;
a pod without a controller or with an emptyDir volume keeps the whole node from being drained, without its options.
"""

from collections.abc import Iterable

from gpuvirt.model.reasons import Reason, ReasonCode, schedules
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.hypervisor import Action, Power, WorkerVm
from gpuvirt.model.workers.observed import NodePod, WorkerNode
from gpuvirt.model.workers.spec import Drain, Leave, OnTimeout
from gpuvirt.model.workers.status import Worker, WorkerStep
from gpuvirt_schedules.decide.actions import DeletePod, EvictPod
from gpuvirt_schedules.decide.moves import Move, Round, call, found_vm, is_off, mark, proven_vm
from gpuvirt_schedules.decide.profiles import keeps_type

CORDON_SETTLES_S = 5.0
"""How long after a cordon the scheduler may still bind a pod to the node, which it decided before."""
SHUTDOWN_S = 300.0
"""How long a guest has to shut down, before `onTimeout: Force` takes its power."""


def leaving(worker: Worker, around: Round) -> Move:
    """Return the next move of a worker whose phase has ended, or whose VM has to be off for another vGPU type."""
    node = around.node_of(worker)
    if is_off(around.observed.vms, worker.vm) and not isinstance(found_vm(worker, around), Move):
        return _away(worker, node)
    if node is None:
        return _without_node(worker, around)
    if not node.cordoned_by:  # before anything is done, it must be certain whose VM it is
        found = proven_vm(worker, around)
        if isinstance(found, Move):
            return found
    if not is_cordoned(node):
        return Move(WorkerStep.CORDON, (mark(node, cordon=True),), reasons.step_pending(worker.node, WorkerStep.CORDON))
    drained = _drained(worker, node, around)
    return drained if drained is not None else _leave(worker, around)


def is_cordoned(node: WorkerNode) -> bool:
    """Return whether no pod is scheduled to a node any more, by an admin's cordon or the schedule's."""
    return node.is_unschedulable


def is_cordon_settled(node: WorkerNode) -> bool:
    """Return whether no pod can come any more that the scheduler has placed before the cordon."""
    return node.cordoned_for_s >= CORDON_SETTLES_S


def pods_left(pods: Iterable[NodePod]) -> tuple[NodePod, ...]:
    """Return the pods that have to end before the VM leaves."""
    return tuple(pod for pod in pods if not (pod.is_of_daemon_set or pod.is_static or pod.has_ended))


def blockers(pods: Iterable[NodePod], drain: Drain) -> tuple[NodePod, ...]:
    """Return the pods for which kubectl drain would refuse the node."""
    return tuple(
        pod
        for pod in pods
        if not pod.is_ending
        and ((pod.is_bare and not drain.deletes_bare_pods) or (pod.has_empty_dir and not drain.deletes_empty_dir_data))
    )


def _away(worker: Worker, node: WorkerNode | None) -> Move:
    """The VM is off; for some time its node still seems to be Ready, and must get no pod."""
    if node is not None and node.is_ready and not node.is_unschedulable:
        return Move(WorkerStep.CORDON, (mark(node, cordon=True),), reasons.step_pending(worker.node, WorkerStep.CORDON))
    return Move(WorkerStep.AWAY)


def _without_node(worker: Worker, around: Round) -> Move:
    """Pods of a deleted Node run on, and nobody can evict them."""
    found = found_vm(worker, around)
    if isinstance(found, Move):
        return found
    return Move(WorkerStep.CORDON, reason=reasons.node_not_registered(worker.node))


def _drained(worker: Worker, node: WorkerNode, around: Round) -> Move | None:
    """Return the move of a worker that still has pods or volumes; None once it has none."""
    pods = pods_left(around.observed.pods.get(node.name, ()))
    if pods:
        return _drain(worker, pods, around)
    if not is_cordon_settled(node):
        return Move(WorkerStep.DRAIN, reason=reasons.step_pending(worker.node, WorkerStep.CORDON))
    volumes = around.observed.attachments.get(node.name, ())
    return (
        Move(
            WorkerStep.DETACH,
            reason=Reason(
                ReasonCode.VOLUMES_ATTACHED,
                f"node {worker.node}",
                f"still has volumes: {schedules.listed(volumes)}",
                fix="see kubectl get volumeattachments",
            ),
        )
        if volumes
        else None
    )


def _drain(worker: Worker, pods: tuple[NodePod, ...], around: Round) -> Move:
    drain = around.schedule.drain
    staying = tuple(pod for pod in pods if not pod.is_ending)
    is_late = worker.step is WorkerStep.DRAIN and around.elapsed_s(worker, WorkerStep.DRAIN) >= drain.timeout_s
    names = [pod.where for pod in pods]
    if blocking := blockers(pods, drain):  # Force breaks budgets; it loses no data that the spec keeps
        return Move(
            WorkerStep.DRAIN,
            reason=Reason(
                ReasonCode.POD_BLOCKS_DRAIN,
                f"node {worker.node}",
                "is not drained, because some pods have no controller, or have an emptyDir volume:"
                f" {schedules.listed([pod.where for pod in blocking])}",
                fix="delete the pods, or set deleteBarePods or deleteEmptyDirData in the schedule's drain",
            ),
        )
    if is_late and drain.on_timeout is OnTimeout.FORCE:
        deleted = tuple(DeletePod(worker.node, pod) for pod in staying)
        return Move(WorkerStep.DRAIN, deleted, reasons.pods_left(worker.node, names), forced=len(deleted))
    evictions = tuple(EvictPod(worker.node, pod) for pod in staying)
    return Move(WorkerStep.DRAIN, evictions, reasons.pods_left(worker.node, names))


def _leave(worker: Worker, around: Round) -> Move:
    vm = found_vm(worker, around)
    if isinstance(vm, Move):
        return vm
    action = _action(worker, vm, around)
    is_busy = vm.is_changing and not (vm.is_shutting_down and action is Action.POWER_OFF)
    if is_busy or vm.power is not Power.ON:
        return Move(WorkerStep.LEAVE, reason=reasons.step_pending(worker.node, WorkerStep.LEAVE))
    return call(worker, WorkerStep.LEAVE, action, around)


def _action(worker: Worker, vm: WorkerVm, around: Round) -> Action:
    if around.schedule.leave is Leave.SUSPEND and keeps_type(worker, vm):
        return Action.SUSPEND
    is_late = around.elapsed_s(worker, WorkerStep.LEAVE) >= SHUTDOWN_S
    is_forced = around.schedule.drain.on_timeout is OnTimeout.FORCE
    return Action.POWER_OFF if is_late and is_forced else Action.SHUT_DOWN
