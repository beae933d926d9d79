"""The workers of a schedule, and the next step of each: it arrives for its phase, leaves, or is released.

A worker leaves: its node is cordoned and drained, and its VM is suspended or shut down, and confirmed off. A worker
arrives: once the GPU is free, its VM is started, its kubelet is seen alive, and it is uncordoned. Its VM has the vGPU
type of the phase before it is started: a hypervisor changes the vGPU of a VM that is off, and of no other, since a
suspended VM has the vGPU's memory on disk. So the VM leaves, is confirmed off, and its type is set and read back. The
labels that name the type are set by the same write that uncordons the node, so that no pod meets a node with the labels
of another type.

Source: kubectl drain (staging/src/k8s.io/kubectl/pkg/drain): mirror pods, pods of DaemonSets and ended pods stay;
a pod without a controller or with an emptyDir volume keeps the whole node from being drained, without its options.
"""

from collections.abc import Iterable
from datetime import datetime

import msgspec
from msgspec.structs import replace

from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.hypervisor import Action, Power, VmsUnknown, WorkerVm
from gpuvirt.model.workers.observed import NodePod, ScheduleObservation, WorkerNode
from gpuvirt.model.workers.spec import Drain, Leave, OnTimeout, WorkerProfile
from gpuvirt.model.workers.status import NO_VM, Worker, WorkerStep
from gpuvirt_schedules.decide.matching import duplicates, match
from gpuvirt_schedules.decide.nextstep import (
    DeletePod,
    EvictPod,
    NextStep,
    ScheduleContext,
    call,
    found_vm,
    is_off,
    is_type_read,
    keeps_type,
    label_changes,
    mark,
    pending,
    profile_of,
    proven_vm,
    type_fault,
)

SKEW_S = 30.0
RENEWAL_S = 12.0
"""The age of a Lease's renewal: the kubelet renews every 10 s, and a round may come later."""


def retyping(worker: Worker, vm: WorkerVm, profile: WorkerProfile, ctx: ScheduleContext) -> NextStep:
    """Return the next step of a worker of the phase whose VM has another vGPU type."""
    desired = profile.vgpu_type
    if (fault := type_fault(worker, vm, ctx)) is not None:
        return fault
    if vm.power is Power.SUSPENDED and not vm.is_changing:
        return NextStep(
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
        return pending(worker, WorkerStep.SET_TYPE)
    if not is_confirmed_off(vm):
        return leaving(worker, ctx)
    node = ctx.node_of(worker)
    if node is not None and not node.is_unschedulable:  # its labels are those of the other type until it is uncordoned
        return cordoned(worker, node)
    return call(worker, WorkerStep.SET_TYPE, Action.SET_VGPU_TYPE, ctx, desired)


def is_confirmed_off(vm: WorkerVm) -> bool:
    """Return whether the hypervisor shows a VM off, and nothing under way."""
    return vm.power is Power.OFF and not vm.is_changing


def arriving(worker: Worker, ctx: ScheduleContext, mine: str) -> NextStep:
    """Return the next step of a worker whose phase holds. `mine` is the name that the schedule's cordons have."""
    vm = found_vm(worker, ctx)
    if isinstance(vm, NextStep):
        return vm
    profile = profile_of(ctx.schedule, worker, ctx.phase)
    if profile is not None and not is_type_read(worker, vm, profile, ctx):
        return retyping(worker, vm, profile, ctx)
    if is_off(ctx.observed.vms, worker.vm):
        if not is_gpu_free(ctx):
            return NextStep(
                WorkerStep.WAIT_FOR_GPU,
                reason=Reason(
                    ReasonCode.GPU_STILL_USED,
                    f"node {worker.node}",
                    f"waits for the GPU, which workers of another phase may still use: {reasons.listed(ctx.others)}",
                    fix="see what those workers wait for",
                ),
            )
        return call(worker, WorkerStep.START, Action.START, ctx)
    if vm.is_changing:
        return pending(worker, WorkerStep.START)
    return _ready(worker, ctx, mine)


def is_gpu_free(ctx: ScheduleContext) -> bool:
    """Return whether each worker of another phase, or with another vGPU type, was confirmed off by the hypervisor."""
    return not ctx.others


def is_cordon_of(node: WorkerNode, mine: str) -> bool:
    """Return whether the schedule has cordoned a node; an admin's cordon stays."""
    return node.cordoned_by == mine


def is_alive(worker: Worker, node: WorkerNode) -> bool:
    """Return whether a node's kubelet works: it is Ready, and has renewed its Lease since the VM was seen on."""
    return node.is_ready and worker.renewal is not None and node.renewal not in {None, worker.renewal}


def first_renewal(worker: Worker, node: WorkerNode) -> str:
    """Return the renewal of the Lease with which the VM was first seen on; empty if it had none."""
    return worker.renewal if worker.renewal is not None else node.renewal or ""


def _ready(worker: Worker, ctx: ScheduleContext, mine: str) -> NextStep:
    """Return the next step of a worker whose VM is on. One that has never left needs no new heartbeat."""
    node = ctx.node_of(worker)
    if node is None:
        return NextStep(WorkerStep.HEARTBEAT, reason=reasons.node_not_registered(worker.node))
    labels = label_changes(ctx.schedule, worker, node, ctx.phase)
    has_marks = is_cordon_of(node, mine) or node.is_announced or bool(labels)
    has_stayed = worker.renewal is None and worker.step in {WorkerStep.NONE, WorkerStep.SERVING}
    if has_stayed and node.is_ready and not has_marks:
        return NextStep(WorkerStep.SERVING)
    if worker.step is WorkerStep.SERVING and not has_marks:
        return NextStep(WorkerStep.SERVING, renewal=worker.renewal)
    renewal = first_renewal(worker, node)
    if not is_alive(worker, node):
        return NextStep(
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
        return pending(worker, WorkerStep.UNCORDON, action, renewal=renewal)
    return NextStep(WorkerStep.SERVING, reason=_clock_skew(node, ctx.now), renewal=renewal)


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


CORDON_SETTLES_S = 5.0
"""How long after a cordon the scheduler may still bind a pod to the node, which it decided before."""
SHUTDOWN_S = 300.0
"""How long a guest has to shut down, before `onTimeout: Force` takes its power."""


def cordoned(worker: Worker, node: WorkerNode) -> NextStep:
    """Return the next step of a worker whose node must get no more pods."""
    return pending(worker, WorkerStep.CORDON, mark(node, cordon=True))


def leaving(worker: Worker, ctx: ScheduleContext) -> NextStep:
    """Return the next step of a worker whose phase has ended, or whose VM has to be off for another vGPU type."""
    node = ctx.node_of(worker)
    vm = found_vm(worker, ctx)
    if is_off(ctx.observed.vms, worker.vm) and not isinstance(vm, NextStep):
        # For some time the node of a VM that is off still seems to be Ready, and must get no pod.
        is_open = node is not None and node.is_ready and not node.is_unschedulable
        return cordoned(worker, node) if node is not None and is_open else NextStep(WorkerStep.AWAY)
    if node is None:  # pods of a deleted Node run on, and nobody can evict them
        missing = NextStep(WorkerStep.CORDON, reason=reasons.node_not_registered(worker.node))
        return vm if isinstance(vm, NextStep) else missing
    if not node.cordoned_by:  # before anything is done, it must be certain whose VM it is
        found = proven_vm(worker, ctx)
        if isinstance(found, NextStep):
            return found
    if not is_cordoned(node):
        return cordoned(worker, node)
    drained = _drained(worker, node, ctx)
    if drained is not None:
        return drained
    return vm if isinstance(vm, NextStep) else _leave(worker, vm, ctx)


def is_cordoned(node: WorkerNode) -> bool:
    """Return whether no pod is scheduled to a node any more, by an admin's cordon or the schedule's."""
    return node.is_unschedulable


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


def _drained(worker: Worker, node: WorkerNode, ctx: ScheduleContext) -> NextStep | None:
    """Return the next step of a worker that still has pods or volumes; None once it has none."""
    pods = pods_left(ctx.observed.pods.get(node.name, ()))
    if pods:
        return _drain(worker, pods, ctx)
    if node.cordoned_for_s < CORDON_SETTLES_S:
        return NextStep(WorkerStep.DRAIN, reason=reasons.step_pending(worker.node, WorkerStep.CORDON))
    volumes = ctx.observed.attachments.get(node.name, ())
    if not volumes:
        return None
    return NextStep(
        WorkerStep.DETACH,
        reason=Reason(
            ReasonCode.VOLUMES_ATTACHED,
            f"node {worker.node}",
            f"still has volumes: {reasons.listed(volumes)}",
            fix="see kubectl get volumeattachments",
        ),
    )


def _drain(worker: Worker, pods: tuple[NodePod, ...], ctx: ScheduleContext) -> NextStep:
    drain = ctx.schedule.drain
    staying = tuple(pod for pod in pods if not pod.is_ending)
    is_late = worker.step is WorkerStep.DRAIN and ctx.elapsed_s(worker, WorkerStep.DRAIN) >= drain.timeout_s
    names = [pod.where for pod in pods]
    if blocking := blockers(pods, drain):  # Force breaks budgets; it loses no data that the spec keeps
        return NextStep(
            WorkerStep.DRAIN,
            reason=Reason(
                ReasonCode.POD_BLOCKS_DRAIN,
                f"node {worker.node}",
                "is not drained, because some pods have no controller, or have an emptyDir volume:"
                f" {reasons.listed([pod.where for pod in blocking])}",
                fix="delete the pods, or set deleteBarePods or deleteEmptyDirData in the schedule's drain",
            ),
        )
    if is_late and drain.on_timeout is OnTimeout.FORCE:
        deleted = tuple(DeletePod(worker.node, pod) for pod in staying)
        return NextStep(WorkerStep.DRAIN, deleted, reasons.pods_left(worker.node, names), forced=len(deleted))
    evictions = tuple(EvictPod(worker.node, pod) for pod in staying)
    return NextStep(WorkerStep.DRAIN, evictions, reasons.pods_left(worker.node, names))


def _leave(worker: Worker, vm: WorkerVm, ctx: ScheduleContext) -> NextStep:
    is_late = ctx.elapsed_s(worker, WorkerStep.LEAVE) >= SHUTDOWN_S
    is_forced = ctx.schedule.drain.on_timeout is OnTimeout.FORCE
    action = Action.POWER_OFF if is_late and is_forced else Action.SHUT_DOWN
    if ctx.schedule.leave is Leave.SUSPEND and keeps_type(worker, vm):
        action = Action.SUSPEND
    is_busy = vm.is_changing and not (vm.is_shutting_down and action is Action.POWER_OFF)
    if is_busy or vm.power is not Power.ON:
        return pending(worker, WorkerStep.LEAVE)
    return call(worker, WorkerStep.LEAVE, action, ctx)


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
            workers.append(_matched(worker, node, observed))
        else:
            leftover.append(_matched(worker, node, observed))
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


def released(worker: Worker, node: WorkerNode, observed: ScheduleObservation, mine: str) -> NextStep | None:
    """Return the next step that takes the schedule's marks from a node that is no worker any more; None if it has none.

    A node whose VM has just been suspended still seems to be Ready, and would get pods.
    """
    if node.cordoned_by != mine and not node.is_announced:
        return None
    is_shown = not isinstance(observed.vms, VmsUnknown) and worker.vm in observed.vms
    is_on = is_shown and not is_off(observed.vms, worker.vm)
    if node.is_ready and not (is_on or is_alive(worker, node)):
        return pending(worker, WorkerStep.UNCORDON, renewal=first_renewal(worker, node))
    action = mark(node, cordon=False if node.cordoned_by == mine else None, taint=False)
    return pending(worker, WorkerStep.UNCORDON, action)


def _has_lost_labels(worker: Worker, node: WorkerNode) -> bool:
    """Return whether a worker's Node is another object, without the labels: a controller of the cloud deletes Nodes."""
    return bool(worker.phases) and worker.node_uid != node.uid


def _matched(worker: Worker, node: WorkerNode, observed: ScheduleObservation) -> Worker:
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
    types = tuple((phase, node.types[phase]) for phase in sorted(node.types))
    selected = replace(worker, phases=tuple(sorted(node.phases)), types=types)
    if isinstance(observed.vms, VmsUnknown) and worker.node_uid != node.uid:
        return selected  # matched once the hypervisor answers
    return replace(selected, node_uid=node.uid, reason=None)
