"""Counts the requests and connections of one agent at the API server: at its start, left alone, for a label's change.

The agent of a simulated host with two GPUs follows its node, its GpuNode and the ConfigMap, as on a node of the chart.
The API server is simulated: it streams lists, ends watches when the agent asked for it, and keeps connections.
After the label's change, the agent withdraws its GPUs, and then waits for the kubelet.

    .venv/bin/python -m bench.agentrequests --minutes 20
"""

import argparse
import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs

import msgspec
from msgspec.structs import replace
from tests.agent.kubelet.kubeletnode import CLOCK, Cluster, agent_on, in_cluster, options_for
from tests.kube.mergepatch import merged_of
from tests.kube.scriptedapi import NOT_FOUND, Call, Reply, ScriptedApi, scripted
from tests.web.certificates import Authority

from gpuvirt.agent.cluster.clusterside import ClusterSide
from gpuvirt.facts.ids import ConfigMapName, NodeName
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.desired.workload import LABEL as WORKLOAD_LABEL
from gpuvirt.model.desired.workload import Workload
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kubelet.kubelet import running

NODE = "node01"
SETTLED_S = 10.0
"""How long no more requests come until the agent counts as settled."""

Object = dict[str, object]


class OneNode:
    """An API server with a node and its GpuNode, and no ConfigMap."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {"nodes": {}, "gpunodes": {}, "configmaps": {}}
        self._version = 1
        self._changed = asyncio.Event()
        for kind in ("nodes", "gpunodes"):
            self.change(kind, {"metadata": {"name": NODE, "uid": kind}})

    def change(self, kind: str, patch: Object) -> None:
        """Merge a patch into the object of a kind."""
        self._version += 1
        version: Object = {"metadata": {"resourceVersion": str(self._version)}}
        self.objects[kind] = merged_of(merged_of(self.objects[kind], patch), version)
        self._changed.set()
        self._changed = asyncio.Event()

    def answer(self, call: Call) -> Reply:
        """Answer a request."""
        kind = next((kind for kind in self.objects if f"/{kind}" in call.path), None)
        if kind is None:
            return NOT_FOUND
        if call.method == "PATCH":
            self.change(kind, msgspec.json.decode(call.body, type=dict[str, object]))
        if "watch=1" in call.target:
            return 200, self._events(kind, parse_qs(call.target.partition("?")[2]))
        return 200, self.objects[kind]

    async def _events(self, kind: str, query: dict[str, list[str]]) -> AsyncIterator[object]:
        """Yield the events of a kind until the time that the client asks for."""
        shown = self.objects[kind]
        if "sendInitialEvents" in query:
            if shown:
                yield {"type": "ADDED", "object": shown}
            yield self._bookmark({"k8s.io/initial-events-end": "true"})
        deadline_s = CLOCK.monotonic_s() + int(query["timeoutSeconds"][0])
        while (left_s := deadline_s - CLOCK.monotonic_s()) > 0:
            changed = self._changed
            if self.objects[kind] is not shown:
                shown = self.objects[kind]
                yield {"type": "MODIFIED", "object": shown}
            try:
                async with asyncio.timeout(left_s):
                    await changed.wait()
            except TimeoutError:
                yield self._bookmark({})

    def _bookmark(self, annotations: dict[str, str]) -> object:
        metadata = {"resourceVersion": str(self._version), "annotations": annotations}
        return {"type": "BOOKMARK", "object": {"metadata": metadata}}


@dataclass
class Counted:
    """The API server's counts since the last line."""

    api: ScriptedApi
    requests: int = 0
    opened: int = 0

    def line(self, what: str, hours: float = 1.0) -> str:
        """Return a row of the table, in units of an hour where one is given, and count from 0 on."""
        requests, opened = len(self.api.calls) - self.requests, self.api.opened - self.opened
        self.requests, self.opened = len(self.api.calls), self.api.opened
        return f"| {what} | {requests / hours:.3g} | {opened / hours:.3g} | {len(self.api.connections)} |"

    async def settled(self) -> None:
        """Wait until the agent makes no more requests."""
        before = -1
        while before != len(self.api.calls):
            before = len(self.api.calls)
            await CLOCK.sleep(SETTLED_S)


async def measure(folder: Path, minutes: float) -> None:
    """Run the agent, and print the counts."""
    authority = Authority(folder)
    node = OneNode()
    async with scripted(
        node.answer, authority.server("api", alternatives="IP:127.0.0.1"), authority.certificate
    ) as api:
        api.streams = api.ends_watches = True
        credentials = Credentials("127.0.0.1", api.port, "gpu-operator", ca=authority.certificate, token=b"x")
        side = ClusterSide(credentials, NodeName(NODE), ConfigMapName("configs"))
        kernel = build_host(load_host("2xA10"))
        options = replace(
            in_cluster(options_for(kernel, folder, Settings(workload_label=True))), node_name=NodeName(NODE)
        )
        async with running(folder, CLOCK) as kubelet, agent_on(options, side.run) as agent:
            await Cluster(kernel, kubelet, agent).until_registered()
            counted = Counted(api)
            print("| | requests | new connections | open at the end |\n|---|---|---|---|")
            await counted.settled()
            print(counted.line("start"), flush=True)
            await CLOCK.sleep(minutes * 60)
            print(counted.line("an hour left alone", minutes / 60), flush=True)
            node.change("nodes", {"metadata": {"labels": {WORKLOAD_LABEL: str(Workload.VGPU)}}})
            await counted.settled()
            print(counted.line("another workload, devices withdrawn"))


@contextmanager
def short_folder() -> Iterator[Path]:
    """Provide a folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="gvb-", dir="/tmp") as folder:
        yield Path(folder)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.agentrequests", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long the agent is left alone")
    arguments = parser.parse_args()
    with short_folder() as folder:
        asyncio.run(measure(folder, arguments.minutes))


if __name__ == "__main__":
    main()
