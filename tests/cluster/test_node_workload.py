"""One real node changes from whole GPUs to vGPUs to containers, while a pod keeps its GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from lab.cluster.settings import NODE

from tests.cluster.clusterlab import LabNode, PodRequest
from tests.cluster.nodeworkload import REASON, is_for, node_key, until
from tests.cluster.reportingagent import HALF, WHOLE

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]


@contextmanager
def following(node: LabNode) -> Iterator[None]:
    """Run an agent that follows the node's label."""
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
    with node.simulated_host("4xT4"), node.agent("workload_label: true", asks), node.nodes_kept():
        yield


def test_a_node_changes_its_workload_and_a_pod_keeps_its_gpu(node: LabNode) -> None:
    with following(node):
        is_for(node, "vm-passthrough")
        node.until_allocatable(WHOLE, 4)
        until(node, "success")
        node.start("keeps", PodRequest({WHOLE: 1}, "env | grep PCI_RESOURCE; sleep 1000"))
        mine = node.devices("keeps")
        is_for(node, "vm-vgpu")
        node.until_allocatable(HALF, 6)
        until(node, "pending")
        keeps = f"pod {node.namespace}/keeps"
        node.until(
            lambda: keeps in node_key(node, "annotations", REASON), lambda: node_key(node, "annotations", REASON)
        )
        assert node.status("keeps").phase == "Running"
        assert node.devices("keeps") == mine
        node.delete("keeps")
        node.until_allocatable(HALF, 8)
        until(node, "success")
        node.run("half", PodRequest({HALF: 1}, "true"))
        is_for(node, "kata")
        until(node, "failed")
        node.until(
            lambda: "'kata'" in node_key(node, "annotations", REASON), lambda: node_key(node, "annotations", REASON)
        )
        node.until_allocatable(HALF, 8)
        is_for(node, "container")
        node.until_allocatable(HALF, 0)
        until(node, "success")
        is_for(node, "vm-passthrough")
        node.until_allocatable(WHOLE, 4)
