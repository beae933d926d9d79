"""Measures how soon a new leader of the extender serves while many pods wait, on a real API server and etcd.

A new leader changes each waiting pod, so that no binding of an earlier leader is made late. Nobody else asks meanwhile.

.venv/bin/python -m bench.takeover [PODS...]
"""

import asyncio
import sys
import time

from lab.cache import locked
from lab.cluster.cluster import Cluster, cluster

from bench.extender import Table, extender
from bench.extenderlab import make_nodes, make_pods, start
from gpuvirt.kube.access.kubecontext import from_kubeconfig
from gpuvirt.kube.client import Client

NODES = 50
PODS = (60, 500, 2000)
ROUNDS = 3


def serves_after(lab: Cluster) -> float:
    """Return the seconds from the start of a process that leads until it serves."""
    began = time.monotonic()
    with extender(lab.kubeconfig):
        return time.monotonic() - began


async def prepare(lab: Cluster, before: int, count: int) -> None:
    """Create the nodes, and then more pods."""
    client = Client(from_kubeconfig(lab.kubeconfig))
    try:
        if not count:
            await make_nodes(client, NODES)
        await make_pods(client, count, "nobody", first=before)
    finally:
        client.close()


def main() -> None:
    """Measure, and print the table."""
    table, lab = Table(), cluster()
    alone = lab.folder.with_name("cluster-alone")
    alone.mkdir(exist_ok=True)
    before = 0
    with locked(alone):
        try:
            start(lab)
            asyncio.run(prepare(lab, 0, 0))
            for count in [int(argument) for argument in sys.argv[1:]] or PODS:
                asyncio.run(prepare(lab, before, count - before))
                before = count
                took_s = sorted(serves_after(lab) for _ in range(ROUNDS))
                table.add(
                    f"a new leader serves, {count:,} pods wait",
                    ", ".join(f"{seconds:.1f}" for seconds in took_s) + " s",
                )
        finally:
            lab.down()
    print(table.text())


if __name__ == "__main__":
    main()
