"""Measures the extender on a real API server and etcd: bindings by eight clients, and pods through kube-scheduler.

.venv/bin/python -m bench.extenderlab [NODES PODS]
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path

import msgspec
from lab.cache import locked
from lab.cluster.cluster import Cluster, cluster
from tests.cluster.extenderlab import RESOURCE, SCHEDULER, ExtenderLab, extender_lab, until

from bench.extender import PORT, Table, binding, extender
from bench.extenderclients import percentiles, send_at_once
from gpuvirt.kube.access.kubecontext import from_kubeconfig
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.resources import NODES, pods
from gpuvirt.shares.objects import SharingNode, SharingPod

AT_ONCE = 16
GPUS = 8
CLIENTS = 8


async def each(items: Iterable[str], act: Callable[[str], Awaitable[object]]) -> None:
    """Call `act` for each item, a limited number at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def limited(item: str) -> None:
        async with room:
            await act(item)

    await asyncio.gather(*(limited(item) for item in items))


async def make_nodes(client: Client, count: int) -> None:
    """Create nodes with eight GPUs each."""

    async def make(name: str) -> None:
        shared = {f"GPU-{name}-{gpu}": 1000 for gpu in range(GPUS)}
        metadata = {
            "name": name,
            "labels": {"gpuvirt.io/share-test": "true"},
            "annotations": {"gpuvirt.io/shared-gpus": json.dumps(shared)},
        }
        await client.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": metadata}, SharingNode)
        amounts = {"cpu": "64", "memory": "64Gi", "pods": "110", RESOURCE: str(GPUS * 1000)}
        ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "an object alone"}
        status = {"status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}}
        await client.patch(NODES, name, status, PatchType.MERGE, SharingNode, part="status")

    await each((f"bench{number:04}" for number in range(count)), make)


async def make_pods(client: Client, count: int, scheduler: str, *, first: int = 0) -> Mapping[str, str]:
    """Create pods of 300 units, whose names have numbers from `first` on, and return their UIDs."""
    uids: dict[str, str] = {}

    async def make(name: str) -> None:
        spec = {
            "schedulerName": scheduler,
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "main", "image": "none", "resources": {"limits": {RESOURCE: "300"}}}],
        }
        content = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        uids[name] = (await client.create(pods("default"), content, SharingPod)).metadata.uid

    await each((f"pod-{number:05}" for number in range(first, first + count)), make)
    return uids


async def prepare(lab: Cluster, nodes: int, count: int, scheduler: str) -> Mapping[str, str]:
    """Create nodes and pods."""
    client = Client(from_kubeconfig(lab.kubeconfig))
    try:
        await make_nodes(client, nodes)
        return await make_pods(client, count, scheduler)
    finally:
        client.close()


def measure_bindings(lab: Cluster, nodes: int, count: int, table: Table) -> None:
    """Measure bind alone: each pod to another node."""
    uids = asyncio.run(prepare(lab, nodes, count, "nobody"))
    with extender(lab.kubeconfig):
        requests = [
            (path, body.replace(f"uid-{name}".encode(), uid.encode()))
            for index, (name, uid) in enumerate(uids.items())
            for path, body in [binding(name, f"bench{index % nodes:04}")]
        ]
        took_ms, answers, seconds = send_at_once(
            f"http://127.0.0.1:{PORT}", [requests[index::CLIENTS] for index in range(CLIENTS)]
        )
    failures = [answer for answer in answers if msgspec.json.decode(answer) != {"Error": ""}]
    if failures:
        raise SystemExit(f"{len(failures)} bindings failed: {failures[0].decode()}")
    table.add(
        f"bind, {nodes:,} nodes, {CLIENTS} clients, real API server",
        f"{count / seconds:.0f} /s, {percentiles(took_ms)}",
    )


def measure_scheduler(found: ExtenderLab, nodes: int, count: int, table: Table) -> None:
    """Measure pods through kube-scheduler, from the first to the last."""
    replica = found.start_replica(PORT)
    found.leader()
    client = Client(from_kubeconfig(found.cluster.kubeconfig))
    asyncio.run(make_nodes(client, nodes))
    began = time.monotonic()
    asyncio.run(make_pods(Client(from_kubeconfig(found.cluster.kubeconfig)), count, SCHEDULER))
    made_s = time.monotonic() - began
    until(lambda: found.bound() == count, lambda: f"{found.bound()} of {count} pods are bound", within_s=300)
    seconds = time.monotonic() - began
    refused = replica.metric('gpuvirt_extender_requests_total{verb="bind",result="refused"}')
    what = f"{count:,} pods of 300 units through kube-scheduler, {nodes} nodes"
    table.add(what, f"{seconds:.1f} s ({made_s:.1f} s to create them), {refused:g} bindings refused")


def start(lab: Cluster) -> None:
    """Start an API server without objects."""
    lab.up_control_plane()
    lab.kubectl("create", "serviceaccount", "default", "--namespace", "default")


def main() -> None:
    """Measure, and print the table."""
    table, lab = Table(), cluster()
    nodes, count = (int(argument) for argument in sys.argv[1:3]) if len(sys.argv) > 2 else (1000, 3000)
    alone = lab.folder.with_name("cluster-alone")
    alone.mkdir(exist_ok=True)
    with locked(alone):
        try:
            start(lab)
            measure_bindings(lab, nodes, count, table)
            start(lab)
            with tempfile.TemporaryDirectory(prefix="gvb-") as folder, extender_lab(lab, Path(folder)) as found:
                measure_scheduler(found, min(nodes, 50), min(count, 1000), table)
        finally:
            lab.down()
    print(table.text())


if __name__ == "__main__":
    main()
