"""A switch by hand: the override by which a phase holds from now until a time, or until the next switch."""

import re
from datetime import datetime, time, timedelta
from zoneinfo import ZoneInfo

import msgspec
from msgspec.structs import replace

from gpuvirt.errors import ConfigError
from gpuvirt.model.workers.spec import PhaseName, PhaseOverride, Schedule
from gpuvirt_schedules.decide.times import moment, timeline_of

TIME_OF_DAY = re.compile(r"(?:[01][0-9]|2[0-3]):[0-5][0-9]", re.ASCII)
DAY_AND_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}", re.ASCII)
EXPECTED = "2026-12-28T07:00 or 07:00, in the schedule's time zone"
LONGEST = timedelta(days=366)
"""The longest switch without an end: nobody means the end of another override in years."""


class HandSwitch(msgspec.Struct, frozen=True):
    """A switch by hand. Its times are in UTC, those of the override in the schedule's time zone."""

    override: PhaseOverride
    begin: datetime
    end: datetime
    schedule: Schedule
    """The schedule as it is once the override is written."""


def switch_by_hand(schedule: Schedule, name: str, until: str, now: datetime) -> HandSwitch | None:
    """Return the switch to a phase of a schedule without faults; None if the phase holds anyway until the next switch.

    `until` is empty for the next switch. The override begins with the minute of `now`, so that it holds at once. Raises
    ConfigError for a phase that does not exist, and for a time that is none or has passed.
    """
    phase = _phase(schedule, name)
    timeline = timeline_of(schedule)
    current, following = timeline.current(now), timeline.next_switch(now)
    if following is not None and following.at > now + LONGEST:
        following = None
    if not until and current is not None and current.phase == phase:
        return None
    if not until and following is None:
        raise ConfigError(f"is missing, and no phase begins within a year; expected {EXPECTED}", where="--until")
    zone = timeline.zone
    end = following.at.astimezone(zone).replace(tzinfo=None) if following is not None else now
    end = _end(until, now, zone) if until else end
    begin = now.astimezone(zone).replace(tzinfo=None, second=0, microsecond=0)
    if moment(end, zone) <= now:
        raise ConfigError(f"is {end:%Y-%m-%dT%H:%M}, which has passed; expected {EXPECTED}", where="--until")
    override = PhaseOverride(phase, begin, end)
    after = replace(schedule, overrides=(*schedule.overrides, override), generation=schedule.generation + 1)
    return HandSwitch(override, moment(begin, zone), moment(end, zone), after)


def has_passed(schedule: Schedule, now: datetime, until: str) -> bool:
    """Return whether the end of an override is a time that has passed; a text that is no time is none."""
    try:
        return moment(datetime.fromisoformat(until), timeline_of(schedule).zone) <= now
    except ValueError:
        return False


def _phase(schedule: Schedule, name: str) -> PhaseName:
    names = [str(phase.name) for phase in schedule.phases]
    if name not in names:
        where = f"VgpuSchedule {schedule.name}"
        raise ConfigError(
            f"no phase has the name {name!r}; expected one of {', '.join(names)}", where=where, path="$.spec.phases"
        )
    return PhaseName(name)


def _end(text: str, now: datetime, zone: ZoneInfo) -> datetime:
    """Return a local time without a zone; a time of day is the next one."""
    if TIME_OF_DAY.fullmatch(text):
        local = now.astimezone(zone).replace(tzinfo=None)
        today = datetime.combine(local.date(), time.fromisoformat(text))
        return today if today > local else today + timedelta(days=1)
    if not DAY_AND_TIME.fullmatch(text):
        raise ConfigError(f"is {text!r}; expected {EXPECTED}", where="--until")
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"is {text!r}, which is not a date; expected {EXPECTED}", where="--until") from error
