"""The events of a schedule, as `kubectl describe vgpuschedule` shows them: what a round has changed."""

from collections.abc import Iterator

from gpuvirt.kube.events import EventDraft, EventLevel
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.workers.observed import NodeVm, VmStep
from gpuvirt.model.workers.status import ScheduleStatus, Worker
from gpuvirt_schedules.decide.times import Switch

ANNOUNCED, SWITCHING, REACHED, FORCED = "PhaseAnnounced", "Switching", "PhaseReached", "DrainForced"
APPLIED = "VgpuConfigApplied"
VM_EVENTS = {VmStep.STOP: "VmStopping", VmStep.STOPPED: "VmStopped", VmStep.START: "VmStarting"}


def event_drafts(
    before: ScheduleStatus,
    after: ScheduleStatus,
    following: Switch | None,
    problems: tuple[Reason, ...],
    before_codes: frozenset[str],
) -> Iterator[EventDraft]:
    """Yield the events of one round; `before_codes` are the codes of the problems that are in the stored status."""
    for problem in problems:
        if str(problem.code) not in before_codes:
            yield EventDraft(EventLevel.WARNING, str(problem.code), problem.text)
    if after.announced is not None and after.announced != before.announced and following is not None:
        leaving = [worker.node for worker in after.workers if after.announced not in worker.phases]
        note = f"phase {after.announced} begins at {following.at:%Y-%m-%d %H:%M} UTC"
        if after.workers or not after.nodes:
            note += f"; these workers leave: {', '.join(leaving) or 'none'}"
        yield EventDraft(EventLevel.NORMAL, ANNOUNCED, note)
    yield from _of_phases(before, after)
    yield from _of_workers(before, after)
    yield from _of_nodes(before, after)
    yield from _of_vms(before, after)


def _of_phases(before: ScheduleStatus, after: ScheduleStatus) -> Iterator[EventDraft]:
    """Yield that a switch begins or ends; without workers it does both in one round, and nodes may still wait.

    Workers for which the first phase holds already make no switch.
    """
    if after.unreached is not None and after.given_up != before.given_up:
        yield EventDraft(EventLevel.WARNING, str(after.unreached.code), after.unreached.text)
    begun = after.transition.phase if after.transition is not None else None
    last = before.transition.phase if before.transition is not None else None
    at_once = last is None and not after.workers and after.phase != before.phase
    if begun is None and at_once:
        begun = after.phase
    if begun is not None and begun != last:
        yield EventDraft(EventLevel.NORMAL, SWITCHING, f"the switch to phase {begun} begins")
    if after.transition is not None or after.phase is None:
        return
    if last is not None or (at_once and all(node.is_applied for node in after.nodes)):
        yield EventDraft(EventLevel.NORMAL, REACHED, f"phase {after.phase} is reached")


def _of_nodes(before: ScheduleStatus, after: ScheduleStatus) -> Iterator[EventDraft]:
    """Yield that all nodes have the vGPU config of their phase, and what single nodes wait for.

    For a moment after each switch all nodes wait for their agents, which no event says.
    """
    known = {(node.node, node.phase, node.reason.code) for node in before.nodes if node.reason is not None}
    for node in after.nodes:
        reason = node.reason
        if reason is None or reason.code is ReasonCode.VGPU_CONFIG_PENDING:
            continue
        if (node.node, node.phase, reason.code) not in known:
            yield EventDraft(EventLevel.WARNING, str(reason.code), reason.text)
    are_applied = after.nodes and all(node.is_applied for node in after.nodes)
    if are_applied and {(node.phase, node.is_applied) for node in before.nodes} != {(after.nodes[0].phase, True)}:
        first = after.nodes[0]
        note = f"all nodes of phase {first.phase} have the vGPU config {first.vgpu_config}: {len(after.nodes)}"
        yield EventDraft(EventLevel.NORMAL, APPLIED, note)


def _of_vms(before: ScheduleStatus, after: ScheduleStatus) -> Iterator[EventDraft]:
    """Yield the VMs that are stopped, were stopped or are started, and why others are not."""
    known = {vm.vm: vm for vm in before.vms}
    for vm in after.vms:
        last = known.get(vm.vm)
        is_new = last is None or last.step is not vm.step
        code = vm.reason.code if vm.reason is not None else None
        was = last.reason.code if last is not None and last.reason is not None else None
        if is_new and vm.step in VM_EVENTS:
            yield EventDraft(EventLevel.NORMAL, *_vm_event(vm))
        if vm.is_forced and not (last is not None and last.is_forced):
            yield EventDraft(EventLevel.WARNING, FORCED, f"VM {vm.where} is stopped against its PodDisruptionBudget")
        if code is ReasonCode.VM_NOT_STOPPED and was is not code and vm.reason is not None:
            yield EventDraft(EventLevel.WARNING, str(code), vm.reason.text)
        if vm.is_held and not (last is not None and last.is_held and not is_new) and vm.reason is not None:
            yield EventDraft(EventLevel.WARNING, str(code), f"step {vm.step} is held: {vm.reason.text}")


def _vm_event(vm: NodeVm) -> tuple[str, str]:
    """Return the code and the text of the event of a VM whose step has begun."""
    words = {
        VmStep.STOP: f"is shut down for the vGPU config of phase {vm.phase} on node {vm.node}",
        VmStep.STOPPED: f"is off until phase {vm.phase} ends",
        VmStep.START: f"is started again, since phase {vm.phase} has ended",
    }
    return VM_EVENTS[vm.step], f"VM {vm.where} {words[vm.step]}"


def _of_workers(before: ScheduleStatus, after: ScheduleStatus) -> Iterator[EventDraft]:
    known = {worker.node: worker for worker in before.workers}
    for worker in after.workers:
        last = known.get(worker.node)
        was_held, was_forced = (last.is_held, last.forced) if last is not None else (False, 0)
        if worker.is_held and not was_held and worker.reason is not None:
            note = f"step {worker.step} is held: {worker.reason.text}"
            yield EventDraft(EventLevel.WARNING, str(worker.reason.code), note)
        if _has_lost_labels(worker) and not _has_lost_labels(last) and worker.reason is not None:
            yield EventDraft(EventLevel.WARNING, str(worker.reason.code), worker.reason.text)
        if worker.forced > was_forced:
            deleted = worker.forced - was_forced
            note = (
                f"node {worker.node}: the drain took too long; pods that are deleted against their budgets: {deleted}"
            )
            yield EventDraft(EventLevel.WARNING, FORCED, note)


def _has_lost_labels(worker: Worker | None) -> bool:
    """Return whether a worker's Node has come back without labels: nothing else shows that between switches."""
    return worker is not None and worker.reason is not None and worker.reason.code is ReasonCode.WORKER_LABELS_LOST
