"""Measures VgpuSchedules: a switch's own time, the cost of schedules with nothing due, the lease while a vCenter hangs,
and the memory of many schedules of one vCenter that switch at once.

The controller, its child and pyVmomi are real, the vCenter is simulated (lab/vsphere), as are API server and kubelets.

    .venv/bin/python -m bench.schedules --only switch idle hang many
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec
from tests.agent.kubelet.kubeletnode import CLOCK
from tests.controller.observedcluster import SETTINGS
from tests.controller.servedcluster import ServedCluster, serving
from tests.hypervisors.proxy import proxy
from tests.kube.scriptedapi import Call, Reply, scripted
from tests.schedules.controlled import controlled, vm_cluster
from tests.schedules.fastclock import FastClock
from tests.schedules.servedschedule import SCHEDULES
from tests.schedules.vmcluster import CONTROLLER_LEASES, SCHEDULE, SPEC, VmCluster
from tests.web.certificates import Authority, Pair

from bench.clusternodes import name_of, node
from bench.process import children, cpu_s, private_kib, pss_kib
from bench.results import Results
from gpuvirt.kube.election import CONTROLLER_LEASE, RENEW_S
from gpuvirt.kube.kinds.vgpuschedule import ALL_SCHEDULES
from gpuvirt.kube.resources import NODES
from gpuvirt.model.desired.workload import Workload

PARTS = ("switch", "idle", "hang", "many")
GPUVIRT, WITHOUT = COLUMNS = ("gpuvirt", "without schedules")
NOON = datetime(2026, 1, 5, 11, tzinfo=UTC)
SUSPEND_MS, START_MS = 3000, 2000
GRACE_S = 8.0
"""How long pods take to end: longer than a cordon takes to settle."""
LOOK_S = 0.01
WORKERS = 10
"""How many workers a schedule of an idle cluster has."""
SETTLED_S = 20.0
MANY = (1, 20, 100)
"""How many schedules switch at once. Each has a worker without a VM, so that it reads the vCenter each second."""


class OwnTime:
    """The time of a switch in which neither a pod ends, nor the hypervisor has a task, nor a kubelet has to answer."""

    def __init__(self, cluster: VmCluster) -> None:
        self.cluster = cluster
        self._before = len(cluster.vcenter.state.calls)

    async def measure(self, phase: str) -> tuple[float, float]:
        """Return a switch's own time and all of its time, in seconds."""
        own_s, began_s = 0.0, CLOCK.monotonic_s()
        last_s = began_s
        while not self.cluster.has_reached(phase):
            is_own = not self._others()
            await CLOCK.sleep(LOOK_S)
            now_s = CLOCK.monotonic_s()
            own_s += now_s - last_s if is_own else 0.0
            last_s = now_s
        return own_s, last_s - began_s

    def _others(self) -> bool:
        cluster, state = self.cluster, self.cluster.vcenter.state
        if any(pod.ends_s is not None for pod in cluster.pods.values()):
            return True
        for call in state.calls[self._before :]:
            action, name = call.split()
            if state.power[name] != ("suspended" if action == "Suspend" else "poweredOn"):
                return True
            if action == "PowerOn" and not self._has_answered(name):
                return True
        return False

    def _has_answered(self, name: str) -> bool:
        kubelet = self.cluster.kubelets[name]
        return kubelet.is_on and kubelet.renewed_s >= kubelet.since_s and self.cluster.is_ready(name)


def begin(cluster: VmCluster, phase: str) -> None:
    """Begin a switch."""
    cluster.put_spec({**SPEC, "overrides": [{"phase": phase, "from": "2026-01-01T00:00", "until": "2027-01-01T00:00"}]})


async def measure_switches(rounds: int, folder: Path, authority: Authority, server: Pair, results: Results) -> None:
    """Measure switches in both directions."""
    figures: dict[str, list[tuple[float, float]]] = {"night": [], "day": []}
    with vm_cluster(folder, authority, FastClock(1.0, NOON)) as (cluster, vcenter):
        vcenter.vsphere.command(taskDelays={"Suspend": SUSPEND_MS, "PowerOn": START_MS})
        cluster.grace_s = GRACE_S
        async with controlled(cluster, server, authority.certificate):
            while not cluster.has_reached("day"):
                await CLOCK.sleep(LOOK_S)
            for _ in range(rounds):
                for phase, found in figures.items():
                    await CLOCK.sleep(SETTLED_S)
                    watched = OwnTime(cluster)
                    begin(cluster, phase)
                    found.append(await watched.measure(phase))
    for phase, found in figures.items():
        what = {"night": "4 workers leave, 1 arrives", "day": "1 leaves, 4 arrive"}[phase]
        results.add(GPUVIRT, f"switch, {what}: own time, s", median(own_s for own_s, _ in found))
        results.add(GPUVIRT, f"... most of {len(found)} to {phase}, s", max(own_s for own_s, _ in found))
        results.add(GPUVIRT, f"... all of a switch to {phase}, s", median(all_s for _, all_s in found))


@contextmanager
def program(kubeconfig: Path, log: Path, *options: str) -> Iterator[int]:
    """Run a controller, and provide its process."""
    command = [sys.executable, "-m", "gpuvirt", "controller", "--kubeconfig", str(kubeconfig), "--listen=", *options]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield process.pid
        finally:
            process.terminate()


@asynccontextmanager
async def idle_cluster(
    nodes: int, schedules: int, folder: Path, authority: Authority, server: Pair
) -> AsyncIterator[Path]:
    """Serve a cluster with schedules of which nothing is due, and provide its kubeconfig."""
    cluster = ServedCluster()
    cluster.install(ALL_SCHEDULES)
    for number in range(nodes):
        cluster.put(NODES, worker(number))
    for number in range(schedules):
        cluster.put(ALL_SCHEDULES, schedule(number))
    async with serving(cluster, authority, server) as api:
        yield kubeconfig(api.port, authority, folder)


def uid_of(number: int) -> str:
    """Return the uid that the cluster gives to a node."""
    return f"uid-{NODES.path}-{name_of(number)}"


def pool_of(schedule: int) -> str:
    """Return the label by which one schedule selects its nodes: a node in two schedules is a fault of both."""
    return f"pool-{schedule}"


def worker(number: int) -> Mapping[str, object]:
    """Return a node that schedules select: it would be looked at in each minute if it were not as statuses have it."""
    found = node(number, Workload.VGPU, NOON)
    metadata: Mapping[str, object] = msgspec.convert(found["metadata"], dict[str, object])
    labels = {**msgspec.convert(metadata["labels"], dict[str, str]), "pool": pool_of(number // WORKERS)}
    return {**found, "metadata": {**metadata, "labels": labels}}


def schedule(number: int) -> dict[str, object]:
    """Return a schedule that has reached its phase, with ten workers, as the API server has it."""
    workers = [
        {
            "node": name_of(WORKERS * number + place),
            "nodeUid": uid_of(WORKERS * number + place),
            "phases": ["day"],
            "vm": f"5017bbbb-0000-0000-{number:04}-{place:012}",
            "vmName": name_of(WORKERS * number + place),
            "step": "Serving",
            "since": "2026-01-05T06:03:00Z",
        }
        for place in range(WORKERS)
    ]
    at = {"observedGeneration": 1, "lastTransitionTime": "2026-01-05T06:03:00Z", "message": ""}
    conditions = [
        {"type": "Ready", "status": "True", "reason": "PhaseReached", **at},
        {"type": "Valid", "status": "True", "reason": "Valid", **at},
        {"type": "Held", "status": "False", "reason": "NotHeld", **at},
    ]
    status = {"phase": "day", "observedGeneration": 1, "workers": workers, "conditions": conditions}
    metadata = {"name": f"gpus-{number}", "namespace": SETTINGS.namespace, "generation": 1}
    overrides = [{"phase": "day", "from": "2026-01-01T00:00", "until": "2096-01-01T00:00"}]
    phases: list[dict[str, object]] = [
        {"name": name, "start": start, "workers": {"matchLabels": {"pool": pool}}}
        for name, start, pool in (("day", "0 7 * * 1-5", pool_of(number)), ("night", "0 20 * * 1-5", "none"))
    ]
    return {"metadata": metadata, "spec": {**SPEC, "phases": phases, "overrides": overrides}, "status": status}


def kubeconfig(port: int, authority: Authority, folder: Path) -> Path:
    """Write a kubeconfig."""
    path = folder / "kubeconfig"
    server = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(authority.certificate)}
    content = {
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": SETTINGS.namespace}}],
        "clusters": [{"name": "c", "cluster": server}],
        "users": [{"name": "u", "user": {"token": "abc"}}],
    }
    path.write_text(json.dumps(content))
    return path


async def measure_idle(minutes: float, folder: Path, authority: Authority, server: Pair, results: Results) -> None:
    """Measure controllers with and without schedules beside each other, on clusters of their own."""
    async with (
        idle_cluster(1000, 100, folder / "with", authority, server) as with_schedules,
        idle_cluster(1000, 0, folder / "without", authority, server) as without,
    ):
        with (
            program(with_schedules, folder / "with/log", "--schedules") as ours,
            program(without, folder / "without/log") as other,
        ):
            await CLOCK.sleep(2 * SETTLED_S)
            before = {pid: cpu_s(pid) for pid in (ours, other)}
            await CLOCK.sleep(60 * minutes)
            for name, pid in ((GPUVIRT, ours), (WITHOUT, other)):
                each = (cpu_s(pid) - before[pid]) / minutes
                results.add(name, "nothing due, 100 schedules, 1,000 nodes: processor time a minute, s", each)
                results.add(name, "... memory of its own, MiB", private_kib(pid) / 1024)


def kernels_time() -> FastClock:
    """Return the time of this computer, by whose monotonic seconds the kernel ends children."""
    return FastClock(1.0, CLOCK.now() - timedelta(seconds=CLOCK.monotonic_s()), 0.0)


async def measure_hang(hang_s: float, folder: Path, authority: Authority, server: Pair, results: Results) -> None:
    """Measure the times between renewals of the lease while a vCenter does not answer."""
    renewed: list[float] = []
    with vm_cluster(folder, authority, kernels_time()) as (cluster, vcenter), proxy(vcenter.vsphere.port) as way:
        cluster.put_secret(replace(vcenter.credentials, server=f"127.0.0.1:{way.port}"))
        answer = cluster.answer

        def noted(call: Call) -> Reply:
            if call.method == "PUT" and call.path == f"{CONTROLLER_LEASES}/{CONTROLLER_LEASE}":
                renewed.append(CLOCK.monotonic_s())
            return answer(call)

        cluster.answer = noted  # type: ignore[method-assign]
        async with controlled(cluster, server, authority.certificate, elects=True):
            begin(cluster, "day")
            while not cluster.has_reached("day"):
                await CLOCK.sleep(LOOK_S)
            way.stop_after(0)
            begin(cluster, "night")
            renewed.clear()
            await CLOCK.sleep(hang_s)
            if not way.is_stopped:
                raise SystemExit("the controller has asked the vCenter nothing")
            way.go_on()
    between = [later - earlier for earlier, later in pairwise(renewed)]
    results.add(GPUVIRT, f"the vCenter hangs for {hang_s:g} s: renewals of the lease", len(renewed))
    results.add(GPUVIRT, "... most between two, s", max(between))
    results.add(GPUVIRT, "... late by over 1 s", sum(each > RENEW_S + 1.0 for each in between))


async def measure_many(folder: Path, authority: Authority, server: Pair, results: Results) -> None:
    """Measure a controller and its children while schedules with one Secret switch, at their most."""
    for number in MANY:
        (folder / f"many-{number}").mkdir()
        with vm_cluster(folder, authority, kernels_time()) as (cluster, _):
            cluster.delete(SCHEDULE)
            for each in range(number):
                made = schedule(each)
                spec = msgspec.convert(made["spec"], dict[str, object])
                always = [{"phase": "night", "from": "2026-01-01T00:00", "until": "2096-01-01T00:00"}]
                past = {"phase": "day", "before": "night", "began": "2026-01-05T06:03:00Z", "cause": "Schedule"}
                history = [{**past, "ended": "2026-01-05T06:05:00Z", "outcome": "Reached", "by": "alice"}] * 50
                content = {"metadata": {"generation": 1}, "spec": {**spec, "overrides": always}}
                content |= {"status": {"history": history}}
                cluster.put(f"{SCHEDULES}/gpus-{each}", content)
                labels = {"labels": {"pool": pool_of(each)}}
                cluster.put(f"{NODES.path}/{name_of(each)}", {"metadata": labels, "spec": {}, "status": {}})
            async with scripted(cluster.answer, server, authority.certificate) as api:
                config = kubeconfig(api.port, authority, folder / f"many-{number}")
                options = ("--schedules", "--no-leader-elect", "--namespace=gpuvirt")
                with program(config, folder / f"many-{number}/log", *options) as pid:
                    controller_kib, children_kib, found = await most_of(pid)
        what = f"{number} schedules with one Secret switch"
        results.add(GPUVIRT, f"{what}: children", found)
        results.add(GPUVIRT, f"{what}: memory of the children (PSS), MiB", children_kib / 1024)
        results.add(GPUVIRT, f"{what}: memory of the controller (PSS), MiB", controller_kib / 1024)


async def most_of(pid: int) -> tuple[int, int, int]:
    """Return the most memory of a controller and of its children (PSS, KiB), and the most children, in some time."""
    controller_kib, children_kib, number = 0, 0, 0
    until_s = CLOCK.monotonic_s() + 2 * SETTLED_S
    while CLOCK.monotonic_s() < until_s:
        await CLOCK.sleep(0.5)
        with suppress(OSError):
            pids = children(pid)
            controller_kib = max(controller_kib, pss_kib(pid))
            children_kib = max(children_kib, sum(map(pss_kib, pids)))
            number = max(number, len(pids))
    return controller_kib, children_kib, number


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.schedules", description=__doc__)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="measure only these parts")
    parser.add_argument("--rounds", type=int, default=3, help="switches in each direction; the median counts")
    parser.add_argument("--minutes", type=float, default=3.0, help="how long controllers are left alone")
    parser.add_argument("--hang", type=float, default=60.0, help="for how many seconds the vCenter does not answer")
    arguments = parser.parse_args()
    results = Results()
    with tempfile.TemporaryDirectory(prefix="gvb-", dir="/tmp") as folder:
        work = Path(folder)
        authority = Authority(work)
        server = authority.server("api", alternatives="IP:127.0.0.1")
        if "switch" in arguments.only:
            asyncio.run(measure_switches(arguments.rounds, work, authority, server, results))
        if "idle" in arguments.only:
            for name in ("with", "without"):
                (work / name).mkdir()
            asyncio.run(measure_idle(arguments.minutes, work, authority, server, results))
        if "hang" in arguments.only:
            asyncio.run(measure_hang(arguments.hang, work, authority, server, results))
        if "many" in arguments.only:
            asyncio.run(measure_many(work, authority, server, results))
    print(f"load {os.getloadavg()[1]:.1f}\n{results.table(COLUMNS)}")


if __name__ == "__main__":
    main()
