"""The faults of a spec are found before anything is done."""

from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.workers.spec import Phase, PhaseName, PhaseOverride, Schedule
from gpuvirt_schedules.decide.faults import faults, shared_workers

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DAY, NIGHT = Phase(PhaseName("day"), "0 7 * * 1-5"), Phase(PhaseName("night"), "0 20 * * 1-5")
GOOD = Schedule("gpus", "Europe/Berlin", (DAY, NIGHT))


def test_the_document_has_no_fault() -> None:
    assert faults(GOOD, NOW) == ()


@pytest.mark.parametrize(
    ("schedule", "code"),
    [
        (replace(GOOD, phases=()), ReasonCode.SCHEDULE_INVALID),
        (replace(GOOD, phases=(DAY, DAY)), ReasonCode.SCHEDULE_INVALID),
        (replace(GOOD, name="g" * 64), ReasonCode.SCHEDULE_INVALID),
        (replace(GOOD, phases=(DAY, replace(NIGHT, name=PhaseName("n" * 64)))), ReasonCode.SCHEDULE_INVALID),
        (replace(GOOD, announce_s=-1.0), ReasonCode.SCHEDULE_INVALID),
        (replace(GOOD, time_zone="Europe/Berlim"), ReasonCode.TIME_ZONE_UNKNOWN),
        (replace(GOOD, phases=(DAY, replace(NIGHT, start="@daily"))), ReasonCode.CRON_LINE_INVALID),
        (replace(GOOD, phases=(DAY, replace(NIGHT, start="0 7 30 2 *"))), ReasonCode.PHASE_UNREACHABLE),
        (replace(GOOD, phases=(DAY, replace(NIGHT, start="0 7 1 * *"))), ReasonCode.PHASES_OVERLAP),
        # Each day but that of spring, when one line begins at 02:00 and at 03:00, which is one moment.
        (
            replace(GOOD, phases=(replace(DAY, start="0 2,3 * * *"), replace(NIGHT, start="0 3 * * *"))),
            ReasonCode.PHASES_OVERLAP,
        ),
        (
            replace(
                GOOD,
                overrides=(
                    PhaseOverride(
                        PhaseName("noon"),
                        datetime.fromisoformat("2026-01-01T00:00"),
                        datetime.fromisoformat("2026-01-02T00:00"),
                    ),
                ),
            ),
            ReasonCode.SCHEDULE_INVALID,
        ),
        (
            replace(
                GOOD,
                overrides=(
                    PhaseOverride(
                        DAY.name, datetime.fromisoformat("2026-01-02T00:00"), datetime.fromisoformat("2026-01-01T00:00")
                    ),
                ),
            ),
            ReasonCode.SCHEDULE_INVALID,
        ),
    ],
)
def test_each_fault_has_its_code(schedule: Schedule, code: ReasonCode) -> None:
    assert code in {fault.code for fault in faults(schedule, NOW)}


@pytest.mark.parametrize(
    "zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Santiago", "UTC"]
)
@pytest.mark.parametrize(("night", "day"), [("0 2", "0 3"), ("15 2", "45 2"), ("30 2", "0 3"), ("0 0", "0 1")])
def test_a_window_in_an_hour_that_spring_leaves_out_is_no_fault(zone: str, night: str, day: str) -> None:
    phases = replace(DAY, start=f"{day} * * *"), replace(NIGHT, start=f"{night} * * *")
    assert faults(replace(GOOD, phases=phases, time_zone=zone), NOW) == ()


def test_a_worker_in_two_schedules_is_a_fault_of_both() -> None:
    first, second, third = NodeName("worker-1"), NodeName("worker-2"), NodeName("worker-3")
    found = shared_workers(
        {"gpus": frozenset({first, second}), "more": frozenset({second}), "other": frozenset({third})}
    )
    assert {name: [reason.code for reason in reasons] for name, reasons in found.items()} == {
        "gpus": [ReasonCode.WORKER_IN_TWO_SCHEDULES],
        "more": [ReasonCode.WORKER_IN_TWO_SCHEDULES],
    }
