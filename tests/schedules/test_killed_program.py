"""`gpuvirt controller --schedules`, two programs of which one leads: it is killed in a switch, and the other ends it.

Programs, their children, pyVmomi and leader election are real, and so is the time; the vCenter is simulated.
"""

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from gpuvirt.kube.election import Terms
from gpuvirt.model.workers.connection import DEAD_AFTER_S
from tests.agent.kubelet.kubeletnode import CLOCK
from tests.cli.commandline import GPUVIRT, PATH
from tests.hypervisors.simulated import PASSWORD
from tests.kube.scriptedapi import scripted
from tests.schedules.controlled import WORKERS, living, vm_cluster
from tests.schedules.fastclock import FastClock
from tests.schedules.vmcluster import SPEC, VmCluster
from tests.web.certificates import Authority, Pair

pytestmark = [pytest.mark.ring("vsphere")]
PATIENCE_S = 120.0
LOOK_S = 0.01
SUSPEND_MS = 3000


@contextmanager
def programs(kubeconfig: Path, folder: Path) -> Iterator[list[int]]:
    """Run two controllers, and yield their process ids."""
    command = [*GPUVIRT, "controller", "--kubeconfig", str(kubeconfig), "-n", "gpuvirt", "--listen=", "--schedules"]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(2):
            with (folder / f"log{number}").open("wb") as output:
                running.append(subprocess.Popen(command, stdout=output, stderr=output, env={"PATH": PATH}))
        yield [process.pid for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()


def children(pid: int) -> frozenset[int]:
    """Return the connections to hypervisors of a process that runs."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return frozenset(
            int(child) for child in found if b"gpuvirt_schedules.hypervisors.child" in command_of(int(child))
        )
    except FileNotFoundError:
        return frozenset()


def command_of(pid: int) -> bytes:
    """Return the command line of a process; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


async def wait(condition: Callable[[], bool]) -> None:
    """Wait for a condition, in real time."""
    deadline_s = CLOCK.monotonic_s() + PATIENCE_S
    while not condition():
        assert CLOCK.monotonic_s() < deadline_s
        await CLOCK.sleep(LOOK_S)


def write_kubeconfig(folder: Path, port: int, authority: Authority) -> Path:
    path = folder / "kubeconfig"
    path.write_text(f"""
current-context: x
contexts: [{{name: x, context: {{cluster: c, user: u, namespace: gpuvirt}}}}]
clusters: [{{name: c, cluster: {{server: 'https://127.0.0.1:{port}', certificate-authority: {authority.certificate}}}}}]
users: [{{name: u, user: {{token: abc}}}}]
""")
    return path


def begin_night(cluster: VmCluster) -> None:
    night = {"phase": "night", "from": "2020-01-01T00:00", "until": "2090-01-01T00:00"}
    cluster.put_spec({**SPEC, "overrides": [night]})


async def test_a_leader_that_is_killed_in_a_call_leaves_a_switch_that_the_next_one_ends(
    tmp_path: Path, authority: Authority, server: Pair
) -> None:
    clock = FastClock(1.0, CLOCK.now() - timedelta(seconds=CLOCK.monotonic_s()), 0.0)
    with vm_cluster(tmp_path, authority, clock) as (cluster, vcenter):
        vcenter.vsphere.command(taskDelays={"Suspend": SUSPEND_MS, "PowerOn": 1000})
        begin_night(cluster)
        async with scripted(cluster.answer, server, authority.certificate) as api, living(cluster):
            with programs(write_kubeconfig(tmp_path, api.port, authority), tmp_path) as pids:
                await wait(lambda: bool(vcenter.vsphere.state.calls))
                (leader,) = (pid for pid in pids if children(pid))
                (other,) = set(pids) - {leader}
                connections = children(leader)
                os.kill(leader, signal.SIGKILL)
                killed_s = CLOCK.monotonic_s()
                assert not cluster.has_reached("night")
                await wait(lambda: not any(map(command_of, connections)))
                await CLOCK.sleep(1.0)  # for what the vCenter has received
                begun = vcenter.vsphere.state.calls
                assert not children(other), "no connection before the lease has ended"
                await wait(lambda: len(vcenter.vsphere.state.calls) > len(begun))
                assert CLOCK.monotonic_s() - killed_s > Terms().within_s + DEAD_AFTER_S
                assert children(other)

                await wait(lambda: cluster.has_reached("night"))
                await wait(lambda: bool(cluster.running("worker4")))
        state = vcenter.vsphere.state
    assert state.power == {**dict.fromkeys(WORKERS, "suspended"), "worker4": "poweredOn"}
    assert set(Counter(state.calls).values()) == {1}, "what the first one has begun is read, and not begun again"
    assert cluster.cordons() == {**dict.fromkeys(WORKERS, (True, "gpus")), "worker4": (False, "")}
    assert cluster.violations == []
    logs = "".join((tmp_path / f"log{number}").read_text() for number in range(2))
    assert PASSWORD not in logs
    assert "Traceback" not in logs
