"""Workers that a schedule keeps from pods: none of their units is free, and pods that wait for them say until when."""

import json
from pathlib import Path

import pytest

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.workers.away import ScheduleSeen, away_workers
from gpuvirt.model.workers.spec import Leave, PhaseName
from gpuvirt.model.workers.status import Worker, WorkerStep
from tests.cli.commandline import printed
from tests.extender.podapi import serving
from tests.extender.pods import node
from tests.schedules.scheduleday import Day, playing
from tests.schedules.servedcommands import answering
from tests.schedules.servedschedule import NODES
from tests.web.certificates import Authority, Pair

DAY, NIGHT = PhaseName("day"), PhaseName("night")
WORKER = NodeName("worker-1")


def seen(
    step: WorkerStep, phase: PhaseName | None, leave: Leave = Leave.SUSPEND, following: PhaseName = DAY
) -> ScheduleSeen:
    return ScheduleSeen(
        "gpus", "gpuvirt", leave, phase, (Worker(WORKER, phases=(DAY,), step=step),), following, "07:00"
    )


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (seen(WorkerStep.AWAY, NIGHT), "is suspended until 07:00 by schedule gpus"),
        (seen(WorkerStep.AWAY, NIGHT, Leave.SHUT_DOWN), "is shut down until 07:00 by schedule gpus"),
        (seen(WorkerStep.AWAY, NIGHT, following=NIGHT), "is suspended by schedule gpus until phase day begins"),
        (seen(WorkerStep.DRAIN, NIGHT), "is drained, and then suspended, until 07:00 by schedule gpus"),
        (seen(WorkerStep.WAIT_FOR_GPU, DAY), "is being started by schedule gpus (step WaitForGpu)"),
        (seen(WorkerStep.SERVING, DAY), None),
        (seen(WorkerStep.READ, NIGHT), None),
        (seen(WorkerStep.NONE, None), None),
    ],
)
def test_the_step_of_a_worker_says_whether_it_is_away(schedule: ScheduleSeen, message: str | None) -> None:
    found = away_workers((schedule,), {})
    assert {name: worker.message for name, worker in found.items()} == ({WORKER: message} if message else {})


@pytest.mark.parametrize("step", WorkerStep)
def test_a_cordon_of_the_schedule_counts_in_each_step(step: WorkerStep) -> None:
    assert WORKER in away_workers((seen(step, NIGHT),), {WORKER: "gpus"})


def test_a_cordon_counts_without_the_schedule() -> None:
    found = away_workers((), {WORKER: "gpus"})
    assert found[WORKER].message == "is cordoned by schedule gpus"
    assert found[WORKER].command == "gpuvirt schedule show gpus"


async def test_at_night_no_unit_of_the_day_is_free_and_its_pods_know_until_when(
    authority: Authority, server: Pair, tmp_path: Path
) -> None:
    day = Day()
    async with playing(day, server, authority.certificate) as (rounds, _):
        await rounds.run()
    for name in [path for path in day.served.objects if path.startswith(NODES)]:
        shared = node(name.rpartition("/")[2], a=1000)["metadata"]
        assert isinstance(shared, dict)
        stored = day.served.objects[name]
        metadata = stored["metadata"]
        assert isinstance(metadata, dict)
        status = {"conditions": [{"type": "Ready", "status": "Unknown" if "cordoned" in str(metadata) else "True"}]}
        day.served.put(
            name,
            {
                **stored,
                "metadata": {**metadata, "annotations": shared["annotations"]},
                "status": {**status, "allocatable": {"nvidia.com/vgpu": "1000"}},
            },
        )
    units = {"nvidia.com/vgpu": "300"}
    container = {"name": "main", "resources": {"requests": units, "limits": units}}
    day.served.put(
        "/api/v1/namespaces/default/pods/train-1",
        {
            "metadata": {"namespace": "default"},
            "spec": {
                "nodeSelector": {"vgpu.type": "v100-4q"},
                "tolerations": [{"key": "own", "operator": "Exists"}],
                "containers": [container],
            },
            "status": {"phase": "Pending"},
        },
    )
    async with serving(answering(day.served), tmp_path) as api:
        shares = json.loads(await printed(api.kubeconfig, "shares", "-o", "json"))
        text = await printed(api.kubeconfig, "shares")
        why = await printed(api.kubeconfig, "why", "pod/train-1", "-n", "default")
        of_node = await printed(api.kubeconfig, "why", "node/worker-1")
    assert {found["node"]: (found["largest"], found["gpus"][0]["free"]) for found in shares["nodes"]} == {
        **{f"worker-{number}": (0, 0) for number in (1, 2, 3, 4)},
        "worker-5": (1000, 1000),
    }
    assert (shares["units"], shares["free"]) == (5000, 1000)
    assert "no unit is free: worker-1 is suspended until 2026-01-06 07:00 CET by schedule gpus" in text
    assert "waits for another phase: its workers are suspended until 2026-01-06 07:00 CET by schedule gpus" in why
    assert "fix:  gpuvirt schedule show gpus -n gpuvirt" in why
    assert "It is suspended until 2026-01-06 07:00 CET by schedule gpus, so none of its devices are free." in of_node
    assert ["nvidia.com/vgpu", "1000", "0"] in [line.split() for line in of_node.splitlines()]
