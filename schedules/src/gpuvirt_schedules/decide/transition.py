"""The transition of a schedule to the phase of now: what is done next, as a function of what was observed.

All workers of other phases, and those whose vGPU gets another type, leave, and are seen off, before a worker of the
phase of now is started: then only types of one phase have parts of the GPU. Each round decides again from what was read
in that round; the status is written before the actions are taken.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import Reason, ReasonCode, schedules
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.hypervisor import Abilities, VmKey, VmsUnknown, WorkerVm
from gpuvirt.model.workers.observed import ScheduleObservation, elapsed_s
from gpuvirt.model.workers.spec import Begin, Leave, OnTimeout, PhaseName, Schedule, phase_named
from gpuvirt.model.workers.status import RESTING, ScheduleStatus, Transition, Worker, WorkerStep
from gpuvirt_schedules.decide.actions import MarkNode, ScheduleAction
from gpuvirt_schedules.decide.arriving import arriving
from gpuvirt_schedules.decide.leaving import leaving
from gpuvirt_schedules.decide.moves import HELD_AGAIN_S, Move, Round, found_vm, is_off, mark, proven_vm
from gpuvirt_schedules.decide.profiles import is_changing_type, keeps_type, profile_of, type_fault
from gpuvirt_schedules.decide.times import Switch, Timeline
from gpuvirt_schedules.decide.vmstops import round_s
from gpuvirt_schedules.decide.workers import Members, members, released

# Whether a switch may begin: no worker is drained before the hypervisor says that each VM which leaves can leave.
#
# Otherwise a single VM that can't be suspended would take the pods of all workers, and free the GPU for nobody.
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
    waiting = {
        worker.node: Reason(
            ReasonCode.OTHERS_STAY,
            f"node {worker.node}",
            "is not drained, because not all VMs that leave are known to be able to:"
            f" {schedules.listed(sorted(staying))}",
            fix="see what those workers wait for, or set begin: Anyway in the schedule",
        )
        for worker in leaving
    }
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
    status, begins = _begun(schedule, status, phase, now)
    workers = tuple(_lifted(worker, now) for worker in found.workers) if begins else found.workers
    around = _round(schedule, workers, observed, phase, now)
    unchecked = vms_to_check(workers, around)
    moves = _moves(workers, found.released, around, phase)
    recorded = [_recorded(worker, move, around) for worker, move in moves]
    after = tuple(worker for worker, _ in recorded)
    actions: tuple[ScheduleAction, ...] = tuple(action for _, taken in recorded for action in taken)
    actions += tuple(_announcements(schedule, status, after, phase, observed, actions))
    status = replace(status, workers=after, generation=schedule.generation)
    if all(worker.step in RESTING for worker in after):
        status = replace(status, phase=phase, transition=None)
    elif current is not None and phase == current.phase and _is_out_of_reach(status, following, now):
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


def _is_out_of_reach(status: ScheduleStatus, following: Switch | None, now: datetime) -> bool:
    """Return whether a held switch ends too late to be worth it, and the phase before it comes next anyway."""
    if following is None or following.phase != status.phase or not status.held:
        return False
    return (following.at - now).total_seconds() <= OUT_OF_REACH_S


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


def _begun(schedule: Schedule, status: ScheduleStatus, phase: PhaseName, now: datetime) -> tuple[ScheduleStatus, bool]:
    """Return the status with the transition to a phase, and whether it begins now, which lifts all holds."""
    last = status.transition
    if last is not None and last.phase == phase and last.generation == schedule.generation:
        return status, False
    return replace(status, transition=Transition(phase, now, schedule.generation)), True


def _lifted(worker: Worker, now: datetime) -> Worker:
    return replace(worker, since=now, is_held=False, forced=0)


def _round(
    schedule: Schedule, workers: tuple[Worker, ...], observed: ScheduleObservation, phase: PhaseName, now: datetime
) -> Round:
    others = (
        worker
        for worker in workers
        if (phase not in worker.phases and not is_off(observed.vms, worker.vm))
        or is_changing_type(worker, profile_of(schedule, worker, phase), observed.vms)
    )
    return Round(schedule, observed, now, tuple(worker.node for worker in others), phase)


def _moves(
    workers: tuple[Worker, ...], freed: tuple[Worker, ...], around: Round, phase: PhaseName
) -> Iterator[tuple[Worker, Move]]:
    """Yield the workers with their moves, and the nodes that still have the schedule's marks without being workers."""
    mine, observed = around.schedule.name, around.observed
    staying = waits(workers, around)
    for worker in workers:
        if worker.node in staying:
            yield worker, staying[worker.node]
        else:
            yield worker, arriving(worker, around, mine) if phase in worker.phases else leaving(worker, around)
    for worker in freed:
        move = released(worker, observed.nodes[worker.node], observed, mine)
        if move is not None:
            yield worker, move


def deadline_s(step: WorkerStep, schedule: Schedule) -> float | None:
    """Return how long a step may take; None: as long as what it waits for."""
    if step is not WorkerStep.DRAIN:
        return DEADLINES_S.get(step)
    drain = schedule.drain
    return drain.timeout_s + (FORCED_S if drain.on_timeout is OnTimeout.FORCE else 0.0)


def _recorded(worker: Worker, move: Move, around: Round) -> tuple[Worker, tuple[ScheduleAction, ...]]:
    """Return a worker in its step, and the actions to take; those of a held one are taken every `HELD_AGAIN_S`."""
    is_same = worker.step is move.step and worker.since is not None
    since = min(worker.since, around.now) if is_same and worker.since is not None else around.now
    limit_s = deadline_s(move.step, around.schedule)
    is_late = limit_s is not None and elapsed_s(since, around.now, around.observed.rounds_since) >= limit_s
    is_held = is_late or (is_same and worker.is_held)
    reason = move.reason if move.reason is not None else worker.reason if move.step in RESTING else None
    problem = around.observed.forbidden.get(worker.node)
    if move.actions and problem is not None:  # no budget, and no slow API server
        reason = reasons.right_missing(f"node {worker.node}", problem)
    after = replace(
        worker,
        step=move.step,
        since=since,
        is_held=is_held,
        renewal=move.renewal,
        reason=reason,
        forced=worker.forced + (0 if is_held else move.forced),
    )
    return after, move.actions


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
        leaves = status.announced is not None and leaves_for(schedule, worker, phase, status.announced)
        if node.is_announced != leaves:
            yield mark(node, taint=leaves)


def leaves_for(schedule: Schedule, worker: Worker, phase: PhaseName, following: PhaseName) -> bool:
    """Return whether a worker of a phase is drained when another one begins."""
    if following not in worker.phases:
        return True
    before, after = profile_of(schedule, worker, phase), profile_of(schedule, worker, following)
    return after is not None and (before is None or before.vgpu_type != after.vgpu_type)


def _pause_s(status: ScheduleStatus, actions: tuple[ScheduleAction, ...], now: datetime) -> float | None:
    if status.transition is None and not actions:
        return None
    waiting = tuple(worker for worker in status.workers if worker.step not in RESTING)
    begun = {worker.node for worker in waiting if worker.since == now}
    if any(isinstance(action, MarkNode) and action.node in begun for action in actions):
        return AFTER_MARKS_S
    if waiting and all(worker.is_held or worker.step is WorkerStep.WAIT_FOR_GPU for worker in waiting):
        return HELD_AGAIN_S
    is_quick = any(_changes_soon(worker, now) for worker in waiting)
    return VM_ROUND_S if is_quick else ROUND_S


def _changes_soon(worker: Worker, now: datetime) -> bool:
    """Return whether what a worker waits for takes seconds."""
    if worker.is_held:
        return False
    is_new = worker.since is not None and (now - worker.since).total_seconds() < QUICK_DRAIN_S
    return worker.step in CHANGING or (worker.step in {WorkerStep.DRAIN, WorkerStep.DETACH} and is_new)
