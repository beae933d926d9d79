"""The last switches of a schedule: from which phase to which, when, why and by whom, and how many pods were evicted."""

from datetime import datetime

import msgspec
from msgspec.structs import replace

from gpuvirt.model.workers.spec import PhaseOverride, Schedule
from gpuvirt.model.workers.status import Outcome, PastSwitch, ScheduleStatus, SwitchCause
from gpuvirt_schedules.decide.times import Timeline

MOST_KEPT = 50
LONGEST_USER = 128
"""The most characters that are kept of a user's name: 50 switches stay below 30 KB, of 1.5 MiB that etcd takes."""


class PodsTaken(msgspec.Struct, frozen=True):
    """The pods that were taken from workers since the status was last written."""

    evicted: int = 0
    deleted: int = 0
    """Against their budgets, by `onTimeout: Force`."""


def with_history(
    schedule: Schedule,
    timeline: Timeline,
    before: ScheduleStatus,
    after: ScheduleStatus,
    taken: PodsTaken,
    now: datetime,
) -> ScheduleStatus:
    """Return the status `after` a round with the switch that it begins, continues or ends; the newest one is first.

    A spec or workers that change in a phase make a transition, too. It is kept only if it takes a pod: a pool whose
    nodes come and go would push the switches out.
    """
    history = before.history
    under_way = history[0] if history and history[0].ended is None else None
    phase = after.transition.phase if after.transition is not None else after.phase
    last = before.phase
    if under_way is not None:
        history, last = history[1:], under_way.phase
        evicted, deleted = under_way.evicted + taken.evicted, under_way.deleted + taken.deleted
        under_way = replace(under_way, evicted=evicted, deleted=deleted)
    is_given_up = after.given_up is not None and after.given_up.phase == last and phase != last
    if under_way is not None and phase != last:
        history = (*_ended(under_way, Outcome.GIVEN_UP if is_given_up else Outcome.REPLACED, now), *history)
        under_way = None
    begins = after.transition is not None or after.phase != before.phase
    if under_way is None and phase is not None and begins:
        began = after.transition.began if after.transition is not None else now
        is_new_spec = schedule.generation != before.generation
        cause, by = _cause(timeline.override(now), is_new_spec, is_same=phase == last, is_given_up=is_given_up)
        under_way = PastSwitch(phase, last, began, cause, by[:LONGEST_USER])
    if under_way is not None:
        is_done = after.transition is None and all(node.is_applied for node in after.nodes)
        history = (*(_ended(under_way, Outcome.REACHED, now) if is_done else (under_way,)), *history)
    return replace(after, history=history[:MOST_KEPT])


def _cause(
    override: PhaseOverride | None, is_new_spec: bool, *, is_same: bool, is_given_up: bool
) -> tuple[SwitchCause, str]:
    """Return why a switch begins, and who has asked for it, if that is known."""
    if is_given_up:
        return SwitchCause.GIVEN_UP, ""
    if is_same:
        return SwitchCause.SPEC if is_new_spec else SwitchCause.WORKERS, ""
    if override is not None:
        return SwitchCause.BY_HAND if override.by else SwitchCause.OVERRIDE, override.by
    return SwitchCause.SPEC if is_new_spec else SwitchCause.SCHEDULE, ""


def _ended(switch: PastSwitch, outcome: Outcome, now: datetime) -> tuple[PastSwitch, ...]:
    """Return a switch that has ended; nothing for a change within a phase that took no pod."""
    if switch.phase == switch.before and not switch.evicted and not switch.deleted:
        return ()
    return (replace(switch, ended=now, outcome=outcome),)
