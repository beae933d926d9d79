"""The faults in the spec of a schedule and in its profiles, found before anything is done for it."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import islice
from zoneinfo import ZoneInfo

from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import NodeName, parse_label_key
from gpuvirt.model.reasons import Reason, ReasonCode, Seen
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.observed import WorkerNode
from gpuvirt.model.workers.spec import Phase, Schedule, WorkerProfile
from gpuvirt_schedules.decide.times import (
    FIELDS,
    MOST_SWITCHES,
    CronLineError,
    ZoneError,
    moment,
    nominal,
    starts_after,
    verify_line,
    zone_of,
)

_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_RESERVED = re.compile(r"(?:[^/]*\.)?(?:kubernetes\.io|k8s\.io|gpuvirt\.io)/", re.ASCII)


def profile_faults(schedule: Schedule) -> Iterator[Reason]:
    """Yield what is wrong with profiles by themselves.

    A label that a selector of the schedule names would change by the switch which workers the switch has.
    """
    for position, phase in enumerate(schedule.phases):
        field = f"spec.phases[{position}].profiles"
        for vgpu_type, number in Counter(profile.vgpu_type for profile in phase.profiles).items():
            if not vgpu_type:
                yield reasons.spec_invalid(field, "has a profile without a vgpuType")
            elif number > 1:
                yield reasons.spec_invalid(field, f"has {number} profiles with the vgpuType {vgpu_type!r}")
        for at, profile in enumerate(phase.profiles):
            yield from _label_faults(schedule, profile, f"{field}[{at}].labels")


def _label_faults(schedule: Schedule, profile: WorkerProfile, field: str) -> Iterator[Reason]:
    for key, value in profile.labels:
        try:
            parse_label_key(key)
        except InvalidIdError as error:
            yield reasons.spec_invalid(field, str(error))
        if _RESERVED.match(key):
            yield reasons.spec_invalid(field, f"has the key {key!r}, whose domain is that of Kubernetes or gpuvirt")
        if not _VALUE.fullmatch(value):
            expected = "at most 63 letters, digits, '-', '_' and '.'"
            yield reasons.spec_invalid(field, f"has the value {value!r} of {key}, expected {expected}")
        phases = [phase.name for phase in schedule.phases if key in phase.selected_by]
        if phases:
            yield Reason(
                ReasonCode.PROFILE_LABEL_SELECTS,
                field,
                f"has the label {key}, by which these phases select workers: {', '.join(phases)}",
                fix="select workers by a label that the schedule does not set",
            )


def missing_profiles(nodes: Iterable[WorkerNode]) -> Iterator[Reason]:
    """Yield the workers that some of their phases give a vGPU type, and others leave with that of another phase."""
    for node in sorted(nodes, key=lambda node: node.name):
        lacking = sorted(node.phases - node.types.keys())
        if node.types and lacking:
            yield Reason(
                ReasonCode.PROFILE_MISSING,
                f"node {node.name}",
                f"has a vGPU type in phase {', '.join(sorted(node.types))}, but none in phase {', '.join(lacking)}",
                fix="add a profile that selects the node to each of its phases",
            )


LONGEST_NAME = 63
"""The most characters of the value of a label, which names the schedule that has cordoned a node."""
CHECKED = timedelta(days=400)
"""How far ahead starts of phases are compared: a year, with its changes of summer time."""


def faults(schedule: Schedule, now: datetime) -> tuple[Reason, ...]:
    """Return all that is wrong with a spec by itself; nothing is done for a schedule with faults."""
    found = [*_phase_faults(schedule), *_line_faults(schedule), *profile_faults(schedule)]
    try:
        zone = zone_of(schedule.time_zone)
    except ZoneError:
        return (*found, reasons.time_zone_unknown("spec.timeZone", schedule.time_zone))
    found += _override_faults(schedule, zone)
    return tuple(found) or time_faults(
        schedule.phases, zone, now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    )


def shared_workers(schedules: Mapping[str, frozenset[NodeName]]) -> dict[str, tuple[Reason, ...]]:
    """Return the faults of schedules, by name, whose workers are workers of another schedule, too."""
    return _shared(schedules, _worker_in_two_schedules)


def shared_nodes(schedules: Mapping[str, frozenset[NodeName]], name: str) -> tuple[Reason, ...]:
    """Return the faults of a schedule for whose nodes other schedules have vGPU configs, too."""
    return _shared(schedules, _node_in_two_schedules).get(name, ())


def _shared(
    schedules: Mapping[str, frozenset[NodeName]], reason_of: Callable[[str, Sequence[str]], Reason]
) -> dict[str, tuple[Reason, ...]]:
    found: dict[str, tuple[Reason, ...]] = {}
    count = Counter(node for nodes in schedules.values() for node in nodes)
    for node in sorted(node for node, number in count.items() if number > 1):
        names = sorted(name for name, nodes in schedules.items() if node in nodes)
        for name in names:
            found[name] = (*found.get(name, ()), reason_of(node, names))
    return found


def _phase_faults(schedule: Schedule) -> Iterator[Reason]:
    if len(schedule.name) > LONGEST_NAME:
        yield reasons.spec_invalid("metadata.name", _too_long(schedule.name))
    if not schedule.phases:
        yield reasons.spec_invalid("spec.phases", "has no phase")
    for name, number in Counter(phase.name for phase in schedule.phases).items():
        if number > 1:
            yield reasons.spec_invalid("spec.phases", f"has {number} phases with the name {name!r}")
        if len(name) > LONGEST_NAME:
            yield reasons.spec_invalid("spec.phases", f"has a phase whose name {_too_long(name)}")
        if not name:
            yield reasons.spec_invalid("spec.phases", "has a phase without a name")
    if schedule.announce_s < 0 or schedule.drain.timeout_s < 0:
        yield reasons.spec_invalid("spec.announce and spec.drain.timeout", "can't be negative")


def _too_long(name: str) -> str:
    return f"has {len(name)} characters; expected at most {LONGEST_NAME}, as in the value of a node's label"


def _line_faults(schedule: Schedule) -> Iterator[Reason]:
    for position, phase in enumerate(schedule.phases):
        try:
            verify_line(phase.start)
        except CronLineError as error:
            if _has_no_day(phase.start):
                yield _phase_unreachable(phase.name, phase.start)
            else:
                yield Reason(
                    ReasonCode.CRON_LINE_INVALID,
                    f"spec.phases[{position}].start",
                    f"is not a cron line: {error}",
                    (Seen(f"spec.phases[{position}].start", phase.start),),
                    "write minute, hour, day of the month, month and day of the week: 0 7 * * 1-5",
                )


def _has_no_day(line: str) -> bool:
    """Return whether day and month of a line are valid by themselves, and no month of the line has the day."""
    fields = line.split()
    if len(fields) != FIELDS:
        return False
    try:
        for position in (2, 3):
            verify_line(" ".join([*fields[:position], "*", *fields[position + 1 :]]))
    except CronLineError:
        return False
    return True


def _override_faults(schedule: Schedule, zone: ZoneInfo) -> Iterator[Reason]:
    names = {phase.name for phase in schedule.phases}
    for position, override in enumerate(schedule.overrides):
        field = f"spec.overrides[{position}]"
        if override.phase not in names:
            yield reasons.spec_invalid(f"{field}.phase", f"is {override.phase!r}, and no phase has that name")
        if moment(override.begin, zone) >= moment(override.end, zone):
            yield reasons.spec_invalid(f"{field}.until", "is not after `from`")


@lru_cache(256)
def time_faults(phases: tuple[Phase, ...], zone: ZoneInfo, day: datetime) -> tuple[Reason, ...]:
    """Return phases that never begin, and the first times at which two begin at once, in the year after a day.

    The result is remembered: a year of starts takes 0.1 s.
    """
    return tuple(_time_faults(phases, zone, day))


def _time_faults(phases: tuple[Phase, ...], zone: ZoneInfo, day: datetime) -> Iterator[Reason]:
    begins: dict[tuple[datetime, datetime], Phase] = {}
    for phase in phases:
        starts = starts_after(phase.start, day, zone)
        first = next(starts, None)
        if first is None:
            yield _phase_unreachable(phase.name, phase.start)
            continue
        for start in (first, *islice(starts, MOST_SWITCHES)):
            if start > day + CHECKED:
                break
            # Only equal local times overlap: of an hour that spring leaves out, the last time counts (`Timeline`).
            other = begins.setdefault((start, nominal(phase.start, start, zone)), phase)
            if other is not phase:
                at = f"{start.astimezone(zone):%Y-%m-%d %H:%M} {zone.key}"
                yield Reason(
                    ReasonCode.PHASES_OVERLAP,
                    f"phases {other.name} and {phase.name}",
                    "begin at the same time",
                    (Seen("", at),),
                    "have the phases begin at different times",
                )
                break


def _phase_unreachable(phase: str, line: str) -> Reason:
    """A phase never begins."""
    fix = "correct the day and the month of the line"
    message = "never begins: no day fits its cron line"
    return Reason(ReasonCode.PHASE_UNREACHABLE, f"phase {phase}", message, (Seen("start", line),), fix)


def _worker_in_two_schedules(node: str, schedules: Sequence[str]) -> Reason:
    """Two schedules would switch one VM."""
    message = f"is a worker of several schedules: {', '.join(schedules)}"
    fix = "change the labels of the node, or the workers of a phase"
    return Reason(ReasonCode.WORKER_IN_TWO_SCHEDULES, f"node {node}", message, fix=fix)


def _node_in_two_schedules(node: str, schedules: Sequence[str]) -> Reason:
    """Two schedules would change the vGPU config of one node."""
    message = f"gets vGPU configs from several schedules: {', '.join(schedules)}"
    fix = "change the labels of the node, or the nodes of a phase"
    return Reason(ReasonCode.NODE_IN_TWO_SCHEDULES, f"node {node}", message, fix=fix)
