"""The transition of a schedule to the current phase: what is done next, as a function of what was observed.

All workers of other phases, and those whose vGPU gets another type, leave, and are confirmed off, before a worker of
the current phase is started: then only types of one phase have parts of the GPU. Each round decides again from what was
read in that round; the status is written before the actions are taken.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.hypervisor import Abilities, VmKey, VmsUnknown, WorkerVm
from gpuvirt.model.workers.observed import ScheduleObservation, elapsed_s
from gpuvirt.model.workers.spec import Begin, Leave, OnTimeout, PhaseName, Schedule, phase_named
from gpuvirt.model.workers.status import RESTING, ScheduleStatus, Transition, Worker, WorkerStep
from gpuvirt_schedules.decide.nextstep import (
    HELD_AGAIN_S,
    MarkNode,
    NextStep,
    ScheduleAction,
    ScheduleContext,
    found_vm,
    is_changing_type,
    is_off,
    keeps_type,
    mark,
    pending,
    profile_of,
    proven_vm,
    type_fault,
)
from gpuvirt_schedules.decide.times import Switch, Timeline
from gpuvirt_schedules.decide.vmstops import round_s
from gpuvirt_schedules.decide.workers import Members, arriving, leaving, members, released

# Whether a switch may begin: no worker is drained before the hypervisor says that each VM which leaves can leave.
#
# Otherwise a single VM that can't be suspended would take the pods of all workers, and free the GPU for nobody.
BEGUN = frozenset({WorkerStep.DRAIN, WorkerStep.DETACH, WorkerStep.LEAVE})
"""The steps of a worker whose node needs no cordon of the schedule, since an admin has cordoned it."""


def unbegun(workers: Iterable[Worker], ctx: ScheduleContext) -> tuple[Worker, ...]:
    """Return the workers that have to leave, and from which nothing was taken yet."""
    if ctx.schedule.begin is Begin.ANYWAY:
        return ()
    return tuple(
        worker
        for worker in workers
        if worker.node in ctx.others
        and not is_off(ctx.observed.vms, worker.vm)
        and worker.step not in BEGUN
        and not ((node := ctx.node_of(worker)) is not None and node.cordoned_by == ctx.schedule.name)
    )


def waits(workers: Iterable[Worker], ctx: ScheduleContext) -> Mapping[NodeName, NextStep]:
    """Return the next steps of workers that do not begin to leave, as one of them can't; nothing if all can."""
    leaving = unbegun(workers, ctx)
    staying = {worker.node: next_step for worker in leaving for next_step in _stays(worker, ctx)}
    if not staying:
        return {}
    waiting = {
        worker.node: Reason(
            ReasonCode.OTHERS_STAY,
            f"node {worker.node}",
            "is not drained, because not all VMs that leave are known to be able to:"
            f" {reasons.listed(sorted(staying))}",
            fix="see what those workers wait for, or set begin: Anyway in the schedule",
        )
        for worker in leaving
    }
    return {node: staying.get(node, NextStep(WorkerStep.CHECK, reason=reason)) for node, reason in waiting.items()}


def _stays(worker: Worker, ctx: ScheduleContext) -> Iterator[NextStep]:
    """Yield the next step of a worker that can't leave, or of which that is unknown; nothing if it can."""
    proof, vm, abilities = proven_vm(worker, ctx), found_vm(worker, ctx), ctx.observed.abilities
    if isinstance(proof, NextStep) or isinstance(vm, NextStep):
        yield proof if isinstance(proof, NextStep) else NextStep(WorkerStep.MATCH)
    elif ctx.node_of(worker) is None:
        yield NextStep(WorkerStep.CHECK, reason=reasons.node_not_registered(worker.node))
    elif (lacking := type_fault(worker, vm, ctx)) is not None:
        yield lacking
    elif isinstance(abilities, VmsUnknown):
        yield NextStep(WorkerStep.READ, reason=reasons.hypervisor_unknown(abilities.code, abilities.text))
    elif worker.vm not in abilities:
        yield pending(worker, WorkerStep.CHECK)
    else:
        yield from _refusals(worker, vm, abilities[worker.vm], ctx)


def _refusals(worker: Worker, vm: WorkerVm, abilities: Abilities, ctx: ScheduleContext) -> Iterator[NextStep]:
    """Yield the next step of a worker whose VM certainly can't leave, or not get the vGPU type of the phase.

    An ability that is not proven keeps nothing: a vCenter says nothing of a type that no host offers, and libvirt
    nothing without QEMU's answer. `onTimeout: Force` takes the power of a guest that can't be shut down.
    """
    is_suspended = ctx.schedule.leave is Leave.SUSPEND and keeps_type(worker, vm)
    is_forced = not is_suspended and ctx.schedule.drain.on_timeout is OnTimeout.FORCE
    needed = () if is_forced else (abilities.suspend if is_suspended else abilities.shut_down,)
    if ctx.phase in worker.phases:
        needed = (*needed, abilities.set_vgpu_type)
    for ability in needed:
        if ability.is_possible is False:
            yield NextStep(WorkerStep.CHECK, reason=reasons.call_refused(worker.node, ability.code, ability.text))


DEADLINES_S: Mapping[WorkerStep, float] = {
    WorkerStep.MATCH: 60.0,
    WorkerStep.READ: 300.0,
    WorkerStep.CHECK: 60.0,
    WorkerStep.CORDON: 120.0,
    WorkerStep.DETACH: 420.0,
    WorkerStep.LEAVE: 600.0,
    WorkerStep.SET_TYPE: 300.0,
    WorkerStep.START: 600.0,
    WorkerStep.HEARTBEAT: 600.0,
    WorkerStep.UNCORDON: 120.0,
}
"""How long each step may take. The attach-detach controller gives volumes up after 6 minutes; 16 GB of framebuffer take
half a minute to be saved. The drain has its own time, and a wait for the GPU ends with the workers that have it."""
OUT_OF_REACH_S = 1800.0
"""How long before its end a phase whose switch is still held is given up: by their deadlines, the VMs of the phase may
take as long to leave, to start and to be alive. Until then a held switch is tried again; afterwards its workers would
serve for minutes, and those of the phase before would come back late."""
FORCED_S = 600.0
"""How much longer a drain takes by `onTimeout: Force`: the pods' grace periods."""
ROUND_S = 1.0
VM_ROUND_S = 0.5
"""While a VM leaves or arrives, which takes seconds, and in the first minute of a drain, in which most pods end."""
QUICK_DRAIN_S = 60.0
CHANGING = frozenset({WorkerStep.LEAVE, WorkerStep.SET_TYPE, WorkerStep.START, WorkerStep.HEARTBEAT})
AFTER_MARKS_S = 0.1
"""After a change of nodes, which holds at once. One that was not made in a second is tried again after `ROUND_S`."""


class Advance(msgspec.Struct, frozen=True):
    """The result of one round: the status to write, and the actions to take then."""

    status: ScheduleStatus
    actions: tuple[ScheduleAction, ...] = ()
    next_switch: Switch | None = None
    pause_s: float | None = None
    """The time until the next round; None if nothing is under way."""
    unchecked: frozenset[VmKey] = frozenset()
    """The VMs whose abilities keep workers waiting: the round is decided again once the hypervisor was asked."""
    hypervisor: Reason | None = None
    """Why the next switch could not be made, while no worker waits for that: the schedule's Secret is missing."""


def advance(
    schedule: Schedule, timeline: Timeline, status: ScheduleStatus, observed: ScheduleObservation, now: datetime
) -> Advance:
    """Return the next status and actions of a schedule without faults."""
    current, following = timeline.current(now), timeline.next_switch(now)
    if current is None and schedule.phases:
        return Advance(status, next_switch=following)
    status = replace(status, given_up=_given_up(schedule, status, current))
    phase = aimed_at(schedule, status, current, following)
    found = members(status.workers, observed, schedule.name)
    announced = _announced(schedule, following, now)
    status = replace(status, announced=announced, last_switch=current.at if current is not None else None)
    if _is_settled(schedule, status, found, phase):
        marks = tuple(_announcements(schedule, status, found.workers, phase, observed, ()))
        return Advance(replace(status, workers=found.workers), marks, following, ROUND_S if marks else None)
    last = status.transition
    begins = last is None or last.phase != phase or last.generation != schedule.generation
    if begins:
        status = replace(status, transition=Transition(phase, now, schedule.generation))
    workers = found.workers
    if begins:  # which lifts all holds
        workers = tuple(replace(worker, since=now, is_held=False, forced=0) for worker in workers)
    others = (
        worker.node
        for worker in workers
        if (phase not in worker.phases and not is_off(observed.vms, worker.vm))
        or is_changing_type(worker, profile_of(schedule, worker, phase), observed.vms)
    )
    ctx = ScheduleContext(schedule, observed, now, tuple(others), phase)
    # It has to be known whether these VMs can leave, before the first of their nodes is drained.
    is_unread = isinstance(observed.vms, VmsUnknown)
    unchecked = frozenset(worker.vm for worker in unbegun(workers, ctx) if worker.vm and not is_unread)
    next_steps = _next_steps(workers, found.released, ctx, phase)
    recorded = [_recorded(worker, next_step, ctx) for worker, next_step in next_steps]
    after = tuple(worker for worker, _ in recorded)
    actions: tuple[ScheduleAction, ...] = tuple(action for _, taken in recorded for action in taken)
    actions += tuple(_announcements(schedule, status, after, phase, observed, actions))
    status = replace(status, workers=after, generation=schedule.generation)
    if all(worker.step in RESTING for worker in after):
        status = replace(status, phase=phase, transition=None)
    elif (
        current is not None
        and phase == current.phase
        and status.held
        and following is not None
        and following.phase == status.phase
        and (following.at - now).total_seconds() <= OUT_OF_REACH_S
    ):  # a held switch ends too late to be worth it, and the phase before it comes next anyway
        status = replace(status, given_up=Transition(phase, current.at, schedule.generation))
    return Advance(status, actions, following, _pause_s(status, actions, now), unchecked)


def quiet_until(schedule: Schedule, following: Switch | None) -> datetime | None:
    """Return when something is due next for a schedule without a transition; None: nothing until its spec changes."""
    if following is None:
        return None
    return following.at - timedelta(seconds=schedule.announce_s)


def due_at(schedule: Schedule, timeline: Timeline, status: ScheduleStatus, now: datetime) -> datetime | None:
    """Return when the next round is due by the status: `now`, a later time, or None until the spec changes."""
    if schedule.is_suspended:
        return None
    current, following = timeline.current(now), timeline.next_switch(now)
    is_behind = status.transition is not None or status.generation != schedule.generation
    if is_behind or status.given_up != _given_up(schedule, status, current):
        return now
    if current is not None and status.phase != aimed_at(schedule, status, current, following):
        return now
    if status.announced != _announced(schedule, following, now):
        return now
    if round_s(schedule, phase_named(schedule, current.phase) if current is not None else None, status) is not None:
        return now
    begin = quiet_until(schedule, following)
    return begin if following is None or begin is None or begin > now else following.at


def aimed_at(schedule: Schedule, status: ScheduleStatus, current: Switch | None, following: Switch | None) -> PhaseName:
    """Return the phase that workers are brought to: the current one, or the next one if it was given up."""
    if current is None:
        return PhaseName("")
    is_given_up = following is not None and _given_up(schedule, status, current) is not None
    return following.phase if following is not None and is_given_up else current.phase


def _given_up(schedule: Schedule, status: ScheduleStatus, current: Switch | None) -> Transition | None:
    """Return the phase that was given up, if it is the current one; another spec, or a switch by hand, tries again."""
    last = status.given_up
    is_current = last is not None and current is not None and last.began == current.at
    return last if last is not None and is_current and last.generation == schedule.generation else None


def _announced(schedule: Schedule, following: Switch | None, now: datetime) -> PhaseName | None:
    begin = quiet_until(schedule, following)
    return following.phase if following is not None and begin is not None and begin <= now else None


def _is_settled(schedule: Schedule, status: ScheduleStatus, found: Members, phase: PhaseName) -> bool:
    """Return whether the phase holds, for the workers and the spec that there are."""
    if status.transition is not None or status.phase != phase or status.generation != schedule.generation:
        return False
    known = {(worker.node, worker.node_uid, worker.phases, worker.types) for worker in status.workers}
    now = {(worker.node, worker.node_uid, worker.phases, worker.types) for worker in found.workers}
    return not found.released and known == now


def _next_steps(
    workers: tuple[Worker, ...], freed: tuple[Worker, ...], ctx: ScheduleContext, phase: PhaseName
) -> Iterator[tuple[Worker, NextStep]]:
    """Yield the workers with their next steps, and nodes that still have the schedule's marks but are no workers."""
    mine, observed = ctx.schedule.name, ctx.observed
    staying = waits(workers, ctx)
    for worker in workers:
        if worker.node in staying:
            yield worker, staying[worker.node]
        else:
            yield worker, arriving(worker, ctx, mine) if phase in worker.phases else leaving(worker, ctx)
    for worker in freed:
        next_step = released(worker, observed.nodes[worker.node], observed, mine)
        if next_step is not None:
            yield worker, next_step


def _recorded(worker: Worker, next_step: NextStep, ctx: ScheduleContext) -> tuple[Worker, tuple[ScheduleAction, ...]]:
    """Return a worker in its step, and the actions to take; those of a held one are taken every `HELD_AGAIN_S`."""
    is_same = worker.step is next_step.step and worker.since is not None
    since = min(worker.since, ctx.now) if is_same and worker.since is not None else ctx.now
    limit_s, drain = DEADLINES_S.get(next_step.step), ctx.schedule.drain
    if next_step.step is WorkerStep.DRAIN:
        limit_s = drain.timeout_s + (FORCED_S if drain.on_timeout is OnTimeout.FORCE else 0.0)
    is_late = limit_s is not None and elapsed_s(since, ctx.now, ctx.observed.rounds_since) >= limit_s
    is_held = is_late or (is_same and worker.is_held)
    reason = next_step.reason if next_step.reason is not None else worker.reason if next_step.step in RESTING else None
    problem = ctx.observed.forbidden.get(worker.node)
    if next_step.actions and problem is not None:  # no budget, and no slow API server
        reason = reasons.right_missing(f"node {worker.node}", problem)
    after = replace(
        worker,
        step=next_step.step,
        since=since,
        is_held=is_held,
        renewal=next_step.renewal,
        reason=reason,
        forced=worker.forced + (0 if is_held else next_step.forced),
    )
    return after, next_step.actions


def _announcements(
    schedule: Schedule,
    status: ScheduleStatus,
    workers: tuple[Worker, ...],
    phase: PhaseName,
    observed: ScheduleObservation,
    actions: tuple[ScheduleAction, ...],
) -> Iterator[MarkNode]:
    """Yield the changes of taints: nodes whose phase ends soon have it, no other node that serves."""
    changed = {action.node for action in actions if isinstance(action, MarkNode)}
    for worker in workers:
        node = observed.nodes.get(worker.node)
        if node is None or worker.step is not WorkerStep.SERVING or phase not in worker.phases or node.name in changed:
            continue
        following, leaves = status.announced, False
        if following is not None:
            before, after = profile_of(schedule, worker, phase), profile_of(schedule, worker, following)
            is_retyped = after is not None and (before is None or before.vgpu_type != after.vgpu_type)
            leaves = following not in worker.phases or is_retyped
        if node.is_announced != leaves:
            yield mark(node, taint=leaves)


def _pause_s(status: ScheduleStatus, actions: tuple[ScheduleAction, ...], now: datetime) -> float | None:
    if status.transition is None and not actions:
        return None
    waiting = tuple(worker for worker in status.workers if worker.step not in RESTING)
    begun = {worker.node for worker in waiting if worker.since == now}
    if any(isinstance(action, MarkNode) and action.node in begun for action in actions):
        return AFTER_MARKS_S
    if waiting and all(worker.is_held or worker.step is WorkerStep.WAIT_FOR_GPU for worker in waiting):
        return HELD_AGAIN_S
    for worker in waiting:
        is_new = worker.since is not None and (now - worker.since).total_seconds() < QUICK_DRAIN_S
        is_draining = worker.step in {WorkerStep.DRAIN, WorkerStep.DETACH} and is_new
        if not worker.is_held and (worker.step in CHANGING or is_draining):
            return VM_ROUND_S  # what the worker waits for takes seconds
    return ROUND_S
