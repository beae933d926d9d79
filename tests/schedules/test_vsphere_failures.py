"""Wrong passwords, wrong authorities and ended sessions of a schedule: held or mended, named, no password anywhere.

The controller, the child of its connection, pyVmomi and the server are real; the vCenter is simulated.
"""

import logging
import os
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from gpuvirt.controller.process import ControllerProcess
from tests.agent.kubelet.kubeletnode import until
from tests.cli.commandline import called
from tests.hypervisors.simulated import PASSWORD, shown_by_kernel, shows
from tests.schedules.controlled import WORKERS, controlled, vm_cluster
from tests.schedules.fastclock import FastClock
from tests.schedules.vmcluster import PATIENT, VmCluster
from tests.web.certificates import Authority, Pair

pytestmark = pytest.mark.ring("vsphere")
NIGHT = datetime.fromisoformat("2026-01-05T19:00:01+00:00")
"""20:00 in Berlin: four workers have to leave."""
RATE = 100.0
SLOW = 15.0
"""For what must not be held: a busy computer has 20 s for a reading then, not 3."""
WRONG = f"not {PASSWORD}"


@pytest.fixture(autouse=True)
def _no_password(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Find the password nowhere: not in the log, not in what this process and its children print."""
    caplog.set_level(logging.DEBUG)
    logging.getLogger("asyncio").setLevel(logging.INFO)
    yield
    printed = capfd.readouterr()
    records = [(record.getMessage(), record.args, record.__dict__) for record in caplog.records]
    assert not [text for text in (printed.out, printed.err, repr(records)) if shows(text)]


def verify_silent(cluster: VmCluster, process: ControllerProcess) -> None:
    """Find the password in nothing that the controller has written or serves."""
    secrets = {path for path in cluster.objects if "/secrets/" in path}
    objects = [content for path, content in cluster.objects.items() if path not in secrets]
    assert not shows(repr((objects, cluster.events, cluster.writes)))
    assert not [page for page, answer in process.pages().items() if shows(answer().body)]


def children() -> list[int]:
    """Return the children of this process that have a hypervisor's connection."""
    found = list[int]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread, or a child of an earlier test, has ended
            for pid in (task / "children").read_text().split():
                if is_connection(int(pid)):
                    found.append(int(pid))
    return found


def is_connection(pid: int) -> bool:
    """Return whether a process is the child of a hypervisor's connection."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return b"gpuvirt_schedules.hypervisors.child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def ready(process: ControllerProcess, reason: str) -> bool:
    """Return whether the metrics say why a schedule is not ready."""
    return f'gpuvirt_schedule_ready{{schedule="gpus",reason="{reason}"}} 0' in process.pages()["/metrics"]().body


def reasons(cluster: VmCluster) -> list[object]:
    """Return the reasons of the events."""
    return [event["reason"] for event in cluster.events]


async def held(cluster: VmCluster, process: ControllerProcess, code: str) -> None:
    """Wait until a code is in the status, the conditions, the metrics and, once held, in an event."""
    await until(lambda: cluster.conditions().get("Ready") == ("False", code))
    await until(lambda: ready(process, code))
    await until(lambda: cluster.conditions().get("Held") == ("True", code))
    workers = cluster.status()["workers"]
    assert isinstance(workers, list)
    await until(lambda: reasons(cluster).count(code) >= len(workers))
    assert {worker["step"] for worker in workers} == {"Read"}
    held_workers = f'gpuvirt_schedule_held_workers{{schedule="gpus"}} {len(workers)}'
    await until(lambda: held_workers in process.pages()["/metrics"]().body)
    assert reasons(cluster).count(code) == len(workers), "each worker once"
    assert {cordon for cordon, _ in cluster.cordons().values()} == {False}
    assert cluster.vcenter.state.calls == []
    assert all(cluster.running(name) for name in WORKERS)
    verify_silent(cluster, process)


async def mended(cluster: VmCluster, process: ControllerProcess) -> None:
    """Wait until the night is reached, without a restart of the controller."""
    await until(lambda: cluster.has_reached("night"))
    await until(lambda: cluster.conditions()["Ready"] == ("True", "PhaseReached"))
    assert cluster.vcenter.state.power == {**dict.fromkeys(WORKERS, "suspended"), "worker4": "poweredOn"}
    assert cluster.violations == []
    verify_silent(cluster, process)


async def test_a_wrong_password_holds_the_switch_until_the_secret_is_right(
    tmp_path: Path, authority: Authority, server: Pair
) -> None:
    with vm_cluster(tmp_path, authority, FastClock(RATE, NIGHT)) as (cluster, vcenter):
        cluster.put_secret(replace(vcenter.credentials, password=WRONG))
        async with controlled(cluster, server, authority.certificate) as process:
            await held(cluster, process, "WrongCredentials")
            cluster.put_secret(vcenter.credentials)
            await mended(cluster, process)


async def test_a_wrong_authority_on_127_0_0_1_holds_the_switch_until_the_secret_is_right(
    tmp_path: Path, authority: Authority, server: Pair
) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other").certificate.read_text()
    with vm_cluster(tmp_path, authority, FastClock(RATE, NIGHT)) as (cluster, vcenter):
        assert vcenter.credentials.server.startswith("127.0.0.1:")
        cluster.put_secret(replace(vcenter.credentials, ca=other))
        async with controlled(cluster, server, authority.certificate) as process:
            await held(cluster, process, "HypervisorNotTrusted")
            cluster.put_secret(vcenter.credentials)
            await mended(cluster, process)


async def test_sessions_that_always_end_hold_the_switch_until_they_last(
    tmp_path: Path, authority: Authority, server: Pair
) -> None:
    with vm_cluster(tmp_path, authority, FastClock(RATE, NIGHT)) as (cluster, vcenter):
        vcenter.vsphere.command(
            fault={"method": "CreateContainerView", "every": 1, "most": 0, "kind": "notAuthenticated"}
        )
        async with controlled(cluster, server, authority.certificate) as process:
            await held(cluster, process, "HypervisorSessionLost")
            vcenter.vsphere.command(clear=True)
            await mended(cluster, process)


async def test_sessions_that_end_in_a_switch_are_replaced(tmp_path: Path, authority: Authority, server: Pair) -> None:
    with vm_cluster(tmp_path, authority, FastClock(SLOW, NIGHT), "-session-timeout=400ms") as (cluster, vcenter):
        cluster.put_spec(PATIENT)
        for method in ("SuspendVM_Task", "PowerOnVM_Task", "RetrievePropertiesEx"):
            vcenter.vsphere.command(fault={"method": method, "every": 3, "most": 0, "kind": "notAuthenticated"})
        async with controlled(cluster, server, authority.certificate) as process:
            await mended(cluster, process)
    assert reasons(cluster) == ["Switching", "PhaseReached"], "nothing was held"


async def test_the_password_is_in_no_process_and_no_support_archive(
    tmp_path: Path, authority: Authority, server: Pair
) -> None:
    with vm_cluster(tmp_path, authority, FastClock(RATE, NIGHT)) as (cluster, _):
        cluster.min_available = 5  # the switch stays where it is, with its connection
        async with controlled(cluster, server, authority.certificate) as process:
            await until(lambda: cluster.conditions().get("Ready") == ("False", "PodsLeft"))
            await until(lambda: len(children()) == 1)
            (child,) = children()
            assert not [1 for pid in (os.getpid(), child) if PASSWORD.encode() in shown_by_kernel(pid)]
            archive = tmp_path / "archive.tar.gz"
            assert called("support", "-o", str(archive)).returncode == 0
            with tarfile.open(archive) as packed:
                texts = [file.read() for member in packed if (file := packed.extractfile(member)) is not None]
            assert texts
            assert not [text for text in texts if PASSWORD.encode() in text]
            verify_silent(cluster, process)
