"""Measures the agent as a device plugin, and how fast it creates vGPUs, over simulated hosts, and prints a table.

Processes, unix sockets and gRPC are real; the host's files and the kubelet are simulated. The floor, a trivial plugin
in Python with grpcio (bench/floor.py), runs beside the agent. All plugins answer Allocate in turn, call by call, so
that other work on the computer slows all of them equally: the ratio counts. --peer adds another plugin's program,
--checkout the agent of another checkout. --vgpu-peer adds a program that creates vGPUs (`nvidia-vgpu-dm apply`).
"""

import argparse
import asyncio
import logging
import os
import shlex
import tempfile
from pathlib import Path

from bench import ondemand, plugins, vgpuchanges
from bench.clustermeasures import percentile
from bench.plugins import Effort
from bench.process import OURS, Plugin
from bench.results import Results

GPUVIRT, _, CHECKOUT, PEER = COLUMNS = ("gpuvirt", "floor", "checkout", "peer")
PARTS = ("plugin", "labels", "apply", "on-demand")


def measure_plugins(arguments: argparse.Namespace, work: Path, results: Results) -> None:
    """Measure the agent as a device plugin, beside the other requested plugins."""
    found = [Plugin(GPUVIRT, (*OURS, *shlex.split(arguments.agent_options)))]
    if arguments.checkout:
        found.append(Plugin(CHECKOUT, found[0].command, checkout=arguments.checkout.resolve()))
    if arguments.peer:
        found.append(Plugin(PEER, shlex.split(arguments.peer), wants_fixed_paths=True))
    effort = Effort(arguments.rounds, arguments.calls, arguments.idle, arguments.starts)
    asyncio.run(plugins.measure(found, effort, work, results))


async def measure_labels(rounds: int, work: Path, results: Results) -> None:
    """Measure the time from the name of another config until the kubelet has the new vGPUs."""
    for number, host in enumerate(vgpuchanges.HOSTS):
        folder = work / f"c{number}"
        folder.mkdir()
        more, fewer = await vgpuchanges.measure_label(host, rounds, folder)
        (few, few_each), (many, many_each) = host.few, host.many
        made = f"{host.about}, {vgpuchanges.GPUS * many_each} {many} instead of {vgpuchanges.GPUS * few_each} {few}"
        results.add(GPUVIRT, f"config to list: {made}, s", more)
        results.add(GPUVIRT, f"... and back, {host.about}, s", fewer)


def measure_apply(arguments: argparse.Namespace, work: Path, results: Results) -> None:
    """Measure how fast a command creates vGPUs."""
    what = f"apply by hand, mounted: {vgpuchanges.GPUS * vgpuchanges.HOSTS[0].many[1]} vGPUs, s"
    for name, command in ((GPUVIRT, ""), (PEER, arguments.vgpu_peer)):
        if command is not None:
            folder = work / f"a-{name}"
            folder.mkdir()
            program = shlex.split(command) or vgpuchanges.OURS
            seconds = vgpuchanges.measure_apply(program, arguments.rounds, folder, wants_fixed_paths=bool(command))
            results.add(name, what, seconds)


def measure_on_demand(jobs: int, checkout: Path | None, work: Path, results: Results) -> None:
    """Measure the creation of vGPUs on demand, their removal, and jobs one after another on a full GPU."""
    for column, source in ((GPUVIRT, None), *([(CHECKOUT, checkout.resolve())] if checkout else ())):
        folder = work / f"o-{column}"
        for name in ("many", "jobs"):
            (folder / name).mkdir(parents=True)
        found = asyncio.run(ondemand.measure(jobs, folder, source))
        for about, figures in (
            (f"on demand: admission with creation, {len(found.allocations)} pods", found.allocations),
            (f"on demand: pod's end to removal, {len(found.removals)} pods", found.removals),
            (f"on demand: admission of a job as the last one ends, {jobs} jobs", found.jobs),
        ):
            for name, percent in (("p50", 50), ("p99", 99)):
                results.add(column, f"{about}, {name}, ms", 1000 * percentile(figures, percent))
        results.add(
            column, "on demand: processor time of the agent for a pod's admission and start, ms", 1000 * found.cpu_s
        )
        results.add(column, f"on demand: refused of {jobs} jobs", float(found.refused_jobs))


def read_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--peer", metavar="CMD", help="another plugin's program, run with the host at its usual paths")
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="another checkout of gpuvirt, to compare with")
    parser.add_argument("--vgpu-peer", metavar="CMD", help="a program that creates vGPUs by -f FILE -c NAME, as --peer")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="measure only these parts")
    parser.add_argument("--agent-options", default="", metavar="OPTIONS", help="more options of the agent, one text")
    parser.add_argument("--starts", type=int, nargs="+", default=[8, 64, 1024], metavar="GPUS", help="sizes of hosts")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each size; the median counts")
    parser.add_argument("--calls", type=int, default=5000, help="Allocate calls of each size")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds to measure the idle plugins")
    parser.add_argument("--jobs", type=int, default=200, help="jobs one after another on a full GPU")
    parser.add_argument("--verbose", action="store_true", help="print each figure to standard error at once")
    return parser.parse_args()


def main() -> None:
    """Measure, and print the table."""
    arguments = read_arguments()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    results = Results(arguments.verbose)
    with tempfile.TemporaryDirectory(prefix="gvb-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        logging.basicConfig(filename=work / "log")  # for the agents in this process
        if "plugin" in arguments.only:
            measure_plugins(arguments, work, results)
        if "labels" in arguments.only:
            asyncio.run(measure_labels(arguments.rounds, work, results))
        if "apply" in arguments.only:
            measure_apply(arguments, work, results)
        if "on-demand" in arguments.only:
            measure_on_demand(arguments.jobs, arguments.checkout, work, results)
        print(results.table(COLUMNS))


if __name__ == "__main__":
    main()
