"""`gpuvirt schedule` as a program: its tables at 80 columns, its errors, and that tables and JSON say the same."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from subprocess import CompletedProcess
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from gpuvirt.cli.output.tables import Cell
from gpuvirt.errors import ConfigError
from gpuvirt.loops.serialworker import ThreadWorker
from gpuvirt.model.workers.spec import Leave
from gpuvirt_schedules.commands import schedulerender
from gpuvirt_schedules.commands.schedule import plan
from gpuvirt_schedules.decide.forecast import PlannedStep
from gpuvirt_schedules.decide.reports import ScheduleRow, SwitchRow, WorkerCheck, WorkerRow
from tests.cli.commandline import ran
from tests.cli.servedday import on_a_day
from tests.extender.podapi import serving
from tests.schedules.scheduleday import SCHEDULE, SPEC
from tests.schedules.servedcommands import answering
from tests.schedules.servedschedule import SCHEDULES, Object, ServedSchedule

T = TypeVar("T")


async def run(folder: Path, served: ServedSchedule, *arguments: str) -> CompletedProcess[str]:
    """Run a command against a cluster."""
    async with serving(answering(served), folder) as api:
        command = ("schedule", *arguments, "--kubeconfig", str(api.kubeconfig))
        return await ThreadWorker("command").run(lambda: ran(*command), name="command", timeout_s=60.0)


async def test_a_list_shows_the_phase_that_the_controller_has_reached(tmp_path: Path) -> None:
    served = on_a_day()
    served.put(SCHEDULE, {**served.objects[SCHEDULE], "status": {"phase": "day", "observedGeneration": 1}})
    done = await run(tmp_path, served, "list")
    assert done.returncode == 0, done.stderr
    heading, row = done.stdout.splitlines()
    assert heading.split() == ["NAME", "STATE", "PHASE", "NEXT", "AT", "WORKERS"]
    assert row.split()[:4] == ["gpus", "Ready", "day", "night"]
    assert "2090-01-01 00:00" in row
    assert (await run(tmp_path, served, "list", "-o", "name")).stdout == "gpus\n"


async def test_a_list_of_all_namespaces_or_by_labels(tmp_path: Path) -> None:
    served = on_a_day()
    other = {"metadata": {"name": "others", "namespace": "team", "labels": {"site": "b"}}, "spec": SPEC}
    served.put("/apis/gpuvirt.io/v1alpha1/namespaces/team/vgpuschedules/others", other)
    assert (await run(tmp_path, served, "list", "-o", "name")).stdout == "gpus\n"
    heading, _, row = (await run(tmp_path, served, "list", "-A")).stdout.splitlines()
    assert (heading.split()[:2], row.split()[:2]) == (["NAMESPACE", "NAME"], ["team", "others"])
    assert (await run(tmp_path, served, "list", "-A", "-l", "site=b", "-o", "name")).stdout == "others\n"
    assert (await run(tmp_path, served, "list", "-l", "site=b", "-o", "name")).stdout == ""


async def test_a_history_shows_the_last_switches(tmp_path: Path) -> None:
    served = on_a_day()
    assert "The controller has recorded no switch." in (await run(tmp_path, served, "history", "gpus")).stdout
    night = {"phase": "night", "before": "day", "began": "2026-01-05T19:00:00Z", "cause": "Schedule", "evicted": 12}
    day = {"phase": "day", "began": "2026-01-05T06:00:00Z", "ended": "2026-01-05T06:02:05Z", "outcome": "Reached"}
    history = [{**night, "deleted": 1}, {**day, "cause": "ByHand", "by": "alice"}]
    served.put(SCHEDULE, {**served.objects[SCHEDULE], "status": {"history": history}})
    done = await run(tmp_path, served, "history", "gpus")
    assert done.returncode == 0, done.stderr
    assert [line.split()[4:] for line in done.stdout.splitlines()[-2:]] == [
        ["day", "->", "night", "-", "UnderWay", "Schedule", "12", "1", "-"],
        ["-", "->", "day", "0:02:05", "Reached", "ByHand", "0", "-", "alice"],
    ]


async def test_a_plan_of_a_file_needs_no_schedule_in_the_cluster(tmp_path: Path) -> None:
    served, file = on_a_day(), tmp_path / "gpus.yaml"
    kind: Object = {"apiVersion": "gpuvirt.io/v1alpha1", "kind": "VgpuSchedule"}
    file.write_text(json.dumps({**kind, "metadata": {"name": "gpus"}, "spec": SPEC}))
    del served.objects[SCHEDULE]
    done = await run(tmp_path, served, "plan", "-f", str(file))
    assert "Steps to phase" in done.stdout, done.stderr
    assert served.writes == []


@pytest.mark.parametrize(("name", "file"), [(None, None), ("gpus", "gpus.yaml")])
def test_a_plan_is_of_a_name_or_of_a_file(name: str | None, file: str | None) -> None:
    with pytest.raises(ConfigError, match="--filename: expected either the name of a VgpuSchedule, or a file with one"):
        plan(name, file=file)


async def test_a_switch_prints_its_steps_and_writes_the_override(tmp_path: Path) -> None:
    served = on_a_day()
    switch = ("switch", "gpus", "night", "--until", "2080-01-01T00:00")
    dry = await run(tmp_path, served, *switch, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert served.writes == []
    assert "The hypervisor was not read" in dry.stdout
    steps = [line.split() for line in dry.stdout.splitlines() if line.startswith("worker-")]
    assert steps.index(["worker-1", "evict", "default/train-0"]) < steps.index(["worker-1", "suspend", "worker-1"])
    assert steps.index(["worker-4", "suspend", "worker-4"]) < steps.index(["worker-5", "start", "worker-5"])
    done = await run(tmp_path, served, *switch)
    assert done.returncode == 0, done.stderr
    assert served.writes == [f"PATCH {SCHEDULE}"]
    spec = served.objects[SCHEDULE]["spec"]
    assert isinstance(spec, dict)
    assert [override["phase"] for override in spec["overrides"]] == ["day", "night"]
    assert "The override is written" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("show", "gpu"), 1, "namespace gpuvirt has no VgpuSchedule 'gpu'; expected one of gpus"),
        (("show", "gpus", "-n", "empty"), 1, "has no VgpuSchedule 'gpus'; namespace gpuvirt has one: add -n gpuvirt"),
        (("show", "gpu", "-n", "empty"), 1, "has no VgpuSchedule 'gpu'; it has none; choose another namespace"),
        (("show", "gpus", "-n", "other"), 1, "the cluster has no kind VgpuSchedule"),
        (("switch", "gpus", "noon"), 2, "$.spec.phases: no phase has the name 'noon'; expected one of day, night"),
        (("switch", "gpus", "night", "--until", "noon"), 2, "--until: is 'noon'; expected 2026-12-28T07:00"),
        (("switch", "gpus", "night"), 2, "--until: is missing, and no phase begins within a year"),
    ],
)
async def test_errors_say_what_was_expected(tmp_path: Path, arguments: Sequence[str], code: int, text: str) -> None:
    done = await run(tmp_path, on_a_day(), *arguments)
    assert done.returncode == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_list_without_schedules_names_the_namespace(tmp_path: Path) -> None:
    done = await run(tmp_path, on_a_day(), "list", "-n", "empty")
    assert (done.returncode, "The namespace empty has no VgpuSchedule; choose" in done.stdout) == (0, True), done.stderr


async def test_a_check_without_the_secret_says_where_it_was_looked_for(tmp_path: Path) -> None:
    done = await run(tmp_path, on_a_day(), "check", "gpus")
    assert done.returncode == 1
    assert "the Secret vcenter of namespace gpuvirt does not exist" in " ".join(done.stdout.split())
    assert "The schedule can't switch all workers." in done.stdout


async def test_a_schedule_with_faults_exits_with_1(tmp_path: Path) -> None:
    served = on_a_day()
    served.put(f"{SCHEDULES}/bad", {"metadata": {"generation": 1}, "spec": {**SPEC, "timeZone": "Europe/Berlim"}})
    for command in (("show", "bad"), ("plan", "bad"), ("check", "bad"), ("switch", "bad", "day")):
        done = await run(tmp_path, served, *command)
        assert done.returncode == 1, command
        assert "TimeZoneUnknown" in done.stdout
    found = json.loads((await run(tmp_path, served, "list", "-o", "json")).stdout)
    assert [(row["name"], row["state"]) for row in found] == [("bad", "Invalid"), ("gpus", "Pending")]


TIMES = st.datetimes(datetime(2000, 1, 1), datetime(2099, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001  bounds
WORDS = st.text("abcz019-.", min_size=1, max_size=12)
st.register_type_strategy(datetime, TIMES)
st.register_type_strategy(str, WORDS)


@given(st.builds(ScheduleRow, time_zone=st.sampled_from(["Europe/Berlin", "UTC", "Nowhere"]), reasons=st.just(())))
def test_the_json_of_a_schedule_has_what_its_row_shows(row: ScheduleRow) -> None:
    assert plain(schedulerender.schedule_cells(row)) == plain(schedulerender.schedule_cells(read(row, ScheduleRow)))


@given(st.builds(WorkerRow, reason=st.none()))
def test_the_json_of_a_worker_has_what_its_row_shows(row: WorkerRow) -> None:
    shown = plain(schedulerender.worker_cells(row, "Europe/Berlin"))
    assert shown == plain(schedulerender.worker_cells(read(row, WorkerRow), "Europe/Berlin"))


@given(st.builds(WorkerCheck, reason=st.none()), st.sampled_from(Leave))
def test_the_json_of_a_check_has_what_its_row_shows(row: WorkerCheck, leave: Leave) -> None:
    shown = plain(schedulerender.check_cells(row, leave))
    assert shown == plain(schedulerender.check_cells(read(row, WorkerCheck), leave))


@given(st.lists(st.builds(PlannedStep), max_size=3), st.lists(st.builds(SwitchRow), max_size=3))
def test_the_json_of_steps_and_switches_has_what_their_tables_show(
    steps: list[PlannedStep], switches: list[SwitchRow]
) -> None:
    for width in (80, 1_000_000):
        shown = [line.plain for line in schedulerender.step_table(steps).lines(width)]
        again = [
            line.plain for line in schedulerender.step_table(read(step, PlannedStep) for step in steps).lines(width)
        ]
        assert shown == again
    table = schedulerender.switches((read(switch, SwitchRow) for switch in switches), "Europe/Berlin")
    assert [line.plain for line in table.lines(80)] == [
        line.plain for line in schedulerender.switches(switches, "Europe/Berlin").lines(80)
    ]
    assert all(len(line.plain) <= 80 for line in table.lines(80))


def read(value: T, shape: type[T]) -> T:
    """Return a value as a program reads it from JSON."""
    return msgspec.json.decode(msgspec.json.encode(value), type=shape)


def plain(cells: Sequence[Cell]) -> list[str]:
    return [cell.plain if isinstance(cell, Text) else cell for cell in cells]
