"""Phases begin as Debian's cron would begin them, in each zone, at each change of summer time."""

from datetime import UTC, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from typing_extensions import override

from gpuvirt.model.workers.spec import Phase, PhaseName, PhaseOverride, Schedule
from gpuvirt_schedules.decide import times
from gpuvirt_schedules.decide.times import (
    CronLineError,
    Switch,
    Timeline,
    ZoneError,
    last_start,
    moment,
    starts_after,
    verify_line,
    zone_of,
)
from tests.thoroughness import examples

DAY, NIGHT = PhaseName("day"), PhaseName("night")
BERLIN = ZoneInfo("Europe/Berlin")
DAILY = ["0 7 * * 1-5", "0 20 * * *", "30 2 * * *", "0 0 1 * *", "0 12 * * SUN#1"]
"""Lines that do not begin every hour: of those a search for the other phase looks through hundreds."""
ZONES = ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Santiago", "Asia/Kolkata", "UTC"]
LINES = ["0 7 * * 1-5", "0 20 * * *", "30 2 * * *", "15,45 1-3 * * *", "0 0 1 * *", "*/20 * * * *", "0 12 * * SUN#1"]
AT = st.datetimes(datetime.fromisoformat("2025-01-01T00:00"), datetime.fromisoformat("2028-01-01T00:00")).map(
    lambda at: at.replace(tzinfo=UTC, microsecond=0)
)


def schedule(*overrides: PhaseOverride, day: str = "0 7 * * 1-5", night: str = "0 20 * * 1-5") -> Schedule:
    return Schedule("gpus", "Europe/Berlin", (Phase(DAY, day), Phase(NIGHT, night)), overrides)


def local(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).astimezone(UTC)


def starts(line: str, begin: str, count: int) -> list[str]:
    found = islice(starts_after(line, local(begin), BERLIN), count)
    return [f"{start.astimezone(BERLIN):%m-%d %H:%M %z}" for start in found]


def test_a_time_that_spring_leaves_out_is_the_end_of_the_gap() -> None:
    assert starts("30 2 * * *", "2026-03-28T12:00", 2) == ["03-29 03:00 +0200", "03-30 02:30 +0200"]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("night", "day"), [("0 2 * * *", "0 3 * * *"), ("15 2 * * *", "45 2 * * *")])
def test_a_window_in_the_hour_that_spring_leaves_out_is_left_out(night: str, day: str, *, is_first: bool) -> None:
    phases = Phase(NIGHT, night), Phase(DAY, day)
    timeline = Timeline(Schedule("gpus", "Europe/Berlin", phases if is_first else phases[::-1]))
    noon, end = local("2026-03-28T12:00"), datetime(2026, 3, 29, 1, tzinfo=UTC)
    found = list(islice(timeline.switches(noon), 2))
    assert [(switch.phase, switch.at.astimezone(BERLIN).day) for switch in found] == [(NIGHT, 30), (DAY, 30)]
    assert timeline.current(end) == Switch(end, DAY)
    assert list(timeline.left_out(noon, noon + timedelta(days=14))) == [Switch(end, NIGHT)]
    assert not list(timeline.left_out(end, end + timedelta(days=14)))
    autumn = [switch.at for switch in islice(timeline.switches(local("2026-10-24T12:00")), 2)]
    assert autumn[0] == datetime(2026, 10, 25, 0, int(night[:2]), tzinfo=UTC)


def test_a_line_of_every_hour_has_no_time_in_the_hour_that_spring_leaves_out() -> None:
    end = datetime(2026, 3, 29, 1, tzinfo=UTC)
    assert times.nominal("*/30 * * * *", end, BERLIN) == datetime.fromisoformat("2026-03-29T03:00")
    assert times.nominal("30 2 * * *", end, BERLIN) == datetime.fromisoformat("2026-03-29T02:30")
    assert times.nominal("0 3 * * *", end, BERLIN) == datetime.fromisoformat("2026-03-29T03:00")


def test_a_time_that_autumn_repeats_comes_once() -> None:
    assert starts("30 2 * * *", "2026-10-24T12:00", 2) == ["10-25 02:30 +0200", "10-26 02:30 +0100"]
    again = datetime(2026, 10, 25, 1, 15, tzinfo=UTC)  # 02:15 for the second time
    assert last_start("30 2 * * *", again, BERLIN) == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    assert next(starts_after("30 2 * * *", again, BERLIN)) == datetime(2026, 10, 26, 1, 30, tzinfo=UTC)


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(LINES), st.sampled_from(ZONES), AT)
@example("30 2 * * *", "Europe/Berlin", datetime(2026, 10, 25, 1, 15, tzinfo=UTC))
@example("15,45 1-3 * * *", "Australia/Lord_Howe", datetime(2026, 4, 4, 15, 10, tzinfo=UTC))
def test_the_last_start_is_the_one_that_a_search_from_before_finds(line: str, zone: str, at: datetime) -> None:
    begin = at - timedelta(days=40)
    before = None
    for start in starts_after(line, begin, ZoneInfo(zone)):
        if start > at:
            break
        before = start
    assert before is None or last_start(line, at, ZoneInfo(zone)) == before


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from(DAILY), st.sampled_from(DAILY), AT)
def test_the_phase_changes_at_switches_alone(day: str, night: str, now: datetime) -> None:
    assume(day != night)
    timeline = Timeline(schedule(day=day, night=night))
    before = timeline.current(now)
    following = timeline.next_switch(now)
    if before is None or following is None:
        return
    middle = now + (following.at - now) / 2
    fresh = Timeline(schedule(day=day, night=night))
    for at, phase in ((now, before.phase), (middle, before.phase), (following.at, following.phase)):
        found = fresh.current(at)
        assert found is not None
        assert found.phase == phase
        kept = timeline.current(at)
        assert kept is not None
        assert kept.phase == phase
    assert before.phase != following.phase


def test_a_missed_switch_is_the_phase_of_now() -> None:
    timeline = Timeline(schedule())
    saturday = timeline.current(local("2026-01-10T15:00"))
    assert saturday is not None
    assert (saturday.phase, saturday.at) == (NIGHT, local("2026-01-09T20:00"))
    following = timeline.next_switch(local("2026-01-10T15:00"))
    assert following is not None
    assert (following.phase, following.at) == (DAY, local("2026-01-12T07:00"))


def test_overrides_go_before_cron_lines() -> None:
    holidays = PhaseOverride(
        NIGHT, datetime.fromisoformat("2026-12-24T12:00"), datetime.fromisoformat("2026-12-28T07:00")
    )
    timeline = Timeline(schedule(holidays))
    switches = list(islice(timeline.switches(local("2026-12-24T08:00")), 3))
    assert [(switch.at, switch.phase) for switch in switches] == [
        (local("2026-12-24T12:00"), NIGHT),
        (local("2026-12-28T07:00"), DAY),
        (local("2026-12-28T20:00"), NIGHT),
    ]


class CountedCron(CronSim):
    """Counts the starts that are computed."""

    counted = 0

    @override
    def __next__(self) -> datetime:
        CountedCron.counted += 1
        return super().__next__()


def test_the_switch_at_the_end_of_an_override_of_years_is_found_by_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gpuvirt schedule switch --until 2096-01-01` has ten thousands of starts in it."""
    monkeypatch.setattr(times, "CronSim", CountedCron)
    begin, end = datetime.fromisoformat("2026-01-01T00:00"), datetime.fromisoformat("2096-01-02T07:00")
    timeline, now = Timeline(schedule(PhaseOverride(NIGHT, begin, end))), local("2026-01-05T12:00")
    assert timeline.next_switch(now) == Switch(local("2096-01-02T07:00"), DAY), "the day begins as the override ends"
    assert timeline.next_switch(now + timedelta(days=365)) is timeline.next_switch(now)
    assert CountedCron.counted < 20


def test_phases_that_no_more_switch_are_searched_again_after_a_while() -> None:
    spec = replace(schedule(), phases=(Phase(DAY, "0 7 * * *"),))
    past = PhaseOverride(NIGHT, datetime.fromisoformat("2025-12-24T12:00"), datetime.fromisoformat("2025-12-28T07:00"))
    timeline, now = Timeline(replace(spec, overrides=(past,))), local("2026-01-05T06:30")
    for minutes in (0, 59, 61, 60 * 24):
        at = now + timedelta(minutes=minutes)
        assert timeline.next_switch(at) is None
        current = timeline.current(at)
        assert current is not None
        assert current.phase == DAY


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([DAY, NIGHT]), st.integers(-100, 200), st.integers(1, 200)), min_size=1, max_size=4
    ),
    st.sampled_from(["2026-03-28T12:00", "2026-10-24T12:00", "2026-06-01T07:00"]),
)
def test_starts_within_overrides_are_left_out_because_they_change_nothing(
    overrides: list[tuple[PhaseName, int, int]], at: str
) -> None:
    now = datetime.fromisoformat(at)
    given_overrides = (
        PhaseOverride(phase, now + timedelta(hours=begin), now + timedelta(hours=begin + length))
        for phase, begin, length in overrides
    )
    timeline = Timeline(schedule(*given_overrides, day="30 2 * * *", night="0 20 * * *"))
    current = timeline.current(local(at))
    last = current.phase if current is not None else None
    found = list(islice(timeline.switches(local(at)), 20))
    for switch in found:
        phases = [timeline.current(switch.at - timedelta(seconds=seconds)) for seconds in (1, 0)]
        assert [each.phase for each in phases if each is not None] == [last, switch.phase]
        last = switch.phase
    # Nothing is left out between the switches: the phase at each hour is that of the latest one.
    for hour in range(300):
        after = local(at) + timedelta(hours=hour)
        begun = [switch.phase for switch in found if switch.at <= after]
        if begun and after < found[-1].at:
            phase = timeline.current(after)
            assert phase is not None
            assert phase.phase == begun[-1]


def test_an_override_in_the_gap_of_spring_begins_at_its_end() -> None:
    assert moment(datetime.fromisoformat("2026-03-29T02:30"), BERLIN) == local("2026-03-29T03:00")


@pytest.mark.parametrize(
    "line",
    [
        "@daily",
        "0 0 7 * * 1-5",
        "0 7 * *",
        "",
        "60 7 * * *",
        "0 7 30 2 *",
        "0 7 * * MON-FRY",
        "x" * 300,
        "0 \u0667 * * *",
    ],
)
def test_what_is_no_cron_line_is_refused(line: str) -> None:
    with pytest.raises(CronLineError):
        verify_line(line)


FIELD = st.sampled_from(["*", "0", "7", "1-5", "*/9", "MON", "JAN", "L"]) | st.text(
    "*/-,#LW0123456789NOMU\u0667", max_size=6
)


@given(st.text(max_size=40) | st.lists(FIELD, min_size=5, max_size=5).map(" ".join))
def test_no_text_breaks_the_check_of_lines(line: str) -> None:
    try:
        verify_line(line)
    except CronLineError:
        return
    next(starts_after(line, datetime(2026, 1, 1, tzinfo=UTC), BERLIN), None)


@pytest.mark.parametrize("name", ["Europe/Berlim", "", "Europe", "/etc/passwd", "../UTC", "\0"])
def test_what_is_no_zone_is_refused(name: str) -> None:
    with pytest.raises(ZoneError):
        zone_of(name)
