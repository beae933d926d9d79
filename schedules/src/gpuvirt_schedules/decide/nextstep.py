"""The next step of one worker, with its actions as data, and what leaving and arriving workers have in common.

Each action can be taken again without harm, and names what it changes in `text`.
"""

from datetime import datetime

import msgspec

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, count_of
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
from gpuvirt.model.workers.observed import NodePod, ScheduleObservation, WorkerNode, elapsed_s
from gpuvirt.model.workers.spec import PhaseName, Schedule, WorkerProfile
from gpuvirt.model.workers.status import Worker, WorkerStep
from gpuvirt_schedules.decide.matching import prove, unmatched


class MarkNode(msgspec.Struct, frozen=True):
    """Change what the schedule has set on a node; the node must still have this version."""

    node: NodeName
    version: str
    cordon: bool | None = None
    """True: make it unschedulable, in the schedule's name. False: schedulable. None: leave it."""
    taint: bool | None = None
    """Whether it has the taint of the announcement; None: leave it."""
    labels: tuple[tuple[str, str | None], ...] = ()
    """Labels to set, by key; None removes one. All changes are one write."""

    @property
    def text(self) -> str:
        """The log line: `cordons node worker-1`."""
        verbs = {True: "cordons", False: "uncordons", None: "marks"}
        taint = {True: " and announces it", False: " and takes the announcement away", None: ""}
        labels = ", ".join(f"{key}={value}" if value is not None else f"{key}-" for key, value in self.labels)
        return f"{verbs[self.cordon]} node {self.node}{taint[self.taint]}{f', labels {labels}' if labels else ''}"


class EvictPod(msgspec.Struct, frozen=True):
    """Evict a pod by the API, which asks the budgets; another pod of this name stays."""

    node: NodeName
    pod: NodePod

    @property
    def text(self) -> str:
        """The log line: `evicts pod default/train-0 from node worker-1`."""
        return f"evicts pod {self.pod.where} from node {self.node}"


class DeletePod(msgspec.Struct, frozen=True):
    """Delete a pod, whatever its budgets say: `onTimeout: Force`."""

    node: NodeName
    pod: NodePod

    @property
    def text(self) -> str:
        """The log line: `deletes pod default/train-0 of node worker-1 (onTimeout: Force)`."""
        return f"deletes pod {self.pod.where} of node {self.node} (onTimeout: Force)"


class CallVm(msgspec.Struct, frozen=True):
    """Make a call to the hypervisor for a worker's VM."""

    node: NodeName
    call: Call

    @property
    def text(self) -> str:
        """The log line: `asks the hypervisor to suspend the VM of node worker-1`."""
        return f"asks the hypervisor for {self.call.action} of the VM of node {self.node}"


ScheduleAction = MarkNode | EvictPod | DeletePod | CallVm


CALL_AGAIN_S = 20.0
"""How long after a call its effect is awaited before the same call is made again."""
HELD_AGAIN_S = 30.0
"""How often what a held step waits for is read, and its actions are tried again: a budget may allow an eviction now."""


class ScheduleContext(msgspec.Struct, frozen=True):
    """The inputs of all workers' next steps in one round."""

    schedule: Schedule
    observed: ScheduleObservation
    now: datetime
    others: tuple[NodeName, ...] = ()
    """The workers of other phases, and those with another vGPU type, that have not been confirmed off."""
    phase: PhaseName | None = None
    """The current phase."""

    def node_of(self, worker: Worker) -> WorkerNode | None:
        """Return the Node object of a worker, None if it does not exist."""
        return self.observed.nodes.get(worker.node)

    def elapsed_s(self, worker: Worker, step: WorkerStep) -> float:
        """Return how long a worker has been in a step while this leader made rounds; 0 if it is not in that step."""
        if worker.step is not step or worker.since is None:
            return 0.0
        return elapsed_s(worker.since, self.now, self.observed.rounds_since)


class NextStep(msgspec.Struct, frozen=True):
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


def found_vm(worker: Worker, ctx: ScheduleContext) -> WorkerVm | NextStep:
    """Return the VM of a worker, or the next step of a worker whose VM is unknown. A call needs `proven_vm`."""
    vms = ctx.observed.vms
    if isinstance(vms, VmsUnknown):
        return NextStep(WorkerStep.READ, reason=reasons.hypervisor_unknown(vms.code, vms.text))
    why = _claimed(worker, ctx) or unmatched(worker, ctx.node_of(worker), vms)
    return NextStep(WorkerStep.MATCH, reason=why) if why is not None else vms[worker.vm]


def proven_vm(worker: Worker, ctx: ScheduleContext) -> VmProof | NextStep:
    """Return the proof of whose VM a worker's is, or the next step of a worker for whose VM no call may be made."""
    vms = ctx.observed.vms
    if isinstance(vms, VmsUnknown):
        return NextStep(WorkerStep.READ, reason=reasons.hypervisor_unknown(vms.code, vms.text))
    proof = _claimed(worker, ctx) or prove(worker, ctx.node_of(worker), vms)
    return proof if isinstance(proof, VmProof) else NextStep(WorkerStep.MATCH, reason=proof)


def _claimed(worker: Worker, ctx: ScheduleContext) -> Reason | None:
    """Return why a VM is no worker's: another schedule has matched it with another Node, of which one is stale.

    Both schedules see the match of the other in its status, and neither touches the VM, until the stale Node is gone.
    """
    other = ctx.observed.claims.get(worker.vm)
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


def call(worker: Worker, step: WorkerStep, action: Action, ctx: ScheduleContext, vgpu_type: str = "") -> NextStep:
    """Return the step of a worker that a call brings further; the call is not made again while it may take effect."""
    proof = proven_vm(worker, ctx)
    if isinstance(proof, NextStep):
        return proof
    last = ctx.observed.calls.get(worker.vm)
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
            return NextStep(step, reason=reason)
    return NextStep(step, (CallVm(worker.node, Call(proof, action, vgpu_type)),), reason)


def pending(worker: Worker, step: WorkerStep, *actions: ScheduleAction, renewal: str | None = None) -> NextStep:
    """Return a step whose effect has not been observed yet."""
    return NextStep(step, actions, reasons.step_pending(worker.node, step), renewal)


def mark(
    node: WorkerNode,
    *,
    cordon: bool | None = None,
    taint: bool | None = None,
    labels: tuple[tuple[str, str | None], ...] = (),
) -> MarkNode:
    """Return the change of a node's marks, for the version of it that was read."""
    return MarkNode(node.name, node.version, cordon, taint, labels)


def profile_of(schedule: Schedule, worker: Worker, phase: PhaseName | None) -> WorkerProfile | None:
    """Return the profile of a worker in a phase; None if the phase leaves its VM as it is."""
    vgpu_type = next((vgpu_type for name, vgpu_type in worker.types if name == phase), None)
    found = (profile for entry in schedule.phases if entry.name == phase for profile in entry.profiles)
    return next((profile for profile in found if profile.vgpu_type == vgpu_type), None)


def has_type(vm: WorkerVm, vgpu_type: str) -> bool:
    """Return whether the hypervisor shows a VM with one vGPU of a type."""
    return vm.vgpu_types == (vgpu_type,)


def is_type_read(worker: Worker, vm: WorkerVm, profile: WorkerProfile, ctx: ScheduleContext) -> bool:
    """Return whether a worker's VM was read with the type of a profile; that a call was accepted proves nothing."""
    del worker, ctx
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


def type_fault(worker: Worker, vm: WorkerVm, ctx: ScheduleContext) -> NextStep | None:
    """Return the next step of a worker whose VM can't get the vGPU type of the phase, since it has not one vGPU."""
    profile = profile_of(ctx.schedule, worker, ctx.phase)
    if profile is None or len(vm.vgpu_types) == 1:
        return None
    reason = Reason(
        ReasonCode.NOT_ONE_VGPU,
        f"node {worker.node}",
        f"is on VM {vm.name} with {count_of(len(vm.vgpu_types), 'vGPU')}; its type can't be changed to"
        f" {profile.vgpu_type}",
        (Seen("vGPUs", ", ".join(vm.vgpu_types)),),
        "give the VM exactly one vGPU, or remove the profile",
    )
    return NextStep(WorkerStep.SET_TYPE, reason=reason)


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
