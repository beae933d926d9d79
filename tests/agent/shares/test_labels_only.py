"""The agent that only labels its node: it observes, writes one label at the API server, and touches nothing else."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.agent.agent import Agent
from gpuvirt.agent.cluster.clusterside import ClusterSide
from gpuvirt.agent.options import NodeOptions
from gpuvirt.agent.process import ClusterTask, run
from gpuvirt.cli.services.node import labelling_agent
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings, ShareSettings
from gpuvirt.paths import HostRoots, KubeletPaths
from gpuvirt.shares.nodekeys import OWNED_ANNOTATION
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from tests.agent.kubelet.kubeletnode import FAST, until
from tests.kube.scriptedapi import Call, Reply, ScriptedApi, scripted
from tests.web.certificates import Authority, Pair

NODES = "/api/v1/nodes"


class NodeApi:
    """An API server with one node, which keeps labels and annotations."""

    def __init__(self) -> None:
        self.metadata: dict[str, object] = {"name": "node01", "resourceVersion": "1", "labels": {}, "annotations": {}}
        self.patches: list[dict[str, dict[str, str | None]]] = []

    @property
    def node(self) -> dict[str, object]:
        return {"metadata": self.metadata, "status": {"nodeInfo": {"containerRuntimeVersion": "containerd://2.1.3"}}}

    def answer(self, call: Call) -> Reply:
        if call.method == "GET":
            items = {"metadata": {"resourceVersion": "1"}, "items": [self.node]}
            return 200, _silence() if "watch=1" in call.target else items
        self.patches.append(json.loads(call.body)["metadata"])
        self.metadata = {**self.metadata, **self.patches[-1], "resourceVersion": str(len(self.patches) + 1)}
        return 200, self.node


async def _silence() -> AsyncIterator[object]:
    await asyncio.get_running_loop().create_future()
    yield {}


def labelling(
    kernel: SimKernel, folder: Path, settings: Settings, port: int, authority: Authority
) -> tuple[NodeOptions, ClusterTask]:
    """Return the agent of `--labels-only` on a simulated host; its own folder is `own`."""
    credentials = Credentials("127.0.0.1", port, "gpuvirt", ca=authority.certificate, token=b"x")
    side = ClusterSide(credentials, NodeName("node01"), None, gpu_nodes=False, labels_only=True)
    options = labelling_agent(HostRoots.under(folder / "host"), settings)
    own = folder / "own/ledger.json"
    return replace(options, kernel=kernel, kubelet=KubeletPaths(folder), ledger=own, intervals=FAST), side.run


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@asynccontextmanager
async def agent_of(options: NodeOptions, cluster: ClusterTask) -> AsyncIterator[Agent]:
    agents: list[Agent] = []
    async with asyncio.TaskGroup() as group:
        task = group.create_task(run(options, cluster, started=agents.append))
        await until(lambda: bool(agents) and agents[0].host_observed)
        yield agents[0]
        task.cancel()


@asynccontextmanager
async def labelled(
    host: str, folder: Path, settings: Settings, server: Pair, authority: Authority
) -> AsyncIterator[tuple[NodeApi, ScriptedApi, SimKernel]]:
    api, kernel = NodeApi(), build_host(load_host(host), where=host)
    async with (
        scripted(api.answer, server, authority.certificate) as served,
        agent_of(*labelling(kernel, folder, settings, served.port, authority)),
    ):
        yield api, served, kernel


@pytest.mark.parametrize("mode", [DesiredMode.UNMANAGED, DesiredMode.VGPU, DesiredMode.SHARED])
async def test_it_writes_the_label_of_the_vgpu_type_and_nothing_else(
    short_path: Path, server: Pair, authority: Authority, mode: DesiredMode
) -> None:
    settings = Settings(mode=mode, shares=ShareSettings(vgpu_type_labels=("vgpu.type", "virtual.gpu.type")))
    async with labelled("vm-V100-8Q", short_path, settings, server, authority) as (api, served, kernel):
        await until(lambda: bool(api.patches))
        await asyncio.sleep(0.3)  # noqa: TID251  many of the agent's rounds
        types = {"vgpu.type": "v100-8q-8GB", "virtual.gpu.type": "v100-8q-8GB"}
        assert [patch.get("labels") for patch in api.patches] == [types]
        assert [list(patch["annotations"]) for patch in api.patches] == [[OWNED_ANNOTATION]]
        assert {call.path for call in served.calls} == {NODES, f"{NODES}/node01"}, "neither GpuNodes, nor pods"
        assert not kernel.writes
        assert files(short_path) <= {"own"}, "no socket, no CDI spec, no lock"


async def test_it_labels_no_node_with_whole_gpus_and_changes_no_driver(
    short_path: Path, server: Pair, authority: Authority
) -> None:
    async with labelled("4xT4", short_path, Settings(), server, authority) as (api, _, kernel):
        before = {address: function.driver for address, function in kernel.pci.functions.items()}
        await asyncio.sleep(0.3)  # noqa: TID251  many of the agent's rounds
        assert api.patches == []
        assert {address: function.driver for address, function in kernel.pci.functions.items()} == before
