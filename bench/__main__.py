"""Measures a device plugin over simulated hosts, and prints a table.

Everything is real but the host's files and the kubelet: a process, unix sockets, gRPC. With --peer another plugin's
program is run over the same host, and the last column is ours divided by its; --vgpu-peer does so with a program that
carves GPUs (`nvidia-vgpu-dm apply`).
"""

import argparse
import asyncio
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from bench import carving
from bench.host import write_host
from bench.process import OURS, Plugin, cpu_s, pss_kib, started
from gpuvirt.clock import RealClock
from gpuvirt.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.sim.kubelet.kubelet import SimKubelet, running

REGISTERED_WITHIN_S = 60.0
IDLE_GPUS = 8


@dataclass
class Results:
    """Figures by what they are of, with their unit."""

    rows: dict[str, float] = field(default_factory=dict)

    def add(self, what: str, value: float) -> None:
        """Keep a figure."""
        self.rows[what] = value
        print(f"  {what}: {value:.3g}", file=sys.stderr)


async def registered(kubelet: SimKubelet, devices: int) -> str:
    """Wait until all devices are allocatable; return the resource that has them."""
    deadline = time.monotonic() + REGISTERED_WITHIN_S
    while time.monotonic() < deadline:
        if sum(kubelet.allocatable().values()) >= devices:
            return max(kubelet.allocatable(), key=lambda name: kubelet.allocatable()[name])
        await asyncio.sleep(0.002)
    raise SystemExit(f"no {devices} devices after {REGISTERED_WITHIN_S:g} s: {dict(kubelet.allocatable())}")


async def measure_start(plugin: Plugin, gpus: int, rounds: int, work: Path, results: Results) -> None:
    """Measure the time from the process's start until the kubelet has all devices."""
    host = work / f"host-{gpus}"
    if not host.exists():
        write_host(gpus, host)
    times = []
    for number in range(rounds):
        folder = work / f"k{number}-{gpus}-{plugin.name}"
        async with running(folder, RealClock()) as kubelet:
            began = time.monotonic()
            with started(plugin, host, folder, work / f"{plugin.name}.log"):
                await registered(kubelet, gpus)
                times.append(time.monotonic() - began)
    results.add(f"start to {gpus} GPUs registered, s", statistics.median(times))


async def measure_idle(plugin: Plugin, seconds: float, calls: int, work: Path, results: Results) -> None:
    """Measure Allocate, and then the memory and processor time of a plugin that is left alone."""
    folder = work / f"k-{plugin.name}"
    async with running(folder, RealClock()) as kubelet:
        with started(plugin, work / f"host-{IDLE_GPUS}", folder, work / f"{plugin.name}.log") as pid:
            resource = await registered(kubelet, IDLE_GPUS)
            sockets = [path for path in folder.glob("device-plugins/*.sock") if path.name != "kubelet.sock"]
            devices = sorted(kubelet.manager.resources[resource].healthy)
            for count in (1, IDLE_GPUS):
                latencies = await asyncio.get_running_loop().run_in_executor(
                    None, allocate_times, sockets[0], devices[:count], calls
                )
                for name, percent in (("p50", 50), ("p99", 99)):
                    figure = statistics.quantiles(latencies, n=100)[percent - 1] * 1e6
                    results.add(f"Allocate of {count}, {name}, us", figure)
            await asyncio.sleep(2)
            before, began = cpu_s(pid), time.monotonic()
            await asyncio.sleep(seconds)
            burnt = (cpu_s(pid) - before) / (time.monotonic() - began)
            results.add(f"CPU idle with {IDLE_GPUS} GPUs, s an hour", burnt * 3600)
            results.add(f"PSS idle with {IDLE_GPUS} GPUs, MB", pss_kib(pid) * 1024 / 1e6)


def allocate_times(socket: Path, devices: Sequence[str], calls: int) -> list[float]:
    """Return how long each of so many Allocate calls took, one after another, on one connection."""
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=list(devices))])
    times = []
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        call = channel.unary_unary(
            "/v1beta1.DevicePlugin/Allocate", pb.AllocateRequest.SerializeToString, pb.AllocateResponse.FromString
        )
        for number in range(calls + calls // 10):
            began = time.perf_counter()
            call(request)
            if number >= calls // 10:  # the first tenth warms up
                times.append(time.perf_counter() - began)
    return times


async def measure(plugin: Plugin, arguments: argparse.Namespace, work: Path, results: Results) -> None:
    """Measure one plugin."""
    print(f"{plugin.name}: {shlex.join(plugin.command)}", file=sys.stderr)
    for gpus in (8, 64, 1024):
        await measure_start(plugin, gpus, arguments.rounds, work, results)
    await measure_idle(plugin, arguments.idle, arguments.calls, work, results)


async def measure_labels(rounds: int, work: Path, results: Results) -> None:
    """Measure the time from another config's name until the kubelet has the new vGPUs."""
    for number, machine in enumerate(carving.MACHINES):
        folder = work / f"c{number}"
        folder.mkdir()
        more, fewer = await carving.measure_label(machine, rounds, folder)
        (few, few_each), (many, many_each) = machine.few, machine.many
        made = f"{machine.about}, {carving.GPUS * many_each} {many} instead of {carving.GPUS * few_each} {few}, s"
        results.add(f"config to list: {made}", more)
        results.add("... and back, s", fewer)


def measure_carving(arguments: argparse.Namespace, work: Path, ours: Results, peer: Results) -> None:
    """Measure carving, by the agent and by hand."""
    asyncio.run(measure_labels(arguments.rounds, work, ours))
    what = f"apply by hand, mounted: {carving.GPUS * carving.MACHINES[0].many[1]} vGPUs, s"
    for name, command, results in (("ours", "", ours), ("peer", arguments.vgpu_peer, peer)):
        if command is not None:
            folder = work / f"a-{name}"
            folder.mkdir()
            program = shlex.split(command) or carving.OURS
            seconds = carving.measure_apply(program, arguments.rounds, folder, wants_fixed_paths=bool(command))
            results.add(what, seconds)


def table(ours: Results, peer: Results) -> str:
    """Return the figures as a table in Markdown."""
    with_peer = ["| | gpuvirt | peer | gpuvirt / peer |", "|---|---|---|---|"]
    lines = with_peer if peer.rows else ["| | gpuvirt |", "|---|---|"]
    for what, value in ours.rows.items():
        other = peer.rows.get(what)
        cells = [
            what,
            f"{value:.3g}",
            *([f"{other:.3g}", f"{value / other:.2f}"] if other else ["", ""] if peer.rows else []),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--peer", metavar="CMD", help="another plugin's program, run with the host at its usual paths")
    parser.add_argument("--vgpu-peer", metavar="CMD", help="what carves GPUs when -f FILE -c NAME follow, as --peer")
    parser.add_argument("--only-carving", action="store_true", help="measure what --vgpu-peer is for alone")
    parser.add_argument("--agent-options", default="", metavar="OPTIONS", help="more options of our agent, one text")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each size, of which the median counts")
    parser.add_argument("--calls", type=int, default=5000, help="Allocate calls of each size")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds of being left alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gvb-", dir="/tmp") as folder:
        work = Path(folder)
        ours, peer = Results(), Results()
        if not arguments.only_carving:
            ours_as = Plugin("gpuvirt", (*OURS, *shlex.split(arguments.agent_options)))
            asyncio.run(measure(ours_as, arguments, work, ours))
            if arguments.peer:
                plugin = Plugin("peer", shlex.split(arguments.peer), wants_fixed_paths=True)
                asyncio.run(measure(plugin, arguments, work, peer))
        measure_carving(arguments, work, ours, peer)
        print(table(ours, peer))


if __name__ == "__main__":
    main()
