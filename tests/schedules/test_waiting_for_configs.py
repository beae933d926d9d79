"""Pods that wait for the vGPU config of another phase: `gpuvirt why` says which, and when it begins."""

from pathlib import Path

import pytest

from gpuvirt.kube.kinds.gpunode import GPU_NODES, Spec
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.workers.away import PhaseConfig, ScheduledNode, node_phases
from gpuvirt.model.workers.spec import PhaseName
from tests.cli.commandline import printed
from tests.extender.podapi import serving
from tests.schedules.coverednode import NODE, covered, put_report
from tests.schedules.scheduleday import SCHEDULE, Day
from tests.schedules.servedcommands import answering
from tests.schedules.servedschedule import NODES, Object
from tests.sim.simulated import Simulated

DAY, NIGHT = PhaseName("day"), PhaseName("night")
T4_4Q, T4_8Q = "nvidia.com/GRID_T4-4Q", "nvidia.com/GRID_T4-8Q"
WHEN = "2026-01-05 20:00 UTC"


async def evening(simulated: Simulated, folder: Path, **more: object) -> Day:
    """Return a cluster by day, with a pod that requests the vGPU type of the night."""
    day = covered("T4-4Q")
    await put_report(day, simulated, folder, Spec(mode=DesiredMode.VGPU, vgpu_config="T4-8Q"))
    node = day.served.objects[f"{NODES}/{NODE}"]
    ready = [{"type": "Ready", "status": "True"}]
    day.served.put(f"{NODES}/{NODE}", {**node, "status": {"conditions": ready, "allocatable": {T4_8Q: "8"}}})
    nodes: list[Object] = [{"node": NODE, "phase": "day", "vgpuConfig": "T4-8Q", "applied": True}]
    status: Object = {"phase": "day", "nextPhase": "night", "nextSwitch": "2026-01-05T20:00:00Z", "nodes": nodes}
    day.served.put(SCHEDULE, {**day.served.objects[SCHEDULE], "status": {**status, **more}})
    for name, resource in (("train-1", T4_4Q), ("train-2", T4_8Q)):
        container = {"name": "main", "resources": {"requests": {resource: "1"}, "limits": {resource: "1"}}}
        content: Object = {"metadata": {"namespace": "default"}, "spec": {"containers": [container]}}
        day.served.put(f"/api/v1/namespaces/default/pods/{name}", {**content, "status": {"phase": "Pending"}})
    return day


async def test_a_pod_for_the_vgpus_of_the_night_is_told_when_it_begins(simulated: Simulated, tmp_path: Path) -> None:
    day = await evening(simulated, tmp_path)
    async with serving(answering(day.served), tmp_path) as api:
        why = await printed(api.kubeconfig, "why", "pod/train-1", "-n", "default")
        of_day = await printed(api.kubeconfig, "why", "pod/train-2", "-n", "default")
        of_node = await printed(api.kubeconfig, "why", f"node/{NODE}")
    text = " ".join(why.split())
    gets = f"gets the vGPU config T4-4Q at {WHEN} by schedule gpus"
    assert f"OtherPhase: pod default/train-1 waits for another phase: its node {gets} ({NODE})" in text
    assert "fix: gpuvirt schedule show gpus -n gpuvirt" in text
    assert "OtherPhase" not in of_day, "the node offers that now"
    found = " ".join(of_node.split())
    assert "It has the vGPU config T4-8Q by schedule gpus, phase day." in found
    assert f"It {gets}." in found
    assert f"default/train-1 1 x {T4_4Q} OtherPhase" in found


async def test_a_pod_is_told_what_the_node_of_its_phase_waits_for(simulated: Simulated, tmp_path: Path) -> None:
    nodes: list[Object] = [
        {"node": NODE, "phase": "night", "vgpuConfig": "T4-4Q", "code": "VgpuInUse", "message": "vm-a uses a vGPU"}
    ]
    day = await evening(simulated, tmp_path, phase="night", nextPhase="day", nodes=nodes)
    async with serving(answering(day.served), tmp_path) as api:
        why = " ".join((await printed(api.kubeconfig, "why", "pod/train-1", "-n", "default")).split())
    assert "its node waits for the vGPU config T4-4Q by schedule gpus: vm-a uses a vGPU" in why


@pytest.mark.parametrize(
    "more",
    [
        {"conditions": [{"type": "Valid", "status": "False", "reason": "TimeZoneUnknown", "message": "",
                         "lastTransitionTime": "2026-01-05T18:00:00Z"}]},
        {"nodes": [{"node": NODE, "phase": "day", "vgpuConfig": "T4-8Q", "code": "VgpuConfigOverridden"}]},
    ],
)  # fmt: skip
async def test_a_schedule_that_changes_no_node_promises_nothing(
    simulated: Simulated, tmp_path: Path, more: Object
) -> None:
    day = await evening(simulated, tmp_path, **more)
    async with serving(answering(day.served), tmp_path) as api:
        assert "NoSuchResource" in await printed(api.kubeconfig, "why", "pod/train-1", "-n", "default")
        assert "T4-4Q at" not in await printed(api.kubeconfig, "why", f"node/{NODE}")


async def test_a_suspended_schedule_promises_nothing(simulated: Simulated, tmp_path: Path) -> None:
    day = await evening(simulated, tmp_path)
    stored = day.served.objects[SCHEDULE]
    spec = stored["spec"]
    assert isinstance(spec, dict)
    day.served.put(SCHEDULE, {**stored, "spec": {**spec, "suspend": True}})
    async with serving(answering(day.served), tmp_path) as api:
        assert "NoSuchResource" in await printed(api.kubeconfig, "why", "pod/train-1", "-n", "default")


async def test_a_config_that_is_not_known_promises_nothing(simulated: Simulated, tmp_path: Path) -> None:
    day = await evening(simulated, tmp_path)
    day.served.delete(f"{GPU_NODES.path}/{NODE}")
    async with serving(answering(day.served), tmp_path) as api:
        assert "OtherPhase" not in await printed(api.kubeconfig, "why", "pod/train-1", "-n", "default")


def config(phase: PhaseName, *types: str) -> PhaseConfig:
    return PhaseConfig("gpus", "gpuvirt", phase, "c", frozenset(types))


def test_phases_are_in_order_and_bring_what_the_node_has_not_now() -> None:
    other = PhaseName("other")
    node = ScheduledNode(DAY, NIGHT, WHEN)
    found = list(node_phases([config(other), config(NIGHT, "DC-24Q"), config(DAY, "A10-4Q")], node))
    assert [phase.message for phase in found] == [
        "has the vGPU config c by schedule gpus, phase day",
        f"gets the vGPU config c at {WHEN} by schedule gpus",
        "gets the vGPU config c by schedule gpus once phase other begins",
    ]
    assert found[1].brings("nvidia.com/NVIDIA_RTX_Pro_6000_Blackwell_DC-24Q")
    assert not found[0].brings("nvidia.com/NVIDIA_A10-4Q"), "the node has it"
    assert not found[1].brings("nvidia.com/NVIDIA_A10-4Q")
    unknown = PhaseConfig("gpus", "gpuvirt", NIGHT, "c")
    assert not next(node_phases([unknown], node)).brings("nvidia.com/NVIDIA_A10-4Q")
