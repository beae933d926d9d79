"""The agent's client of the API server beside a kubelet, which reports the node, too."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from lab.cluster.cluster import Cluster

from gpuvirt.agent.store import agentstate
from gpuvirt.facts.ids import ResourceName
from gpuvirt.kube.client import Client
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.labels import CONFIG_LABEL
from gpuvirt.kube.resources import NODES, Collection
from gpuvirt.kube.watchevents import EventType
from gpuvirt.loops.cell import Cell
from gpuvirt.model.desired.observed import ConfigText, NodeRequest, Observed
from gpuvirt.model.offers.notice import Count
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import ReasonCode
from tests.cluster.apilab import (
    MAPS,
    NAMESPACE,
    NODE,
    ApiLab,
    Listener,
    agents_api,
    following,
    until,
)
from tests.cluster.clusterlab import LabNode

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

WHERE = f"ConfigMap {NAMESPACE}/{MAPS}, key config.yaml"
SOON_S = 10.0
"""Sooner than anything is looked at again that no watch tells of, and later than a busy host takes."""
A10 = "nvidia.com/GA102GL_A10"


@pytest.fixture
def api(lab: Cluster, tmp_path: Path) -> ApiLab:
    return agents_api(lab, tmp_path)


async def test_a_watch_ends_after_its_timeout(api: ApiLab) -> None:
    client, nodes = Client(api.credentials), Collection(NODES, Node, NODE)
    listed = await client.list(nodes)
    async with client.watch(nodes, listed.version, for_s=2) as events:
        seen = [event.type async for together in events for event in together]
    assert seen, "the lab's kubelet reports each second"
    assert set(seen) <= {EventType.MODIFIED, EventType.BOOKMARK}


async def test_resource_counts_are_written_before_the_kubelets_next_report(api: ApiLab) -> None:
    counts: Cell[Mapping[ResourceName, Count]] = Cell({})
    agent = Listener(node_counts=counts)
    name = ResourceName("example.com/gpu")

    def reported() -> str:
        """The count in the Node's status; the kubelet removes counts without a plugin."""
        return api.node_field(r".status.allocatable.example\.com/gpu") or "0"

    async with following(api.credentials, agent):
        counts.set({name: Count(2, 2)})
        await until(lambda: reported() == "2", lambda: agent, SOON_S)
        counts.set({name: Count(0, 0)})
        await until(lambda: reported() == "0", lambda: agent, SOON_S)
        report = '{"status": {"allocatable": {"example.com/gpu": "2"}}}'
        api.kubectl("patch", "node", NODE, "--subresource=status", "--type=merge", "-p", report)
        await until(lambda: reported() == "0", lambda: agent, SOON_S)
        assert agent.problems == {}


def kubeconfig(api: ApiLab, folder: Path) -> Path:
    """The agent's credentials as a file."""
    path = folder / "kubeconfig"
    path.write_text(f"""apiVersion: v1
kind: Config
clusters: [{{name: lab, cluster: {{server: "{api.cluster.server}",
  certificate-authority: {api.ca}}}}}]
users: [{{name: agent, user: {{tokenFile: {api.token}}}}}]
contexts: [{{name: lab, context: {{cluster: lab, user: agent, namespace: {NAMESPACE}}}}}]
current-context: lab
""")
    return path


def test_a_restarted_agent_keeps_the_desired_state_it_observed(node: LabNode, api: ApiLab, tmp_path: Path) -> None:
    options = ("--node-name", NODE, "--kubeconfig", str(kubeconfig(api, tmp_path)))
    api.label(f"{CONFIG_LABEL}=A10-4Q")
    api.set_configs("version: v1")
    desired = NodeRequest(
        Observed("A10-4Q"),
        Observed(ConfigText("version: v1", WHERE)),
        Observed(None),
        Observed(None),
        Observed(None),
    )

    def kept(host: Path) -> NodeRequest | None:
        path = host / "var/lib/gpuvirt/desired.json"
        return agentstate.DESIRED.decode(path.read_bytes()).value.vgpu if path.exists() else None

    with node.simulated_host("2xA10") as host:
        with node.agent(options=options):
            node.until(lambda: kept(host) == desired, lambda: str(kept(host)))
            node.until_allocatable(A10, 2)
        api.cluster.stop("apiserver")
        try:
            with node.agent(options=options):
                node.until(lambda: ReasonCode.API_SERVER_AWAY in notes(host), lambda: str(notes(host)))
                assert kept(host) == desired
        finally:
            api.cluster.restart_after_outage()


def notes(host: Path) -> set[ReasonCode]:
    """The problems that the agent reports for the node."""
    path = host / "run/gpuvirt/node.json"
    return (
        {note.code for note in msgspec.json.decode(path.read_bytes(), type=NodeView).problems}
        if path.exists()
        else set()
    )
