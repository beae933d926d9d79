"""The texts about VMs that a phase stops (`vms: Stop`): of `gpuvirt schedule` at 80 columns, `why vm/` and a metric."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from gpuvirt.cli.formats import Layout
from gpuvirt.kube.kinds.gpunode import Spec
from gpuvirt.kube.kinds.vgpuschedule import VgpuSchedule, WorkerStatus
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.reasons import Reason
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.spec import Leave, VmPolicy
from gpuvirt.shares.awayworkers import stopped_by
from gpuvirt_schedules.commands import schedulerender
from gpuvirt_schedules.controller.schedulemetrics import ScheduleTelemetry, of_schedules
from gpuvirt_schedules.decide.reports import ScheduleState
from tests.cli.commandline import printed
from tests.extender.podapi import serving
from tests.schedules.coverednode import POOL, covered, put_report
from tests.schedules.scheduleday import SCHEDULE, Day
from tests.schedules.schedulequestions import asking
from tests.schedules.servedcommands import answering
from tests.schedules.servedschedule import NODES, Object
from tests.sim.simulated import Simulated
from tests.web.certificates import Authority, Pair

DAY: Object = {"name": "day", "start": "0 7 * * *", "nodes": POOL, "vgpuConfig": "A10-4Q"}
NIGHT: Object = {"name": "night", "start": "0 20 * * *", "nodes": POOL, "vgpuConfig": "A10-24Q", "vms": "Stop"}
SINCE = "2026-01-05T16:58:00Z"
LATE = reasons.vm_pending("team/vm-b", "Start")
REFUSED = reasons.vm_budget("team/vm-a", "team/at-least-one")


def vm(name: str, step: str, reason: Reason | None = None, *, phase: str = "night", **more: object) -> Object:
    """Return a VM as a status has it."""
    texts: Object = {}
    if reason is not None:
        texts = {"code": reason.code, "subject": reason.subject, "message": reason.message, "fix": reason.fix}
    where: Object = {"uid": f"uid-{name}", "namespace": "team", "name": name, "node": "bare0", "phase": phase}
    return {**where, "step": step, "since": SINCE, **texts, **more}


def served(*vms: Object, phase: str = "day") -> Day:
    """Return a cluster with a schedule whose night stops VMs, and which has these VMs."""
    found = Day(())
    found.served.put(f"{NODES}/bare0", {"metadata": {"labels": {"nvidia.com/pool": "vgpu"}}})
    spec: Object = {"timeZone": "Europe/Berlin", "phases": [DAY, NIGHT]}
    found.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": spec})
    node: Object = {"node": "bare0", "phase": phase, "vgpuConfig": "A10-4Q", "applied": True}
    status: Object = {
        "phase": phase,
        "nextPhase": "night" if phase == "day" else "day",
        "nextSwitch": "2026-01-05T19:00:00Z" if phase == "day" else "2026-01-06T06:00:00Z",
        "observedGeneration": 1,
        "nodes": [node],
        "vms": list(vms),
    }
    found.served.put(SCHEDULE, {**found.served.objects[SCHEDULE], "status": status})
    return found


def stored(day: Day) -> VgpuSchedule:
    return msgspec.convert(day.served.objects[SCHEDULE], VgpuSchedule)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """Return the lines that were printed, on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def lines() -> list[str]:
        found = capsys.readouterr().out.splitlines()
        assert all(len(line) <= 80 for line in found)
        return [" ".join(line.split()) for line in found]

    return lines


async def test_the_vms_of_a_schedule_are_shown_with_their_steps_and_reasons(
    authority: Authority, server: Pair, shown: Callable[[], list[str]]
) -> None:
    vms = (vm("vm-a", "Wait", REFUSED), vm("vm-b", "Start", LATE, held=True), vm("vm-c", "Stopped", forced=True))
    async with asking(served(*vms), server, authority.certificate) as questions:
        found, (row,) = await questions.detail("gpus"), await questions.rows()
    schedulerender.detail(found)
    lines = shown()
    assert "schedule gpus: Held, phase day, phase night at Mon 2026-01-05 20:00 CET" in lines
    assert lines[lines.index("VM NODE PHASE STEP SINCE FORCED") :] == [
        "VM NODE PHASE STEP SINCE FORCED",
        "team/vm-a bare0 night Wait Mon 2026-01-05 17:58 CET -",
        "VmNotStopped: VM team/vm-a is not stopped for the phase's vGPU config:",
        "PodDisruptionBudget team/at-least-one allows no further disruption; fix:",
        "change the budget, or set drain.onTimeout: Force",
        "team/vm-b bare0 night Start (held) Mon 2026-01-05 17:58 CET -",
        "StepPending: VM team/vm-b waits for the step Start to take effect; fix: see",
        "the events of the VM and its VMI",
        "team/vm-c bare0 night Stopped Mon 2026-01-05 17:58 CET yes",
    ]
    assert (row.state, [str(reason.code) for reason in row.reasons]) == (
        ScheduleState.HELD,
        ["VmNotStopped", "StepPending"],
    )
    schedulerender.schedules((row,), Layout(), namespace="gpu-operator")
    assert "gpus Held day night Mon 2026-01-05 20:00 CET" in " ".join(shown())


async def test_a_plan_says_which_vms_stop_and_which_start(
    authority: Authority, server: Pair, shown: Callable[[], list[str]]
) -> None:
    day = served(vm("vm-c", "Stopped", phase="day"))
    async with asking(day, server, authority.certificate) as questions:
        schedulerender.plan(await questions.plan("gpus"))
    lines = shown()
    assert lines[lines.index("NODE ACTION TARGET") :] == [
        "NODE ACTION TARGET",
        "bare0 start team/vm-c",
        "bare0 set-vgpu-config A10-24Q",
        "bare0 stop-vms VMs whose vGPUs A10-24Q removes",
    ]
    assert not day.served.writes


async def test_a_check_says_that_vms_in_the_way_are_shut_down(
    simulated: Simulated, tmp_path: Path, authority: Authority, server: Pair, shown: Callable[[], list[str]]
) -> None:
    day = covered("T4-4Q")
    await put_report(day, simulated, tmp_path, Spec(mode=DesiredMode.VGPU, vgpu_config="T4-8Q"))
    schedule = stored(day)
    phases = tuple(replace(phase, vms=VmPolicy.STOP) for phase in schedule.spec.phases)
    spec: Object = {**msgspec.to_builtins(schedule.spec), "phases": msgspec.to_builtins(phases)}
    day.served.put(SCHEDULE, {**day.served.objects[SCHEDULE], "spec": spec})
    async with asking(day, server, authority.certificate) as questions:
        schedulerender.check(await questions.check("gpus"))
    lines = shown()
    found = lines[lines.index("bare01 night T4-4Q 4 GPUs VM default/vm-a") :]
    text = "VMs among these users are shut down (vms: Stop), if all users of their GPU are VMs that may be"
    assert text in " ".join(found)


def test_the_metric_counts_vms_by_step_and_those_that_are_held() -> None:
    schedule = stored(served(vm("vm-a", "Wait", REFUSED), vm("vm-b", "Start", held=True), vm("vm-c", "Start")))
    lines = [line for line in of_schedules([schedule], ScheduleTelemetry()) if "_vms{" in line]
    assert lines == [
        'gpuvirt_schedule_held_vms{schedule="gpus"} 1',
        'gpuvirt_schedule_vms{schedule="gpus",step="Start"} 2',
        'gpuvirt_schedule_vms{schedule="gpus",step="Stop"} 0',
        'gpuvirt_schedule_vms{schedule="gpus",step="Stopped"} 0',
        'gpuvirt_schedule_vms{schedule="gpus",step="Wait"} 1',
    ]
    without = stored(served())
    waiting = tuple(replace(phase, vms=VmPolicy.WAIT) for phase in without.spec.phases)
    without = replace(without, spec=replace(without.spec, phases=waiting))
    assert not [line for line in of_schedules([without], ScheduleTelemetry()) if "_vms{" in line]


@pytest.mark.parametrize(
    ("found", "phase", "text"),
    [
        (vm("a", "Wait", REFUSED), "night", None),
        (vm("other", "Stopped"), "night", None),
        (
            vm("a", "Stopped"),
            "night",
            "is stopped until 2026-01-06 07:00 CET by schedule gpus, for the vGPU config of its phase night",
        ),
        (
            vm("a", "Stop"),
            "night",
            "is stopped until 2026-01-06 07:00 CET by schedule gpus, for the vGPU config of its phase night",
        ),
        (vm("a", "Stopped"), "day", "is stopped by schedule gpus, until its phase night ends"),
        (vm("a", "Start"), "day", "is being started by schedule gpus, since its phase night has ended"),
        (
            vm("a", "Start", LATE, held=True),
            "day",
            f"is being started by schedule gpus, since its phase night has ended: {LATE.message}",
        ),
    ],
)
def test_why_names_the_schedule_that_has_stopped_a_vm_and_until_when(found: Object, phase: str, text: str) -> None:
    stopped = stopped_by((stored(served(found, phase=phase)),), "uid-a")
    assert (stopped.message if stopped is not None else None) == text
    assert stopped is None or stopped.command == "gpuvirt schedule show gpus -n gpuvirt"


@pytest.mark.parametrize(("step", "is_off"), [("Away", True), ("Serving", False)])
def test_why_names_the_schedule_whose_worker_a_vm_is(step: str, *, is_off: bool) -> None:
    schedule = stored(served(phase="night"))
    content = {"node": "worker-1", "phases": ["day"], "vm": "uid-a", "vmName": "vm-a", "step": step}
    worker = msgspec.convert(content, WorkerStatus)
    spec, status = replace(schedule.spec, leave=Leave.SHUT_DOWN), replace(schedule.status, workers=(worker,))
    stopped = stopped_by((replace(schedule, spec=spec, status=status),), "uid-a")
    text = "is shut down until 2026-01-06 07:00 CET by schedule gpus"
    assert (stopped.message if stopped is not None else None) == (text if is_off else None)


async def test_why_reads_the_schedule_of_a_vm_that_is_off(tmp_path: Path) -> None:
    day = served(vm("vm-a", "Stopped"), phase="night")
    kubevirt = "/apis/kubevirt.io/v1/namespaces/team"
    gpu: Object = {"name": "gpu1", "deviceName": "nvidia.com/NVIDIA_A10-4Q"}
    template: Object = {"spec": {"domain": {"devices": {"gpus": [gpu]}}}}
    content: Object = {"metadata": {"namespace": "team"}, "spec": {"runStrategy": "Manual", "template": template}}
    day.served.kinds |= {f"{kubevirt}/virtualmachines", f"{kubevirt}/virtualmachineinstances"}
    day.served.put(f"{kubevirt}/virtualmachines/vm-a", content)
    async with serving(answering(day.served), tmp_path) as api:
        why = " ".join((await printed(api.kubeconfig, "why", "vm/vm-a", "-n", "team")).split())
    assert "VmStopped: vm team/vm-a is stopped until 2026-01-06 07:00 CET by schedule gpus" in why
    assert "gpuvirt schedule show gpus -n gpuvirt" in why
    assert "virtctl start" not in why
