"""The workers of a schedule: those that its phases select, and those that it still has to take its marks from."""

import msgspec
from msgspec.structs import replace

from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.hypervisor import VmsUnknown
from gpuvirt.model.workers.observed import ScheduleObservation, WorkerNode
from gpuvirt.model.workers.status import NO_VM, Worker, WorkerStep
from gpuvirt_schedules.decide.arriving import is_alive
from gpuvirt_schedules.decide.matching import duplicates, match
from gpuvirt_schedules.decide.moves import Move, is_off, mark


class Members(msgspec.Struct, frozen=True):
    """The workers of one round, and the nodes that are no workers any more."""

    workers: tuple[Worker, ...]
    released: tuple[Worker, ...] = ()


def members(before: tuple[Worker, ...], observed: ScheduleObservation, mine: str) -> Members:
    """Return the workers by what was observed; each keeps what the status has of it."""
    known = {worker.node: worker for worker in before}
    orphans = (node.name for node in observed.nodes.values() if node.cordoned_by == mine)
    selected = (node.name for node in observed.nodes.values() if node.phases)
    names = sorted({*known, *orphans, *selected})
    workers, leftover = list[Worker](), list[Worker]()
    for name in names:
        worker, node = known.get(name, Worker(name)), observed.nodes.get(name)
        if node is None:
            if not is_gone(worker, observed) and worker.vm not in observed.claims:
                workers.append(without_node(worker))
        elif node.phases or _has_lost_labels(worker, node):
            workers.append(_seen(worker, node, observed))
        else:
            leftover.append(_seen(worker, node, observed))
    several = duplicates(workers)
    return Members(
        tuple(replace(worker, vm=NO_VM) if worker.vm in several else worker for worker in workers),
        tuple(leftover),
    )


def without_node(worker: Worker) -> Worker:
    """Return a worker whose Node was deleted; it keeps the phases, and the vGPU types, that its labels gave it."""
    return replace(worker, node_uid="")


def is_gone(worker: Worker, observed: ScheduleObservation) -> bool:
    """Return whether neither the Node nor the VM of a worker exists."""
    if isinstance(observed.vms, VmsUnknown):
        return False
    return not worker.vm or worker.vm not in observed.vms


def released(worker: Worker, node: WorkerNode, observed: ScheduleObservation, mine: str) -> Move | None:
    """Return the move that takes the schedule's marks from a node that is no worker any more; None if it has none.

    A node whose VM has just been suspended still seems to be Ready, and would get pods.
    """
    if node.cordoned_by != mine and not node.is_announced:
        return None
    reason = reasons.step_pending(worker.node, WorkerStep.UNCORDON)
    renewal = worker.renewal if worker.renewal is not None else node.renewal or ""
    if node.is_ready and not (_is_on(worker, observed) or is_alive(worker, node)):
        return Move(WorkerStep.UNCORDON, reason=reason, renewal=renewal)
    action = mark(node, cordon=False if node.cordoned_by == mine else None, taint=False)
    return Move(WorkerStep.UNCORDON, (action,), reason)


def _is_on(worker: Worker, observed: ScheduleObservation) -> bool:
    if isinstance(observed.vms, VmsUnknown) or worker.vm not in observed.vms:
        return False
    return not is_off(observed.vms, worker.vm)


def _has_lost_labels(worker: Worker, node: WorkerNode) -> bool:
    """Return whether a worker's Node is another object, without the labels: a controller of the cloud deletes Nodes."""
    return bool(worker.phases) and worker.node_uid != node.uid


def _seen(worker: Worker, node: WorkerNode, observed: ScheduleObservation) -> Worker:
    """Return a worker with its VM and its phases; the uid of a Node that has lost its labels is not taken over."""
    worker = match(worker, node, observed.vms)
    if not node.phases and _has_lost_labels(worker, node):
        return replace(
            worker,
            reason=Reason(
                ReasonCode.WORKER_LABELS_LOST,
                f"node {node.name}",
                "was deleted and registered again, and is no longer selected by its phases:"
                f" {', '.join(worker.phases)}",
                fix="label it: kubectl label node",
            ),
        )
    if isinstance(observed.vms, VmsUnknown) and worker.node_uid != node.uid:
        return _selected(worker, node)  # matched once the hypervisor answers
    return replace(_selected(worker, node), node_uid=node.uid, reason=None)


def _selected(worker: Worker, node: WorkerNode) -> Worker:
    types = tuple((phase, node.types[phase]) for phase in sorted(node.types))
    return replace(worker, phases=tuple(sorted(node.phases)), types=types)
