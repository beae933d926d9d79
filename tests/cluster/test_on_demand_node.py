"""A real node that becomes on-demand: what controller and agent write, KubeVirt's list, and a pod that ends."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from lab.cluster.kubevirtkinds import SOURCES
from lab.cluster.settings import NODE

from tests.cluster.clusterlab import LabNode, PodRequest
from tests.cluster.controllerlab import PRESENT, WORKLOAD, controlled
from tests.cluster.kubevirtkinds import install
from tests.cluster.test_controller_kubevirt import Admin

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

HALF, WHOLE = "tencent.com/vgpu-233", "tencent.com/vgpu-234"
TYPES = {
    "tencent.com/vgpu-230": "GRID T4-1Q",
    "tencent.com/vgpu-231": "GRID T4-2Q",
    "tencent.com/vgpu-232": "GRID T4-4Q",
    HALF: "GRID T4-8Q",
    WHOLE: "GRID T4-16Q",
}


@contextmanager
def on_demand(node: LabNode) -> Iterator[Admin]:
    """Run a controller and an agent on a node with T4s in mode on-demand, in a cluster with KubeVirt's kinds."""
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
    with controlled(node) as cluster, node.simulated_host("4xT4"), node.nodes_kept():
        install(node, next(iter(SOURCES)))
        with cluster.controller(), node.agent("", asks):
            cluster.apply_policy({})
            admin = Admin(cluster)
            admin.make({})
            node.kubectl("annotate", "node", NODE, f'gpuvirt.io/vgpu-types={{"{HALF}":"GRID T4-4Q"}}', "--overwrite")
            cluster.label(f"{PRESENT}=true", f"{WORKLOAD}=on-demand")
            yield admin


def annotation(node: LabNode) -> Mapping[str, str]:
    text = node.kubectl("get", "node", NODE, "-o", r"jsonpath={.metadata.annotations.gpuvirt\.io/vgpu-types}")
    found: Mapping[str, str] = json.loads(text or "{}")
    return found


def events(node: LabNode) -> str:
    chosen = "reason=ResourceTypeChanged,involvedObject.kind=GpuNode"
    path = "jsonpath={.items[*].message}"
    return node.kubectl("get", "events", "--namespace", "default", "--field-selector", chosen, "-o", path)


def gpu_node(node: LabNode, path: str) -> str:
    return node.kubectl("get", "gpunode", NODE, "-o", f"jsonpath={{{path}}}")


def test_a_node_on_demand_offers_each_type_and_forgets_a_pod_that_ends(node: LabNode) -> None:
    with on_demand(node) as admin:
        admin.cluster.until_deployed(
            {"sandbox-device-plugin", "vgpu-manager", "sandbox-validator", "cc-manager", "client"}
        )
        assert gpu_node(node, ".spec.mode") == "on-demand"
        node.until_allocatable(HALF, 4)
        node.until(lambda: annotation(node) == TYPES, lambda: str(annotation(node)))
        listed = {name: (vgpu_type, True) for name, vgpu_type in TYPES.items()}
        node.until(lambda: admin.permitted() == listed, lambda: str(admin.permitted()))
        node.until(lambda: f"{HALF} stands for GRID T4-8Q now" in events(node), lambda: events(node))
        assert "stood for GRID T4-4Q, which is tencent.com/vgpu-232 now" in events(node)
        assert gpu_node(node, ".status.resources[*].name").split() == sorted(TYPES)

        node.start("half", PodRequest({HALF: 1}, "env | grep PCI_RESOURCE; sleep 1000"))
        node.until(lambda: node.status("half").phase == "Running", lambda: str(node.status("half")))
        node.until_allocatable(WHOLE, 3)
        users = ".status.gpus[*].vgpus[*].users[*]"
        node.until(lambda: gpu_node(node, users) == f"pod {node.namespace}/half", lambda: gpu_node(node, users))
        assert annotation(node) == TYPES
        assert admin.permitted() == listed
        node.delete("half")
        node.until_allocatable(WHOLE, 4)
        node.until(lambda: not gpu_node(node, ".status.gpus[*].vgpus[*].id"), lambda: gpu_node(node, ".status.gpus"))

        admin.cluster.label(f"{WORKLOAD}=vm-passthrough")
        node.until(lambda: annotation(node) == {}, lambda: str(annotation(node)))
