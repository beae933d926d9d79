"""The next move of one worker, and what the moves of leaving and arriving workers have in common."""

from datetime import datetime

import msgspec

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.hypervisor import (
    Accepted,
    Action,
    Call,
    OutcomeUnknown,
    Power,
    Refused,
    VmKey,
    VmProof,
    VmsReading,
    VmsUnknown,
    WorkerVm,
)
from gpuvirt.model.workers.observed import ScheduleObservation, WorkerNode, elapsed_s
from gpuvirt.model.workers.spec import PhaseName, Schedule
from gpuvirt.model.workers.status import Worker, WorkerStep
from gpuvirt_schedules.decide.actions import CallVm, MarkNode, ScheduleAction
from gpuvirt_schedules.decide.matching import prove, unmatched

CALL_AGAIN_S = 20.0
"""How long after a call its effect is awaited before the same call is made again."""
HELD_AGAIN_S = 30.0
"""How often what a held step waits for is read, and its actions are tried again: a budget may allow an eviction now."""


class Round(msgspec.Struct, frozen=True):
    """The inputs of all workers' moves in one round."""

    schedule: Schedule
    observed: ScheduleObservation
    now: datetime
    others: tuple[NodeName, ...] = ()
    """The workers of other phases, and those with another vGPU type, that have not been seen off."""
    phase: PhaseName | None = None
    """The phase of now."""

    def node_of(self, worker: Worker) -> WorkerNode | None:
        """Return the Node object of a worker, None if it does not exist."""
        return self.observed.nodes.get(worker.node)

    def elapsed_s(self, worker: Worker, step: WorkerStep) -> float:
        """Return how long a worker has been in a step while this leader made rounds; 0 if it is not in that step."""
        if worker.step is not step or worker.since is None:
            return 0.0
        return elapsed_s(worker.since, self.now, self.observed.rounds_since)


class Move(msgspec.Struct, frozen=True):
    """The step that a worker is in, and the actions that bring it further."""

    step: WorkerStep
    actions: tuple[ScheduleAction, ...] = ()
    reason: Reason | None = None
    """Why the step is not done yet."""
    renewal: str | None = None
    forced: int = 0
    """How many of the actions break budgets."""


def is_off(vms: VmsReading, key: VmKey) -> bool:
    """Return whether the hypervisor says that a VM has no device: it is suspended or off, and nothing is under way.

    Unknown is not off, and neither is a VM that the hypervisor does not show.
    """
    if isinstance(vms, VmsUnknown):
        return False
    vm = vms.get(key)
    return vm is not None and vm.power in {Power.SUSPENDED, Power.OFF} and not vm.is_changing


def found_vm(worker: Worker, around: Round) -> WorkerVm | Move:
    """Return the VM of a worker, or the move of a worker whose VM is unknown. A call needs `proven_vm`."""
    vms = around.observed.vms
    if isinstance(vms, VmsUnknown):
        return Move(WorkerStep.READ, reason=reasons.hypervisor_unknown(vms.code, vms.text))
    why = _claimed(worker, around) or unmatched(worker, around.node_of(worker), vms)
    return Move(WorkerStep.MATCH, reason=why) if why is not None else vms[worker.vm]


def proven_vm(worker: Worker, around: Round) -> VmProof | Move:
    """Return the proof of whose VM a worker's is, or the move of a worker for whose VM no call may be made."""
    vms = around.observed.vms
    if isinstance(vms, VmsUnknown):
        return Move(WorkerStep.READ, reason=reasons.hypervisor_unknown(vms.code, vms.text))
    proof = _claimed(worker, around) or prove(worker, around.node_of(worker), vms)
    return proof if isinstance(proof, VmProof) else Move(WorkerStep.MATCH, reason=proof)


def _claimed(worker: Worker, around: Round) -> Reason | None:
    """Return why a VM is no worker's: another schedule has matched it with another Node, of which one is stale.

    Both schedules see the match of the other in its status, and neither touches the VM, until the stale Node is gone.
    """
    other = around.observed.claims.get(worker.vm)
    return (
        Reason(
            ReasonCode.VM_NOT_MATCHED,
            f"node {worker.node}",
            f"is not proven to be the node of VM {worker.vm_name}: {other}, has that VM, too",
            fix="delete the Node that is stale: the other one renews its Lease (kubectl get leases -n kube-node-lease)",
        )
        if other is not None
        else None
    )


def call(worker: Worker, step: WorkerStep, action: Action, around: Round, vgpu_type: str = "") -> Move:
    """Return the move of a worker that a call brings further; the call is not made again while it may take effect."""
    proof = proven_vm(worker, around)
    if isinstance(proof, Move):
        return proof
    last = around.observed.calls.get(worker.vm)
    reason = reasons.step_pending(worker.node, step)
    if last is not None and last.action is action:
        match last.answer:
            case Refused(code=code, text=text):
                reason = reasons.call_refused(worker.node, code, text)
            case OutcomeUnknown(code=code, text=text):
                reason = reasons.hypervisor_unknown(code, text)
            case Accepted():
                pass
        if last.age_s < CALL_AGAIN_S and not isinstance(last.answer, OutcomeUnknown):
            return Move(step, reason=reason)
    return Move(step, (CallVm(worker.node, Call(proof, action, vgpu_type)),), reason)


def mark(
    node: WorkerNode,
    *,
    cordon: bool | None = None,
    taint: bool | None = None,
    labels: tuple[tuple[str, str | None], ...] = (),
) -> MarkNode:
    """Return the change of a node's marks, for the version of it that was read."""
    return MarkNode(node.name, node.version, cordon, taint, labels)
