"""Counts the requests and connections of a controller at the API server: at its start, left alone, for a changed node.

The API server is simulated, with streaming lists. The cluster has nodes with GPUs, their GpuNodes, and no KubeVirt. The
controller holds its lease, and does not know gpuvirt's image, so it deploys nothing.

    .venv/bin/python -m bench.controllerrequests --nodes 100 --minutes 10
"""

import argparse
import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tests.agent.kubelet.kubeletnode import CLOCK
from tests.controller.observedcluster import ALL_ON, SETTINGS, node
from tests.controller.servedcluster import ServedCluster, serving
from tests.kube.scriptedapi import ScriptedApi
from tests.web.certificates import Authority

from bench.clusternodes import name_of
from gpuvirt.controller.process import ControllerOptions, ControllerProcess
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.election import CONTROLLER_LEASE
from gpuvirt.kube.kinds.clusterpolicy import CLUSTER_POLICIES
from gpuvirt.kube.resources import NODES
from gpuvirt.model.desired.workload import LABEL, Workload

SETTLED_S = 10.0
"""How long no more requests but those for the lease come until the controller counts as settled."""


@dataclass
class Counted:
    """The API server's counts since the last line, without the requests for the lease, which are counted apart."""

    api: ScriptedApi
    requests: int = 0
    leases: int = 0
    opened: int = 0

    def line(self, what: str, hours: float = 1.0) -> str:
        """Return a row of the table, in units of an hour where one is given, and count from 0 on."""
        all_leases = sum(self._is_lease(call.path) for call in self.api.calls)
        all_requests = len(self.api.calls) - all_leases
        counts = all_requests - self.requests, all_leases - self.leases, self.api.opened - self.opened
        self.requests, self.leases, self.opened = all_requests, all_leases, self.api.opened
        open_now = sum(not writer.is_closing() for writer in self.api.connections)
        cells = (*(f"{count / hours:.0f}" for count in counts), str(open_now))
        return f"| {what} | {' | '.join(cells)} |"

    async def settled(self) -> None:
        """Wait until the controller makes no more requests."""
        before = -1
        while before != (now := sum(not self._is_lease(call.path) for call in self.api.calls)):
            before = now
            await CLOCK.sleep(SETTLED_S)

    def _is_lease(self, path: str) -> bool:
        return path.endswith((f"/leases/{CONTROLLER_LEASE}", f"/namespaces/{SETTINGS.namespace}/leases"))


async def measure(folder: Path, nodes: int, minutes: float) -> None:
    """Run the controller, and print the counts."""
    authority, cluster = Authority(folder), ServedCluster()
    cluster.put(CLUSTER_POLICIES, {"metadata": {"name": "cluster-policy", "generation": 1}, "spec": ALL_ON})
    for number in range(nodes):
        cluster.put(NODES, msgspec.to_builtins(node(str(Workload.VGPU), name_of(number))))
    async with serving(cluster, authority, authority.server("api", alternatives="IP:127.0.0.1")) as api:
        credentials = Credentials("127.0.0.1", api.port, "gpu-operator", ca=authority.certificate, token=b"x")
        running = asyncio.create_task(ControllerProcess(ControllerOptions(credentials, SETTINGS)).run())
        counted = Counted(api)
        print("| | requests | for the lease | new connections | open at the end |\n|---|---|---|---|---|")
        await counted.settled()
        print(counted.line("start"), flush=True)
        await CLOCK.sleep(minutes * 60)
        print(counted.line("an hour left alone", minutes / 60), flush=True)
        cluster.patch(NODES, name_of(0), {"metadata": {"labels": {LABEL: str(Workload.PASSTHROUGH)}}})
        await counted.settled()
        print(counted.line("another workload of a node"), flush=True)
        api.close_connections()
        await counted.settled()
        print(counted.line("all connections closed"))
        running.cancel()


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.controllerrequests", description=__doc__)
    parser.add_argument("--nodes", type=int, default=100, help="nodes with GPUs")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the controller is left alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), arguments.nodes, arguments.minutes))


if __name__ == "__main__":
    main()
