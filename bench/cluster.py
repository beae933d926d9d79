"""Measures a controller over many nodes on a real API server, and prints a table for each number of nodes.

The nodes are only objects, without kubelet and agent, in usual size and with the labels of Node Feature Discovery.
etcd, the API server, the bench and the measured program share this computer. With --peer, another operator's program
is measured over the same nodes, on an API server without other objects, and the last column is gpuvirt's figure divided
by the peer's. A program finds the API server by KUBECONFIG and its namespace by OPERATOR_NAMESPACE, and has an account
that may do everything. With several numbers of nodes, a last table shows the growth.

    .venv/bin/python -m bench.cluster --nodes 500 2000
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.cache import locked
from lab.cluster.cluster import Cluster, cluster

from bench.clusterapi import Requests
from bench.clustermeasures import MEASURES, Fleet, chosen, measure_start
from bench.clusternodes import Peculiarity, mixed_gpu_node, peculiarity_of
from bench.clusterprograms import NAMESPACE, OURS, Program, counted, make_account, running
from bench.results import Results
from gpuvirt.kube.kinds.clusterpolicy import REQUIRED
from gpuvirt.kube.kinds.gpunode import API_VERSION

ROOT = Path(__file__).parent.parent
GPUVIRT, CHECKOUT, PEER = COLUMNS = ("gpuvirt", "checkout", "peer")
SWITCHES = ("sandboxWorkloads", "vfioManager", "vgpuDeviceManager", "sandboxDevicePlugin")
KINDS = ("gpunodes.yaml", "clusterpolicies.yaml")
GPU_NODES = f"/apis/{API_VERSION}/gpunodes"


@dataclass
class Measured:
    """All figures: a table for each number of nodes, and the requests behind them."""

    tables: dict[int, Results] = field(default_factory=dict)
    kinds: dict[int, dict[str, Mapping[str, Mapping[str, int]]]] = field(default_factory=dict)
    loads: dict[int, float] = field(default_factory=dict)

    def add(self, program: Program, nodes: int, fleet: Fleet) -> None:
        """Add the figures of a program."""
        table = self.tables.setdefault(nodes, Results())
        for what, value in fleet.rows.items():
            table.add(program.name, what, value)
        self.kinds.setdefault(nodes, {})[program.name] = fleet.kinds
        self.loads[nodes] = os.getloadavg()[1]

    def text(self) -> str:
        """Return the tables, and the growth of each program where there are several numbers of nodes."""
        parts = [f"{nodes:,} nodes\n\n{table.table(COLUMNS)}" for nodes, table in self.tables.items()]
        if len(self.tables) > 1:
            parts += [f"growth, {name}\n\n{growth(self.tables, name)}" for name in COLUMNS if self._has(name)]
        return "\n\n".join(parts)

    def as_json(self) -> str:
        """Return the figures and the requests for a comparison by a program."""
        content = {
            str(nodes): {"figures": table.rows, "requests": self.kinds[nodes], "load": self.loads[nodes]}
            for nodes, table in self.tables.items()
        }
        return json.dumps(content, indent=1)

    def _has(self, name: str) -> bool:
        return any(name in row for table in self.tables.values() for row in table.rows.values())


def growth(tables: Mapping[int, Results], name: str) -> str:
    """Return a program's figures by the number of nodes, and the ratio of the last to the first."""
    sizes = sorted(tables)
    results, columns = Results(), [f"{nodes:,}" for nodes in sizes]
    for nodes in reversed(sizes):
        for what, row in tables[nodes].rows.items():
            if name in row:
                results.add(f"{nodes:,}", what, row[name])
    return results.table(columns[::-1])


def install(lab: Cluster, requests: Requests, program: Program, kinds: Sequence[Path]) -> None:
    """Create the kinds, the namespace and a ClusterPolicy with everything that VMs need."""
    files = [ROOT / "deploy" / name for name in KINDS] if program.is_ours else [ROOT / "deploy" / KINDS[1], *kinds]
    for file in files:
        done = lab.kubectl("apply", "--server-side", "-f", str(file))
        if done.returncode:
            raise SystemExit(f"{file}: {done.stderr}")
    lab.kubectl("create", "namespace", NAMESPACE)
    while lab.kubectl("get", "clusterpolicies,gpunodes" if program.is_ours else "clusterpolicies").returncode:
        time.sleep(0.1)
    spec = {**{name: {} for name in REQUIRED}, **{name: {"enabled": True} for name in SWITCHES}}
    content = {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": "cluster-policy"}}
    requests.ask("POST", "/apis/nvidia.com/v1/clusterpolicies", {**content, "spec": spec})


def measure(lab: Cluster, program: Program, nodes: int, arguments: argparse.Namespace, work: Path) -> Fleet:
    """Measure a program over nodes, on an API server without other objects."""
    print(f"{nodes} nodes, {program.name}: {shlex.join(program.command)}", file=sys.stderr)
    lab.up_control_plane()
    requests = Requests(lab.folder / "certs/apiserver.crt")
    install(lab, requests, program, arguments.peer_kinds)
    kubeconfig = work / "kubeconfig"
    make_account(lab, kubeconfig)
    fleet = Fleet(lab, requests, nodes)
    fleet.join(nodes)
    if program.is_ours:
        mixed = [number for number in range(nodes) if peculiarity_of(number) is Peculiarity.TWO_MODES]
        requests.each(mixed, lambda number: requests.ask("POST", GPU_NODES, mixed_gpu_node(number)))
    with running(program, lab, kubeconfig, work / f"{program.name}-{nodes}.log") as process:
        measure_start(fleet, process)
        for name in chosen(arguments.only):
            MEASURES[name](fleet, process)
    return fleet


def measure_all(arguments: argparse.Namespace, work: Path) -> Measured:
    """Measure each program over each number of nodes."""
    programs = [Program(GPUVIRT, OURS)]
    if arguments.checkout:
        programs.append(Program(CHECKOUT, OURS, arguments.checkout.resolve()))
    if arguments.peer:
        programs.append(Program(PEER, shlex.split(arguments.peer), is_ours=False))
    measured, lab = Measured(), cluster()
    alone = lab.folder.with_name("cluster-alone")
    alone.mkdir(exist_ok=True)
    with locked(alone), counted():
        try:
            for nodes in arguments.nodes:
                for program in programs:
                    if program.name != PEER or nodes <= arguments.peer_up_to:
                        measured.add(program, nodes, measure(lab, program, nodes, arguments, work))
                        if arguments.json:
                            arguments.json.write_text(measured.as_json())
        finally:
            lab.down()
    return measured


def read_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[500], help="numbers of nodes, each measured alone")
    parser.add_argument("--peer", metavar="CMD", help="another operator's program")
    parser.add_argument(
        "--peer-kinds",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="kinds that it needs beside ClusterPolicy",
    )
    parser.add_argument(
        "--peer-up-to", type=int, default=sys.maxsize, metavar="NODES", help="measure it only up to so many nodes"
    )
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="another checkout of gpuvirt, to compare with")
    parser.add_argument(
        "--only", choices=tuple(MEASURES), nargs="*", default=tuple(MEASURES), help="measure only this, and the start"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures and the requests to a file")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of the programs there")
    return parser.parse_args()


def main() -> None:
    """Measure, and print the tables."""
    arguments = read_arguments()
    with tempfile.TemporaryDirectory(prefix="gvb-", dir="/tmp") as folder:
        work = arguments.logs or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        print(measure_all(arguments, work).text())


if __name__ == "__main__":
    main()
