"""GpuNode on a real API server: the agent creates its own, updates its status, and applies its spec."""

from pathlib import Path

import pytest
from lab.cluster.settings import NODE

from tests.cluster.clusterlab import LabNode, PodRequest
from tests.cluster.reportingagent import HALF, WHOLE, reporting, row, set_spec

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

ROOT = Path(__file__).parent.parent.parent


def ready_message(node: LabNode) -> str:
    """Return the message of the node's condition."""
    message = r'{.status.conditions[?(@.type=="Ready")].message}'
    return node.kubectl("get", "gpunode", NODE, "-o", f"jsonpath={message}")


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
