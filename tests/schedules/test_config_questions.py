"""The output of `gpuvirt schedule` for a schedule with vGPU configs, which has no hypervisor."""

from pathlib import Path

import pytest

from gpuvirt.cli.formats import Layout
from gpuvirt_schedules.commands import schedulerender
from gpuvirt_schedules.decide.forecast import PlannedAction
from gpuvirt_schedules.decide.reports import ScheduleState
from tests.schedules.configcluster import SPEC
from tests.schedules.scheduleday import SCHEDULE, Day
from tests.schedules.schedulequestions import asking
from tests.schedules.servedschedule import NODES, Object
from tests.web.certificates import Authority, Pair

IN_USE = "VM default/vm-1 uses it"


def configured(*applied: bool) -> Day:
    """Return a cluster at 18:00 with nodes of a schedule that is in its day."""
    day = Day(())
    nodes = list[Object]()
    for number, is_applied in enumerate(applied):
        name = f"bare{number}"
        day.served.put(f"{NODES}/{name}", {"metadata": {"labels": {"nvidia.com/pool": "vgpu"}}})
        node: Object = {"node": name, "phase": "day", "vgpuConfig": "A10-4Q", "applied": is_applied}
        why: Object = {"code": "VgpuInUse", "subject": f"node {name}", "message": IN_USE, "fix": "wait"}
        nodes.append(node if is_applied else {**node, **why})
    status: Object = {"phase": "day", "observedGeneration": 1, "nodes": nodes}
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": {**SPEC, "timeZone": "Europe/Berlin"}})
    day.served.put(SCHEDULE, {**day.served.objects[SCHEDULE], "status": status})
    return day


async def test_the_nodes_of_a_schedule_are_shown_with_what_they_wait_for(
    authority: Authority, server: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    day = configured(True, False)
    async with asking(day, server, authority.certificate) as questions:
        found, (row,) = await questions.detail("gpus"), await questions.rows()
    assert (row.state, row.nodes, row.workers) == (ScheduleState.SWITCHING, 2, 0)
    assert [str(reason.code) for reason in row.reasons] == ["VgpuInUse"]
    assert [(node.node, node.applied) for node in found.nodes] == [("bare0", True), ("bare1", False)]
    assert [(phase.nodes, phase.vgpu_config) for phase in found.phases] == [
        ("nvidia.com/pool=vgpu", "A10-4Q"),
        ("nvidia.com/pool=vgpu", "A10-24Q"),
    ]
    schedulerender.detail(found)
    schedulerender.schedules((row,), Layout(), namespace="gpu-operator")
    text = capsys.readouterr().out
    assert "APPLIED" in text
    assert IN_USE in text
    assert "WORKERS" not in text


async def test_a_schedule_whose_nodes_have_their_vgpu_config_is_ready(authority: Authority, server: Pair) -> None:
    day = configured(True, True)
    async with asking(day, server, authority.certificate) as questions:
        (row,) = await questions.rows()
    assert row.state is ScheduleState.READY


async def test_a_plan_has_the_vgpu_configs_of_the_next_phase_and_asks_no_hypervisor(
    authority: Authority, server: Pair
) -> None:
    day = configured(True, True)
    async with asking(day, server, authority.certificate) as questions:
        plan = await questions.plan("gpus")
        switch = await questions.switch("gpus", "night", "", writes=False, before=lambda result: None)
    assert plan.assumed is None
    for found in (plan.forecast, switch.forecast):
        assert found is not None
        assert found.phase == "night"
        assert [(step.node, step.action, step.target) for step in found.steps] == [
            ("bare0", PlannedAction.SET_VGPU_CONFIG, "A10-24Q"),
            ("bare1", PlannedAction.SET_VGPU_CONFIG, "A10-24Q"),
        ]
    assert not day.served.writes


async def test_a_plan_names_nodes_that_another_schedule_covers(authority: Authority, server: Pair) -> None:
    day = configured(True)
    other = f"{Path(SCHEDULE).parent}/other"
    day.served.put(other, {"metadata": {"generation": 1}, "spec": {**SPEC, "suspend": True}})
    async with asking(day, server, authority.certificate) as questions:
        plan = await questions.plan("gpus")
    assert plan.schedule.state is ScheduleState.INVALID
    assert [str(reason.code) for reason in plan.schedule.reasons] == ["NodeInTwoSchedules"]
