"""GpuNode on a real API server: the agent creates its own, updates its status, and applies its spec."""

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from lab.cluster.settings import NODE

from gpuvirt.cluster.client import Client, PatchType
from gpuvirt.cluster.failures import ApiError, ForbiddenError, RefusedError
from gpuvirt.cluster.kinds.gpunode import API_VERSION, GPU_NODES, KIND, GpuNode
from tests.cluster.apilab import ACCOUNT, NAMESPACE, ApiLab
from tests.cluster.clusterlab import LabNode, PodRequest

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

ROOT = Path(__file__).parent.parent.parent
WHOLE, HALF = "nvidia.com/TU104GL_TESLA_T4", "nvidia.com/GRID_T4-8Q"


def install_kind(node: LabNode) -> None:
    """Install the GpuNode kind, and wait until it is served."""
    node.kubectl("apply", "-f", str(ROOT / "deploy/gpunodes.yaml"))
    node.until(lambda: node.cluster.kubectl("get", "gpunodes").returncode == 0, lambda: "the kind is not served yet")


@contextmanager
def reporting(node: LabNode, config: str = "") -> Iterator["subprocess.Popen[str]"]:
    """Run an agent in a cluster with GpuNodes; yield the agent's process."""
    install_kind(node)
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
    with node.simulated_host("4xT4"), node.agent(config, asks) as agent, node.nodes_kept():
        yield agent


def row(node: LabNode) -> list[str]:
    """Return what `kubectl get gpunodes` prints of the node, without its age."""
    done = node.cluster.kubectl("get", "gpunodes", NODE, "--no-headers")
    return done.stdout.split()[:-1]


def ready_message(node: LabNode) -> str:
    """Return the message of the node's condition."""
    message = r'{.status.conditions[?(@.type=="Ready")].message}'
    return node.kubectl("get", "gpunode", NODE, "-o", f"jsonpath={message}")


def set_spec(node: LabNode, spec: str) -> None:
    node.kubectl("patch", "gpunode", NODE, "--type=merge", "-p", f'{{"spec": {spec}}}')


def test_an_agent_reports_its_gpunode_and_applies_its_spec(node: LabNode) -> None:
    with reporting(node):
        node.until(lambda: row(node) == [NODE, "4", "vgpu", "7", "0", "True", "Reconciled"], lambda: str(row(node)))
        set_spec(node, '{"mode": "passthrough"}')
        node.until_allocatable(WHOLE, 4)
        node.until(lambda: row(node)[2] == "passthrough", lambda: str(row(node)))
        node.start("keeps", PodRequest({WHOLE: 1}, "sleep 1000"))
        node.until(lambda: node.status("keeps").phase == "Running", lambda: str(node.status("keeps")))
        node.until(lambda: row(node)[4] == "1", lambda: str(row(node)))
        set_spec(node, '{"mode": "vgpu", "vgpuConfig": "T4-8Q"}')
        node.until_allocatable(HALF, 6)
        node.until(lambda: row(node)[5] == "False", lambda: str(row(node)))
        keeps = f"pod {node.namespace}/keeps"
        node.until(lambda: keeps in ready_message(node), lambda: ready_message(node))
        node.until(lambda: "ModeChanged" in node.kubectl("describe", "gpunode", NODE), lambda: "no event")
        node.delete("keeps")
        node.until_allocatable(HALF, 8)
        node.until(lambda: row(node) == [NODE, "4", "vgpu", "8", "0", "True", "Reconciled"], lambda: str(row(node)))
        mixed = '{"spec": {"gpus": [{"address": "0000:3b:00.0", "mode": "container"}]}}'
        refused = node.cluster.kubectl("patch", "gpunode", NODE, "--type=merge", "-p", mixed)
        assert "container and vgpu can't be on one node" in refused.stderr
        node.kubectl("delete", "gpunode", NODE)
        node.until(lambda: row(node)[:2] == [NODE, "4"], lambda: str(row(node)))
        assert node.allocatable(HALF) == 8, "the desired state is unchanged"
        assert "GPU" in node.kubectl("explain", "gpunode.status.gpus")


async def test_an_agent_may_write_only_its_own_gpunode(node: LabNode, tmp_path: Path) -> None:
    api = ApiLab(node.cluster, tmp_path)
    install_kind(node)
    api.apply_roles()
    account = ("get", "serviceaccount", ACCOUNT, "--namespace", NAMESPACE)
    node.until(lambda: node.cluster.kubectl(*account).returncode == 0, lambda: "no service account")
    api.token.write_text(api.token_of())
    client = Client(api.credentials)

    def new(name: str, **more: object) -> Mapping[str, object]:
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, **more}

    async def refusal(content: object) -> ApiError | None:
        try:
            await client.create(GPU_NODES, content, GpuNode)
        except ApiError as error:
            return error
        return None

    for content in (new("other"), new(NODE, spec={"mode": "vgpu"})):
        found = await refusal(content)
        while found is None or "gpuvirt's agent may" not in str(found):  # the admission policy is not in force yet
            node.kubectl("delete", "gpunodes", "--all")
            found = await refusal(content)
    owned = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": NODE, "finalizers": ["example.com/stay"]}}
    assert "may not set or change the finalizers or owners" in str(await refusal(owned))
    assert await refusal(new(NODE)) is None
    status = {"status": {"agent": "test"}}
    written = await client.patch(GPU_NODES, NODE, status, PatchType.MERGE, GpuNode, part="status")
    assert written.status is not None
    assert written.status.agent == "test"
    with pytest.raises(ForbiddenError):
        await client.patch(GPU_NODES, NODE, {"spec": {"mode": "vgpu"}}, PatchType.MERGE, GpuNode)
    node.cluster.kubectl(
        "create",
        "-f",
        "-",
        given=f'{{"apiVersion": "{API_VERSION}", "kind": "{KIND}", "metadata": {{"name": "other"}}}}',
    )
    with pytest.raises(RefusedError, match="only the GpuNode of its own node"):
        await client.patch(GPU_NODES, "other", status, PatchType.MERGE, GpuNode, part="status")
