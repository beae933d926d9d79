"""The changes of a schedule's status that are events."""

from datetime import UTC, datetime

from msgspec.structs import replace

from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.kinds.vgpuschedule import VgpuSchedule
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.spec import PhaseName
from gpuvirt.model.workers.status import ScheduleStatus, Transition, Worker, WorkerStep
from gpuvirt_schedules.controller import objects
from gpuvirt_schedules.controller.scheduleapi import event_drafts
from gpuvirt_schedules.decide.times import Switch
from gpuvirt_schedules.decide.transition import Advance

DAY, NIGHT = PhaseName("day"), PhaseName("night")
AT = datetime(2026, 1, 5, 19, tzinfo=UTC)
WORKERS = (Worker(NodeName("a"), phases=(DAY,)), Worker(NodeName("b"), phases=(NIGHT,)))
BEFORE = ScheduleStatus(DAY, workers=WORKERS)
NOTHING = frozenset[str]()


def drafted(before: ScheduleStatus, after: ScheduleStatus) -> list[tuple[str, str]]:
    return [(draft.reason, draft.note) for draft in event_drafts(before, after, Switch(AT, NIGHT), (), NOTHING)]


def test_an_announcement_names_the_time_and_who_leaves() -> None:
    after = replace(BEFORE, announced=NIGHT)
    note = "phase night begins at 2026-01-05 19:00 UTC; these workers leave: a"
    assert drafted(BEFORE, after) == [("PhaseAnnounced", note)]
    assert drafted(after, after) == []


def test_a_switch_begins_and_ends_once() -> None:
    under_way = replace(BEFORE, transition=Transition(NIGHT, AT))
    assert drafted(BEFORE, under_way) == [("Switching", "the switch to phase night begins")]
    edited = replace(BEFORE, transition=Transition(NIGHT, AT, 2))
    assert drafted(under_way, edited) == []
    assert drafted(edited, replace(BEFORE, phase=NIGHT)) == [("PhaseReached", "phase night is reached")]


def test_what_is_held_or_forced_is_a_warning() -> None:
    reason = reasons.pods_left("a", ["default/train-0"])
    held = replace(WORKERS[0], step=WorkerStep.DRAIN, is_held=True, reason=reason)
    after = replace(BEFORE, workers=(held, WORKERS[1]))
    assert drafted(BEFORE, after) == [("PodsLeft", f"step Drain is held: {reason.text}")]
    assert drafted(after, after) == []
    forced = replace(BEFORE, workers=(replace(WORKERS[0], forced=2), WORKERS[1]))
    ((code, note),) = drafted(BEFORE, forced)
    assert (code, note[-1]) == ("DrainForced", "2")


def test_a_problem_that_the_status_has_already_is_no_event() -> None:
    problem = reasons.time_zone_unknown("spec.timeZone", "Europe/Berlim")
    (draft,) = event_drafts(BEFORE, BEFORE, None, (problem,), NOTHING)
    assert (draft.reason, draft.note) == ("TimeZoneUnknown", problem.text)
    assert list(event_drafts(BEFORE, BEFORE, None, (problem,), frozenset({"TimeZoneUnknown"}))) == []


def test_a_phase_that_was_given_up_is_an_event_and_the_schedule_is_not_ready() -> None:
    after = replace(BEFORE, given_up=Transition(NIGHT, AT, 3))
    ((code, _),) = drafted(BEFORE, after)
    assert (code, drafted(after, after)) == ("PhaseGivenUp", [])
    stored = VgpuSchedule(Metadata(name="gpus", namespace="gpuvirt"))
    status = objects.written(stored, after, (), Advance(after), AT)
    assert objects.status_of(replace(stored, status=status)).given_up == after.given_up
    states = {condition.type: (condition.status, condition.reason) for condition in status.conditions}
    assert states["Ready"] == ("False", "PhaseGivenUp")
