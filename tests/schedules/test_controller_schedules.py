"""Schedules in the controller's process: what it loads, refuses and runs."""

import asyncio
import subprocess
import sys
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gpuvirt import __version__
from gpuvirt.controller.process import ControllerOptions, ControllerProcess
from gpuvirt.controller.schedulespart import load_schedules
from gpuvirt.controller.settings import ControllerSettings
from gpuvirt.kube.access.credentials import Credentials
from tests.agent.kubelet.kubeletnode import until
from tests.cli.commandline import loaded_by
from tests.kube.scriptedapi import scripted
from tests.schedules.scheduleday import SCHEDULE, SPEC, Day
from tests.schedules.servedschedule import ALL_SCHEDULES, NODES, SCHEDULES, SECRETS, Object
from tests.web.certificates import Authority, Pair

SCHEDULES_ALONE = (
    "cronsim",
    "gpuvirt_schedules.controllerpart",
    "gpuvirt_schedules.controller",
    "gpuvirt_schedules.hypervisors",
)
KUBECONFIG = """
current-context: x
contexts: [{name: x, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}]
users: [{name: u, user: {token: abc}}]
"""


def test_a_controller_without_schedules_loads_nothing_of_them() -> None:
    modules = loaded_by("controller", "--help")
    assert "gpuvirt.controller.process" in modules
    assert not {name for name in modules if name.startswith(SCHEDULES_ALONE)}


def test_schedules_without_their_distribution_are_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    arguments = ["controller", "--kubeconfig", str(tmp_path / "kubeconfig"), "-n", "x", "--listen=", "--schedules"]
    lacks = "import importlib.metadata as metadata\nmetadata.entry_points = lambda **_: ()\n"
    script = f"{lacks}from gpuvirt.cli.main import run\nrun({arguments!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert f"--schedules: schedules needs gpuvirt-schedules {__version__}, which is not installed" in done.stderr


def process(day: Day, port: int, ca: Path, *, runs_schedules: bool) -> ControllerProcess:
    credentials = Credentials("127.0.0.1", port, "gpuvirt", ca=ca, token=b"x")
    settings = ControllerSettings("gpuvirt")
    return ControllerProcess(
        ControllerOptions(
            credentials, settings, elects=False, schedules=load_schedules() if runs_schedules else None, clock=day
        )
    )


@asynccontextmanager
async def running(controller: ControllerProcess) -> AsyncIterator[ControllerProcess]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(controller.run())
        yield controller
        task.cancel()


async def test_the_controller_asks_the_hypervisor_of_the_secret_and_reports_its_answer(
    authority: Authority, server: Pair
) -> None:
    day = Day((1,))
    data = {"server": "127.0.0.1:1", "ca": authority.certificate.read_text(), "user": "u", "password": "pass-4711"}
    encoded = {key: b64encode(text.encode()).decode() for key, text in data.items()}
    day.served.put(f"{SECRETS}/vcenter", {"data": encoded})
    async with (
        scripted(day.served.answer, server, authority.certificate) as api,
        running(process(day, api.port, authority.certificate, runs_schedules=True)) as controller,
    ):
        await until(lambda: "HypervisorUnreachable" in str(day.served.objects[SCHEDULE].get("status")))
        reason = 'gpuvirt_schedule_ready{schedule="gpus",reason="HypervisorUnreachable"} 0'
        await until(lambda: reason in controller.pages()["/metrics"]().body)
    assert "pass-4711" not in str(day.status())
    assert day.conditions()["Ready"] == ("False", "HypervisorUnreachable")


async def test_without_the_option_no_schedule_is_read(authority: Authority, server: Pair) -> None:
    day = Day((1,))
    async with (
        scripted(day.served.answer, server, authority.certificate) as api,
        running(process(day, api.port, authority.certificate, runs_schedules=False)),
    ):
        await until(lambda: day.served.watches > 0)
    assert not {SCHEDULES, ALL_SCHEDULES} & set(day.served.lists)
    assert not day.served.writes


async def test_the_controller_shows_its_schedules_the_nodes_that_it_watches(authority: Authority, server: Pair) -> None:
    day = Day((1,))
    workers: list[Object] = [
        {"node": "worker-1", "nodeUid": "uid-worker-1", "phases": ["day"], "step": "Away"},
        {"node": "worker-5", "nodeUid": "uid-worker-5", "phases": ["night"], "step": "Serving"},
    ]
    conditions = [{"type": "Valid", "status": "True", "reason": "Valid", "lastTransitionTime": "2026-01-05T19:00:00Z"}]
    status: Object = {"phase": "night", "observedGeneration": 1, "workers": workers, "conditions": conditions}
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": SPEC, "status": status})
    async with (
        scripted(day.served.answer, server, authority.certificate) as api,
        running(process(day, api.port, authority.certificate, runs_schedules=True)),
    ):
        await until(lambda: day.served.watches > 1)
        assert day.status() == status
        day.served.put(f"{NODES}/worker-9", {"metadata": {"labels": {"vgpu.type": "v100-4q"}}})
        await until(lambda: "worker-9" in str(day.status()["workers"]))
