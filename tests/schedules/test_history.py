"""The last switches of a schedule in its status: from which phase to which, when, why and by whom, with their pods."""

from datetime import datetime, timedelta

import msgspec
import pytest
from msgspec.structs import replace

from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.kinds import vgpuschedule as kind
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.spec import PhaseName, PhaseOverride, Schedule
from gpuvirt.model.workers.status import ConfiguredNode, Outcome, PastSwitch, ScheduleStatus, SwitchCause, Transition
from gpuvirt_schedules.controller.objects import schedule_of, status_of, written
from gpuvirt_schedules.decide.faults import LONGEST_NAME
from gpuvirt_schedules.decide.history import LONGEST_USER, MOST_KEPT, PodsTaken, with_history
from gpuvirt_schedules.decide.times import timeline_of
from gpuvirt_schedules.decide.transition import Advance
from tests.schedules.configuredpool import stored
from tests.schedules.scheduleday import EVENING, SPEC

DAY, NIGHT = PhaseName("day"), PhaseName("night")
NOTHING = PodsTaken()
SCHEDULE, _ = schedule_of(stored(SPEC))
REACHED = ScheduleStatus(phase=DAY, generation=1)
TO_NIGHT = replace(REACHED, transition=Transition(NIGHT, EVENING, 1))
BEGUN = PastSwitch(NIGHT, DAY, EVENING)


def after(
    before: ScheduleStatus,
    decided: ScheduleStatus,
    schedule: Schedule = SCHEDULE,
    taken: PodsTaken = NOTHING,
    at: datetime = EVENING,
) -> tuple[PastSwitch, ...]:
    """Return the history after one round."""
    return with_history(schedule, timeline_of(schedule), before, decided, taken, at).history


def by_override(by: str) -> Schedule:
    """Return a schedule whose night begins by an override that was just added."""
    begin = datetime(2026, 1, 5, 12)  # noqa: DTZ001  local time
    override = PhaseOverride(NIGHT, begin, begin + timedelta(days=1), by)
    return replace(SCHEDULE, overrides=(override,), generation=2)


@pytest.mark.parametrize(
    ("schedule", "cause", "by"),
    [
        (SCHEDULE, SwitchCause.SCHEDULE, ""),
        (by_override(""), SwitchCause.OVERRIDE, ""),
        (by_override("alice"), SwitchCause.BY_HAND, "alice"),
        (by_override("a" * 1000), SwitchCause.BY_HAND, "a" * LONGEST_USER),
        (replace(SCHEDULE, generation=2), SwitchCause.SPEC, ""),
    ],
)
def test_a_switch_has_its_cause_and_who_has_asked_for_it(schedule: Schedule, cause: SwitchCause, by: str) -> None:
    assert after(REACHED, TO_NIGHT, schedule) == (replace(BEGUN, cause=cause, by=by),)


def test_the_last_of_two_overrides_is_the_cause() -> None:
    (first,), (later,) = by_override("alice").overrides, by_override("bob").overrides
    (found,) = after(REACHED, TO_NIGHT, replace(SCHEDULE, overrides=(first, later)))
    assert found.by == "bob"
    over = replace(first, begin=first.begin - timedelta(days=9), end=first.end - timedelta(days=9))
    (found,) = after(REACHED, TO_NIGHT, replace(SCHEDULE, overrides=(over,)))
    assert found.cause is SwitchCause.SCHEDULE


def test_a_switch_goes_on_until_its_phase_is_reached_with_the_pods_that_it_took() -> None:
    begun = replace(TO_NIGHT, history=(BEGUN,))
    going = after(begun, TO_NIGHT, taken=PodsTaken(2, 1))
    assert going == (replace(BEGUN, evicted=2, deleted=1),)
    end = EVENING + timedelta(minutes=2)
    done = after(replace(TO_NIGHT, history=going), replace(REACHED, phase=NIGHT), taken=PodsTaken(1), at=end)
    assert done == (PastSwitch(NIGHT, DAY, EVENING, ended=end, outcome=Outcome.REACHED, evicted=3, deleted=1),)
    settled = replace(REACHED, phase=NIGHT, history=done)
    assert after(settled, settled, taken=PodsTaken(1)) == done, "nothing is counted for a switch that has ended"


def test_a_switch_of_vgpu_configs_ends_once_all_nodes_have_them() -> None:
    node = ConfiguredNode(NodeName("a"), NIGHT, "A10-4Q", reasons.vgpu_config_pending("a", "A10-4Q", "it waits"))
    waiting = replace(REACHED, phase=NIGHT, nodes=(node,))
    begun = after(REACHED, waiting)
    assert begun == (BEGUN,)
    applied = replace(waiting, nodes=(replace(node, reason=None),))
    (done,) = after(replace(waiting, history=begun), applied)
    assert (done.outcome, done.ended) == (Outcome.REACHED, EVENING)
    lost = replace(applied, history=(done,))
    assert after(lost, replace(waiting, history=(done,))) == (done,), "a node that loses it makes no switch"


def test_another_switch_ends_one_that_is_under_way() -> None:
    back = replace(REACHED, transition=Transition(DAY, EVENING, 2))
    begun = replace(TO_NIGHT, history=(BEGUN,))
    found = after(begun, back, replace(SCHEDULE, generation=2))
    assert found == (
        PastSwitch(DAY, NIGHT, EVENING, SwitchCause.SPEC),
        replace(BEGUN, ended=EVENING, outcome=Outcome.REPLACED),
    )
    given_up = replace(back, given_up=Transition(NIGHT, EVENING, 1))
    found = after(begun, given_up)
    assert [(switch.cause, switch.outcome) for switch in found] == [
        (SwitchCause.GIVEN_UP, Outcome.UNDER_WAY),
        (SwitchCause.SCHEDULE, Outcome.GIVEN_UP),
    ]


@pytest.mark.parametrize(
    ("generation", "cause"), [(1, SwitchCause.WORKERS), (2, SwitchCause.SPEC)], ids=["workers", "spec"]
)
@pytest.mark.parametrize("taken", [NOTHING, PodsTaken(1), PodsTaken(0, 1)])
def test_a_change_within_a_phase_is_kept_if_it_took_a_pod(
    generation: int, cause: SwitchCause, taken: PodsTaken
) -> None:
    schedule = replace(SCHEDULE, generation=generation)
    same = replace(REACHED, transition=Transition(DAY, EVENING, generation))
    begun = after(REACHED, same, schedule)
    assert [(switch.cause, switch.before) for switch in begun] == [(cause, DAY)]
    done = after(replace(same, history=begun), replace(REACHED, generation=generation), schedule, taken)
    assert [switch.outcome for switch in done] == ([] if taken == NOTHING else [Outcome.REACHED])


def test_the_first_phase_is_a_switch_from_none() -> None:
    (found,) = after(ScheduleStatus(), REACHED)
    assert (found.before, found.phase, found.cause, found.outcome) == (None, DAY, SwitchCause.SPEC, Outcome.REACHED)
    assert after(ScheduleStatus(), ScheduleStatus()) == (), "no phase has ever begun"
    assert after(REACHED, ScheduleStatus()) == (), "nor has a status without its phase"


def test_a_status_keeps_fifty_switches_and_stays_far_below_the_limits_of_etcd() -> None:
    longest = PhaseName("n" * LONGEST_NAME)
    switch = PastSwitch(longest, longest, EVENING, SwitchCause.GIVEN_UP, "é" * LONGEST_USER, EVENING, evicted=10**6)
    full = replace(TO_NIGHT, history=(switch,) * MOST_KEPT)
    history = after(full, TO_NIGHT)
    assert (len(history), history[0], history[1:]) == (50, BEGUN, full.history[1:])
    status = written(stored(SPEC), full, (), Advance(full), EVENING)
    assert len(msgspec.json.encode(status.history)) < 40_000
    read = status_of(replace(stored(SPEC), status=status))
    assert read.history == full.history
    unreadable = replace(status, history=(replace(status.history[0], began="yesterday"),))
    assert status_of(kind.VgpuSchedule(stored(SPEC).metadata, status=unreadable)).history == ()
