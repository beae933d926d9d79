"""Measures a controller over many simulated nodes, on a real API server, and prints a table.

The nodes are only objects, without kubelet and agent. Each has the label of Node Feature Discovery for a GPU, and a
workload label. With --peer, another operator's program runs on the same API server over nodes of its own, and the last
column is gpuvirt's figure divided by the peer's. The peer finds the API server by KUBECONFIG and its namespace by
OPERATOR_NAMESPACE.

    .venv/bin/python -m bench.cluster
"""

import argparse
import asyncio
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lab.cluster.cluster import Cluster, cluster

from bench.process import cpu_s, pss_kib
from gpuvirt.cluster.access.kubecontext import from_kubeconfig
from gpuvirt.cluster.client import Client, Collection, PatchType
from gpuvirt.cluster.kinds.clusterpolicy import CLUSTER_POLICIES, REQUIRED, StoredPolicy
from gpuvirt.cluster.kinds.core import Node
from gpuvirt.cluster.kinds.gpunode import GPU_NODES, GpuNode
from gpuvirt.cluster.labels import DEPLOY, SETS
from gpuvirt.cluster.resources import NODES
from gpuvirt.model.desired.workload import LABEL, Workload

NAMESPACE = "gpu-operator"
ROOT = Path(__file__).parent.parent
OURS = (sys.executable, "-m", "gpuvirt", "controller", "--no-leader-elect", "--listen", "")
AT_ONCE = 32
WITHIN_S = 600.0
IDLE_S = 20.0
SWITCHES = ("sandboxWorkloads", "vfioManager", "vgpuDeviceManager", "sandboxDevicePlugin")


@dataclass
class Bench:
    """One API server, and the figures measured on it."""

    lab: Cluster
    client: Client
    nodes: int
    asked: int = 0
    """The number of requests that the bench itself has made."""
    rows: dict[str, float] = field(default_factory=dict)

    def add(self, what: str, value: float) -> None:
        """Add a figure."""
        self.rows[what] = value
        print(f"  {what}: {value:.3g}", file=sys.stderr)

    async def each(self, names: Iterable[str], act: Callable[[str], Awaitable[object]]) -> None:
        """Call `act` for each node, a limited number at a time."""
        room = asyncio.Semaphore(AT_ONCE)

        async def limited(name: str) -> None:
            async with room:
                self.asked += 1
                await act(name)

        await asyncio.gather(*(limited(name) for name in names))

    def names(self) -> Sequence[str]:
        """Return the names of the nodes."""
        return [f"sim{number:04}" for number in range(self.nodes)]

    async def make_nodes(self) -> None:
        """Create the nodes, each with a GPU and the workload label for whole GPUs."""
        labels = {"feature.node.kubernetes.io/pci-10de.present": "true", LABEL: str(Workload.PASSTHROUGH)}

        async def make(name: str) -> None:
            content = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
            await self.client.create(NODES, content, Node)

        await self.each(self.names(), make)

    async def clear(self) -> None:
        """Delete the nodes, and the GpuNodes that a program has left."""
        await self.each(self.names(), lambda name: self.client.delete(NODES, name))
        found = (await self.client.list(Collection(GPU_NODES, GpuNode))).items
        await self.each(
            [gpu_node.metadata.name for gpu_node in found], lambda name: self.client.delete(GPU_NODES, name)
        )

    async def label(self, workload: Workload) -> None:
        """Set the workload label of all nodes."""
        patch = {"metadata": {"labels": {LABEL: str(workload)}}}
        await self.each(self.names(), lambda name: self.client.patch(NODES, name, patch, PatchType.MERGE, Node))

    async def until_deployed(self, workload: Workload) -> None:
        """Wait until all nodes have exactly the labels of a workload."""
        desired = {f"{DEPLOY}{name}" for name in SETS[workload]}
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            self.asked += -(-self.nodes // 500)
            found = (await self.client.list(Collection(NODES, Node))).items
            done = sum({key for key in node.metadata.labels if key.startswith(DEPLOY)} == desired for node in found)
            if done >= self.nodes:
                return
            await asyncio.sleep(0.1)
        raise SystemExit(f"after {WITHIN_S:g} s, not all nodes have their labels")

    def requests(self) -> int:
        """Return how many requests the API server has answered."""
        page = self.lab.kubectl("get", "--raw", "/metrics").stdout
        pattern = r"^apiserver_request_total\{.*resource=\"(?:nodes|gpunodes|clusterpolicies)\".*\} ([0-9.e+]+)$"
        return int(sum(float(value) for value in re.findall(pattern, page, flags=re.MULTILINE)))


async def measure(bench: Bench, pid: int) -> None:
    """Measure a running program, from its start."""
    began, asked, answered = time.monotonic(), bench.asked, bench.requests()
    await bench.until_deployed(Workload.PASSTHROUGH)
    bench.add(f"start to {bench.nodes} nodes labelled, s", time.monotonic() - began)
    await asyncio.sleep(3)
    bench.add("start: requests", bench.requests() - answered - (bench.asked - asked))
    began, spent_s = time.monotonic(), cpu_s(pid)
    asked, answered = bench.asked, bench.requests()
    labelling = asyncio.create_task(bench.label(Workload.VGPU))
    await bench.until_deployed(Workload.VGPU)
    await labelling
    bench.add(f"{bench.nodes} nodes given another label, all done, s", time.monotonic() - began)
    await asyncio.sleep(3)
    bench.add("another label: requests", bench.requests() - answered - (bench.asked - asked))
    bench.add("another label: CPU, s", cpu_s(pid) - spent_s)
    spent_s, answered, asked = cpu_s(pid), bench.requests(), bench.asked
    await asyncio.sleep(IDLE_S)
    bench.add("left alone: CPU, ms a minute", (cpu_s(pid) - spent_s) * 1000 * 60 / IDLE_S)
    bench.add("left alone: requests a minute", (bench.requests() - answered - (bench.asked - asked)) * 60 / IDLE_S)
    bench.add("memory (PSS), MiB", pss_kib(pid) / 1024)


@contextmanager
def running(command: Sequence[str], lab: Cluster, log: Path) -> Iterator[int]:
    """Run a program, and provide its process id."""
    environment = os.environ | {"KUBECONFIG": str(lab.kubeconfig), "OPERATOR_NAMESPACE": NAMESPACE}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            yield process.pid
        finally:
            process.terminate()
            process.wait(20)


async def compare(lab: Cluster, nodes: int, commands: Sequence[Sequence[str]], work: Path) -> Sequence[Bench]:
    """Measure each program over nodes of its own."""
    client = Client(from_kubeconfig(lab.kubeconfig))
    done = []
    for number, command in enumerate(commands):
        print(shlex.join(command), file=sys.stderr)
        bench = Bench(lab, client, nodes)
        await bench.make_nodes()
        with running(command, lab, work / f"{number}.log") as pid:
            await measure(bench, pid)
        await bench.clear()
        done.append(bench)
    return done


def install(lab: Cluster) -> None:
    """Create gpuvirt's kinds and a namespace."""
    for file in ("gpunodes.yaml", "clusterpolicies.yaml"):
        lab.kubectl("apply", "-f", str(ROOT / "deploy" / file))
    lab.kubectl("create", "namespace", NAMESPACE)
    while lab.kubectl("get", "clusterpolicies,gpunodes").returncode:
        time.sleep(0.1)


async def make_policy(client: Client) -> None:
    """Create a ClusterPolicy with everything that VMs need."""
    spec = {**{name: {} for name in REQUIRED}, **{name: {"enabled": True} for name in SWITCHES}}
    content = {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": "cluster-policy"}}
    await client.create(CLUSTER_POLICIES, {**content, "spec": spec}, StoredPolicy)


def table(measured: Sequence[Bench]) -> str:
    """Return the figures as a Markdown table."""
    ours, *peers = measured
    head = "| | gpuvirt | peer | gpuvirt / peer |" if peers else "| | gpuvirt |"
    lines = [head, "|---|---|---|---|" if peers else "|---|---|"]
    for what, value in ours.rows.items():
        others = [peer.rows[what] for peer in peers if what in peer.rows]
        cells = [
            what,
            f"{value:.3g}",
            *(text for other in others for text in (f"{other:.3g}", f"{value / other:.2f}" if other else "-")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--peer", metavar="CMD", help="another operator's program")
    arguments = parser.parse_args()
    lab = cluster()
    lab.up_control_plane()
    try:
        install(lab)
        asyncio.run(make_policy(Client(from_kubeconfig(lab.kubeconfig))))
        commands: list[Sequence[str]] = [(*OURS, "--namespace", NAMESPACE)]
        if arguments.peer:
            commands.append(shlex.split(arguments.peer))
        with tempfile.TemporaryDirectory(prefix="gvb-", dir="/tmp") as folder:
            print(table(asyncio.run(compare(lab, arguments.nodes, commands, Path(folder)))))
    finally:
        lab.down()


if __name__ == "__main__":
    main()
