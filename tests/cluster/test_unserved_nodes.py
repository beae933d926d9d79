"""Nodes without operands on a real API server, in the ClusterPolicy's status and in `gpuvirt status`."""

import pytest
from lab.cluster.settings import NODE

from tests.cluster.clusterlab import LabNode
from tests.cluster.controllerlab import agents_parts
from tests.cluster.deployedagents import deploying

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

OPERANDS = "nvidia.com/gpu.deploy.operands"


def test_a_disabled_node_does_not_count_until_it_is_enabled_again(node: LabNode, image: None) -> None:  # noqa: ARG001
    with deploying(node) as cluster:
        cluster.until_reported("True Reconciled")
        cluster.label(f"{OPERANDS}=false")
        cluster.until_reported(f"True NoGPUNodes every node with GPUs is labelled {OPERANDS}=false: {NODE}")
        cluster.until_shown(["operands", "yes", "Off"])
        counts = ("get", "clusterpolicy", "cluster-policy", "-o", "jsonpath={.status.state} {.status.nodes}")
        none = 'ready {"claims":0,"container":0,"invalid":0,"onDemand":0,"ready":0,"shared":0,"total":0'
        assert node.kubectl(*counts).startswith(none)
        names = ("pods", ".items[*].metadata.name")
        node.until(lambda: cluster.get(*names) == "", lambda: cluster.get(*names))
        assert node.kubectl("get", "gpunode", NODE, "-o", "jsonpath={.status.totals.gpus}") == "2", (
            "the agent's last report"
        )
        cluster.label(f"{OPERANDS}-")
        cluster.until_reported("True Reconciled")

        # A missing agent on a node that needs one.
        node.kubectl("taint", "node", NODE, "only=others:NoExecute")
        try:
            cluster.until_reported(f"node {NODE}: PodMissing: DaemonSet gpuvirt-node has no pod on this node")
            cluster.until_shown(*agents_parts("PodMissing"))
        finally:
            node.kubectl("taint", "node", NODE, "only-")
        cluster.until_reported("True Reconciled")
