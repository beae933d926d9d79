"""`gpuvirt schedule` as a program with KubeVirt's VMs: what it shows at 80 columns, and that it changes no VM."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.cli.commandline import GPUVIRT, PATH
from tests.extender.podapi import serving
from tests.kube.scriptedapi import NOT_FOUND, Call, Reply
from tests.schedules.kubevirtday import KUBEVIRT, KubeVirtDay
from tests.schedules.scheduleday import SCHEDULE
from tests.schedules.servedcommands import answering
from tests.schedules.servedkubevirt import VMIS

FORBIDDEN: Reply = 403, {"kind": "Status", "message": "virtualmachines is forbidden", "code": 403}
SWITCH = ("switch", "gpus", "night", "--until", "2080-01-01T00:00")
ALWAYS_DAY = {"phase": "day", "from": "2020-01-01T00:00", "until": "2090-01-01T00:00"}


def on_a_day() -> KubeVirtDay:
    return KubeVirtDay({**KUBEVIRT, "overrides": [ALWAYS_DAY]})


def vms_or(day: KubeVirtDay, instead: Reply | None = None) -> Callable[[Call], Reply]:
    """Return the answers of the API server, with another one to all that is asked about VMs."""
    others = answering(day.served)

    def answer(call: Call) -> Reply:
        if "kubevirt.io" not in call.path:
            return others(call)
        return instead if instead is not None else day.kubevirt.answer(call)

    return answer


async def run(folder: Path, answer: Callable[[Call], Reply], *arguments: str) -> CompletedProcess[str]:
    """Run a command at 80 columns."""
    async with serving(answer, folder) as api:
        process = await asyncio.create_subprocess_exec(
            *(*GPUVIRT, "schedule", *arguments, "--kubeconfig", str(api.kubeconfig)),
            env={"PATH": PATH, "COLUMNS": "80"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
    return CompletedProcess(arguments, process.returncode or 0, out.decode(), err.decode())


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.startswith("worker-")]


async def test_a_check_shows_what_each_strategy_permits(tmp_path: Path) -> None:
    day = on_a_day()
    done = await run(tmp_path, vms_or(day), "check", "gpus")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row[0] for row in rows(done.stdout)] == [f"worker-{number}" for number in (1, 2, 3, 4, 5)]
    assert {tuple(row[3:]) for row in rows(done.stdout)} == {
        ("on", "nvidia.com/A10-4Q", "no", "yes", "yes"),
        ("off", "nvidia.com/A10-16Q", "no", "yes", "yes"),
    }, "without a suspension, which the schedule does not use"
    assert "runStrategy: RerunOnFailure" in done.stdout
    assert "SuspendNotSupported" not in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert day.kubevirt.writes == day.served.writes == []
    found = json.loads((await run(tmp_path, vms_or(day), "check", "gpus", "-o", "json")).stdout)
    assert [worker["shut_down"]["is_possible"] for worker in found["workers"]] == [True] * 5


async def test_a_vm_that_an_admin_has_halted_fails_the_check(tmp_path: Path) -> None:
    day = on_a_day()
    day.kubevirt.add("worker-5", "Halted", gpu=16, runs=False)
    done = await run(tmp_path, vms_or(day), "check", "gpus")
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "HypervisorRefused: the hypervisor KubeVirt in namespace workers refused the call" in text
    assert text.count("HypervisorRefused") == 1, "a code is shown once"
    assert "set Manual to have the schedule start the VM" in text
    assert "The schedule can't switch all workers." in text


async def test_a_switch_shows_its_steps_by_what_kubevirt_says(tmp_path: Path) -> None:
    day = on_a_day()
    done = await run(tmp_path, vms_or(day), *SWITCH, "--dry-run")
    assert done.returncode == 0, done.stderr
    steps = rows(done.stdout)
    assert steps.index(["worker-1", "evict", "default/train-0"]) < steps.index(["worker-1", "shut-down", "worker-1"])
    assert steps[-1] == ["worker-5", "start", "worker-5"]
    assert "was not read" not in done.stdout
    assert day.served.writes == []
    done = await run(tmp_path, vms_or(day), *SWITCH)
    assert done.returncode == 0, done.stderr
    assert (day.served.writes, day.kubevirt.writes) == ([f"PATCH {SCHEDULE}"], [])


@pytest.mark.parametrize("zone", ["Europe/Berlin", "Pacific/Auckland"])
async def test_a_plan_has_the_steps_of_the_next_switch(tmp_path: Path, zone: str) -> None:
    """Whatever the time is: the VMs of both phases run, so that each switch shuts some of them down."""
    day = KubeVirtDay({**KUBEVIRT, "timeZone": zone})
    day.kubevirt.add("worker-5", "Manual", gpu=16)
    day.set_ready("worker-5")
    done = await run(tmp_path, vms_or(day), "plan", "gpus")
    assert done.returncode == 0, done.stderr
    assert ["NODE", "ACTION", "TARGET"] in [line.split() for line in done.stdout.splitlines()]
    assert any(row[1] == "shut-down" for row in rows(done.stdout))
    assert "was not read" not in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert day.kubevirt.writes == day.served.writes == []


@pytest.mark.parametrize(
    ("instead", "expected"),
    [
        (FORBIDDEN, ("HypervisorForbidden: the hypervisor gave no complete answer", "schedule.kubeVirtNamespaces")),
        (NOT_FOUND, ("BackEndMissing: the hypervisor gave no complete answer", "install KubeVirt in this cluster")),
    ],
    ids=["forbidden", "not installed"],
)
async def test_vms_that_can_not_be_listed_are_unknown_with_the_reason_of_kubevirt(
    tmp_path: Path, instead: Reply, expected: Sequence[str]
) -> None:
    day = on_a_day()
    done = await run(tmp_path, vms_or(day, instead), "check", "gpus")
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert all(part in text for part in expected)
    assert text.count(expected[0].partition(":")[0]) == 1, "a code is shown once"
    assert "Secret" not in text
    assert {row[3] for row in rows(done.stdout)} == {"unknown"}
    planned = await run(tmp_path, vms_or(day, instead), *SWITCH, "--dry-run")
    assert "The hypervisor was not read" in planned.stdout


async def test_vms_whose_vmis_can_not_be_listed_are_unknown_and_never_off(tmp_path: Path) -> None:
    day = on_a_day()

    def answer(call: Call) -> Reply:
        return FORBIDDEN if call.path == VMIS else vms_or(day)(call)

    done = await run(tmp_path, answer, "check", "gpus")
    assert done.returncode == 1
    assert {row[3] for row in rows(done.stdout)} == {"unknown"}
