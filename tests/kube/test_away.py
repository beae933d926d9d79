"""Without an API server the agent does everything else and reports the problem."""

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpuvirt.agent.agent import Agent
from gpuvirt.agent.cluster.clusterside import ClusterSide
from gpuvirt.agent.known.requests import AllocationRequest
from gpuvirt.agent.process import ClusterTask
from gpuvirt.clock import Clock
from gpuvirt.facts.ids import ConfigMapName, DeviceId, NodeName, ResourceName
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import UnreachableError
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.resources import NODES, Collection
from gpuvirt.model.desired.observed import NodeRequest, Observed, Progress, StateName
from gpuvirt.model.reasons import ReasonCode
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kubelet.kubelet import running
from tests.agent.kubelet.kubeletnode import CLOCK, Cluster, agent_on, in_cluster, options_for, until

A10 = ResourceName("nvidia.com/GA102GL_A10")
NODES_OF = Collection(NODES, Node, "node01")


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[Credentials]:
    """Serve a fixed response to each connection and close it; return its credentials."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Credentials("127.0.0.1", server.sockets[0].getsockname()[1], "default", token=b"x")
    finally:
        server.close()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n\r\n{}", b"\x16\x03\x01"])
async def test_a_server_without_tls_is_unreachable(answer: bytes) -> None:
    async with answering(answer) as credentials:
        with pytest.raises(UnreachableError, match=f"https://127.0.0.1:{credentials.port}: "):
            await Client(credentials).list(NODES_OF)


async def test_a_closed_port_and_missing_files_are_unreachable(tmp_path: Path) -> None:
    credentials = Credentials("127.0.0.1", closed_port(), "default", token=b"x")
    with pytest.raises(UnreachableError, match="Connect call failed"):
        await Client(credentials).list(NODES_OF)
    with pytest.raises(UnreachableError, match="No such file"):
        await Client(dataclasses.replace(credentials, ca=tmp_path / "ca.crt")).list(NODES_OF)
    (tmp_path / "ca.crt").write_text("")
    with pytest.raises(UnreachableError, match="no certificate in"):
        await Client(dataclasses.replace(credentials, ca=tmp_path / "ca.crt")).list(NODES_OF)


@asynccontextmanager
async def node_beside(cluster: ClusterTask, folder: Path) -> AsyncIterator[Cluster]:
    """Run an agent with an API server task, and a kubelet."""
    kernel = build_host(load_host("2xA10"))
    options = in_cluster(options_for(kernel, folder))
    async with running(folder, CLOCK) as kubelet, agent_on(options, cluster) as agent:
        yield Cluster(kernel, kubelet, agent)


async def test_pods_get_gpus_while_no_api_server_answers(short_path: Path) -> None:
    credentials = Credentials("127.0.0.1", closed_port(), "gpuvirt", token=b"x")
    side = ClusterSide(credentials, NodeName("node01"), ConfigMapName("configs"))
    async with node_beside(side.run, short_path) as node:
        node.agent.observations.take_request(NodeRequest(config=Observed("A10-4Q")))
        node.agent.reports.vgpus.set(Progress(StateName.PENDING))
        await node.until_registered()
        await until(lambda: ReasonCode.API_SERVER_AWAY in {note.code for note in node.view.problems})
        assert await node.agent.allocators.existing.allocate(AllocationRequest(A10, [[DeviceId("0000:65:00.0")]]))
        assert node.agent.observations.desired == NodeRequest(config=Observed("A10-4Q")), (
            "an unreachable API server removes no device"
        )


async def test_a_failing_api_server_task_is_restarted_and_the_agent_goes_on(short_path: Path) -> None:
    starts = 0

    async def fails(agent: Agent, clock: Clock) -> None:  # noqa: ARG001
        nonlocal starts
        starts += 1
        raise RuntimeError("a fault of ours")

    async with node_beside(fails, short_path) as node:
        await node.until_registered()
        await until(lambda: starts >= 2)
        assert await node.agent.allocators.existing.allocate(AllocationRequest(A10, [[DeviceId("0000:65:00.0")]]))
