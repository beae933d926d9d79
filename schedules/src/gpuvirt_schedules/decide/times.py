"""When the phases of a schedule begin: its cron lines in its time zone, its overrides, and a switch by hand.

A cron line has the five fields of Vixie cron, as Debian's cron reads them (cronsim): a time in the hour that spring
leaves out begins at the end of that hour, and a time in the hour that autumn repeats begins once, the first time.
"""

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, time, timedelta
from functools import lru_cache
from itertools import islice, takewhile
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from cronsim import CronSim, CronSimError
from msgspec.structs import replace

from gpuvirt.errors import ConfigError
from gpuvirt.model.workers.spec import Phase, PhaseName, PhaseOverride, Schedule

FIELDS = 5
LONGEST_LINE = 200
"""The most characters of a cron line."""
MARGIN = timedelta(hours=26)
"""Longer than any change of an offset from UTC: local times within it may come in another order than UTC's."""
MINUTE = timedelta(minutes=1)
NO_SWITCH_FOR = timedelta(hours=1)
"""How long it is remembered that no start of `MOST_SWITCHES` changes the phase. Two phases name no minute alike."""
MOST_SWITCHES = 500
"""How many starts are looked through for one that changes the phase."""


class CronLineError(ValueError):
    """A text is no cron line of five fields, or no day of any year fits it."""


class ZoneError(ValueError):
    """A text is no name of a time zone that this host has."""


def zone_of(name: str) -> ZoneInfo:
    """Return the time zone `Europe/Berlin`; raises ZoneError."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ZoneError(name) from error


def verify_line(line: str) -> None:
    """Raise CronLineError, with what is wrong, for a line that is no cron line of five fields."""
    if len(line) > LONGEST_LINE:
        raise CronLineError(f"it has {len(line)} characters; expected at most {LONGEST_LINE}")
    if len(line.split()) != FIELDS:
        raise CronLineError(f"it has {len(line.split())} fields instead of {FIELDS}")
    try:
        CronSim(line, datetime(2026, 1, 1, tzinfo=UTC))
    except CronSimError as error:
        raise CronLineError(str(error)) from error


def starts_after(line: str, at: datetime, zone: ZoneInfo) -> Iterator[datetime]:
    """Yield the times in UTC, after `at`, at which a valid cron line begins; nothing for a line that never does.

    A local time comes twice in autumn, so the search begins earlier and leaves out what is not after `at`.
    """
    last = at
    for start in CronSim(line, (at - MARGIN).astimezone(zone)):
        begin = start.astimezone(UTC)
        if begin > last:
            last = begin
            yield begin


def last_start(line: str, at: datetime, zone: ZoneInfo) -> datetime | None:
    """Return the latest time in UTC, not after `at`, at which a valid cron line began; None if it never did."""
    for start in CronSim(line, (at + MARGIN).astimezone(zone), reverse=True):
        begin = start.astimezone(UTC)
        if begin <= at:
            return begin
    return None


def nominal(line: str, start: datetime, zone: ZoneInfo) -> datetime:
    """Return the local time, without a zone, that a line names for a start: one that spring may leave out.

    All times of such an hour begin at its end, so that they and that end have one order in this alone.
    """
    wall = start.astimezone(zone).replace(tzinfo=None)
    before = (start - MINUTE).astimezone(zone).replace(tzinfo=None) + MINUTE
    if before >= wall:
        return wall
    named = next(CronSim(line, wall + MINUTE, reverse=True))
    return named if named >= before else wall


def moment(local: datetime, zone: ZoneInfo) -> datetime:
    """Return a local time without a zone in UTC; a time that spring leaves out is the end of the gap."""
    while (found := local.replace(tzinfo=zone).astimezone(UTC)).astimezone(zone).replace(tzinfo=None) != local:
        local += timedelta(minutes=1)
    return found


class Switch(msgspec.Struct, frozen=True):
    """The moment at which another phase begins."""

    at: datetime
    """UTC."""
    phase: PhaseName


class _Found(msgspec.Struct, frozen=True):
    """The result of the last search."""

    at: datetime
    until: datetime
    current: Switch | None
    """The phase between these times."""
    following: Switch | None

    def holds(self, now: datetime) -> bool:
        """Return whether it holds at a time."""
        return self.at <= now < self.until


@lru_cache(256)
def timeline_of(schedule: Schedule) -> "Timeline":
    """Return the timeline of a schedule without faults; the same object for the same schedule."""
    return Timeline(schedule)


class Timeline:
    """The phases of a schedule without faults, over time. All times are in UTC.

    What was found is kept until the next switch: a search takes a millisecond, and each round needs it.
    """

    def __init__(self, schedule: Schedule) -> None:
        """Raises ZoneError."""
        self._found: _Found | None = None
        self.zone = zone_of(schedule.time_zone)
        self._phases = schedule.phases
        self._specs = schedule.overrides
        self._overrides = tuple(
            (moment(override.begin, self.zone), moment(override.end, self.zone), override.phase)
            for override in schedule.overrides
        )

    def current(self, now: datetime) -> Switch | None:
        """Return the current phase, and when it began; None if no phase has begun yet. A later override counts more."""
        if self._found is not None and self._found.holds(now):
            return self._found.current
        return self._search(now)

    def override(self, now: datetime) -> PhaseOverride | None:
        """Return the override that holds now, the last one of several; None if there is none."""
        found = zip(self._specs, self._overrides, strict=True)
        return next((spec for spec, (begin, end, _) in reversed([*found]) if begin <= now < end), None)

    def _search(self, now: datetime) -> Switch | None:
        for begin, end, phase in reversed(self._overrides):
            if begin <= now < end:
                return Switch(begin, phase)
        begun = [
            (last, phase) for phase in self._phases if (last := last_start(phase.start, now, self.zone)) is not None
        ]
        at = max((last for last, _ in begun), default=None)
        if at is None:
            return None
        latest = self._last_named(at, [phase for last, phase in begun if last == at])
        resumed = (end for _, end, _ in self._overrides if at < end <= now)
        return Switch(max((at, *resumed)), latest.name)

    def _last_named(self, at: datetime, phases: Sequence[Phase]) -> Phase:
        """Return the phase that holds of those that begin at one moment.

        That is several only at the end of an hour that spring leaves out: a window within that hour is left out.
        """
        if len(phases) == 1:
            return phases[0]
        return max(phases, key=lambda phase: nominal(phase.start, at, self.zone))

    def left_out(self, now: datetime, until: datetime) -> Iterator[Switch]:
        """Yield the beginnings of phases in a time that are left out with an hour that spring leaves out."""
        for at in islice(takewhile(lambda at: at <= until, self._boundaries(now)), MOST_SWITCHES):
            phases = [phase for phase in self._phases if last_start(phase.start, at, self.zone) == at]
            if len(phases) > 1:
                last = self._last_named(at, phases)
                yield from (Switch(at, phase.name) for phase in phases if phase is not last)

    def switches(self, now: datetime) -> Iterator[Switch]:
        """Yield the moments after `now` at which another phase begins."""
        names = {phase.name for phase in self._phases} | {phase for _, _, phase in self._overrides}
        if len(names) < 2:
            return
        phase = current.phase if (current := self.current(now)) is not None else None
        for at in islice(self._boundaries(now), MOST_SWITCHES):
            found = self._search(at)
            if found is not None and found.phase != phase:
                phase = found.phase
                yield Switch(at, phase)

    def next_switch(self, now: datetime) -> Switch | None:
        """Return the next moment at which another phase begins; None if none does."""
        if self._found is None or not self._found.holds(now):
            following = next(self.switches(now), None)
            until = following.at if following is not None else now + NO_SWITCH_FOR
            self._found = _Found(now, until, self._search(now), following)
        return self._found.following

    def _boundaries(self, now: datetime) -> Iterator[datetime]:
        """Yield the times after `now` at which a cron line or an override begins or ends, in order.

        A start within an override changes nothing, and is left out: an override may last for years.
        """
        lines = [self._starts(phase.start, now) for phase in self._phases]
        coming = [next(line, None) for line in lines]
        fixed = sorted({edge for begin, end, _ in self._overrides for edge in (begin, end) if edge > now})
        while candidates := [*(at for at in coming if at is not None), *fixed[:1]]:
            at = min(candidates)
            yield at
            fixed = [edge for edge in fixed if edge > at]
            for position, line in enumerate(lines):
                if coming[position] == at:
                    coming[position] = next(line, None)

    def _starts(self, line: str, after: datetime) -> Iterator[datetime]:
        """Yield the starts of a cron line after a time that are in no override."""
        starts = starts_after(line, after, self.zone)
        while (start := next(starts, None)) is not None:
            end = max((end for begin, end, _ in self._overrides if begin <= start < end), default=None)
            if end is None:
                yield start
            else:  # a start at the very end of an override counts
                starts = starts_after(line, end - timedelta(microseconds=1), self.zone)


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
