"""A day of a VgpuSchedule, for commands."""

from tests.schedules.scheduleday import SCHEDULE, SPEC, Day
from tests.schedules.servedschedule import Object, ServedSchedule

ALWAYS_DAY: Object = {"phase": "day", "from": "2020-01-01T00:00", "until": "2090-01-01T00:00"}
"""So that the phase of a test does not follow from the time at which it runs."""


def on_a_day() -> ServedSchedule:
    day = Day()
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": {**SPEC, "overrides": [ALWAYS_DAY]}})
    return day.served
