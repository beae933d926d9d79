"""A real node that becomes on-demand: what controller and agent write, KubeVirt's list, and a pod that ends."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from lab.cluster.kubevirtkinds import SOURCES
from lab.cluster.settings import NODE

from tests.cluster.clusterlab import LabNode, PodRequest
from tests.cluster.controllerlab import PRESENT, WORKLOAD, controlled
from tests.cluster.kubevirtadmin import Admin
from tests.cluster.kubevirtkinds import install

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

HALF, WHOLE = "tencent.com/vgpu-233", "tencent.com/vgpu-234"
TYPES = {
    "tencent.com/vgpu-230": "GRID T4-1Q",
    "tencent.com/vgpu-231": "GRID T4-2Q",
    "tencent.com/vgpu-232": "GRID T4-4Q",
    HALF: "GRID T4-8Q",
    WHOLE: "GRID T4-16Q",
}


FOUR_T4 = """
about: four T4 without vGPUs, so that nothing else was offered before
slots:
  - {at: "0000:3b:00.0", board: T4, group: 31}
  - {at: "0000:5e:00.0", board: T4, group: 32}
  - {at: "0000:86:00.0", board: T4, group: 33}
  - {at: "0000:af:00.0", board: T4, group: 34}
"""


@contextmanager
def on_demand(node: LabNode, host: Path) -> Iterator[Admin]:
    """Run a controller and an agent on a node with T4s in mode on-demand, in a cluster with KubeVirt's kinds."""
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
    with controlled(node) as cluster, node.simulated_host(str(host)), node.nodes_kept():
        install(node, next(iter(SOURCES)))
        with cluster.controller(), node.agent("", asks):
            cluster.apply_policy({})
            admin = Admin(cluster)
            admin.make({})
            cluster.label(f"{PRESENT}=true", f"{WORKLOAD}=on-demand")
            yield admin


def annotation(node: LabNode) -> Mapping[str, str]:
    text = node.kubectl("get", "node", NODE, "-o", r"jsonpath={.metadata.annotations.gpuvirt\.io/vgpu-types}")
    found: Mapping[str, str] = json.loads(text or "{}")
    return found


def gpu_node(node: LabNode, path: str) -> str:
    return node.kubectl("get", "gpunode", NODE, "-o", f"jsonpath={{{path}}}")


def type_changes(node: LabNode) -> str:
    """Return the messages of all events about resources that stand for another type than before."""
    chosen = ("--field-selector", "reason=ResourceTypeChanged", "-o", "jsonpath={.items[*].message}")
    return node.kubectl("get", "events", "--all-namespaces", *chosen)


def test_a_node_on_demand_offers_each_type_and_forgets_a_pod_that_ends(node: LabNode, tmp_path: Path) -> None:
    (tmp_path / "4xT4.yaml").write_text(FOUR_T4)
    with on_demand(node, tmp_path / "4xT4.yaml") as admin:
        admin.cluster.until_deployed(
            {"sandbox-device-plugin", "vgpu-manager", "sandbox-validator", "cc-manager", "client"}
        )
        assert gpu_node(node, ".spec.mode") == "on-demand"
        node.until_allocatable(HALF, 4)
        node.until(lambda: annotation(node) == TYPES, lambda: str(annotation(node)))
        listed = {name: (vgpu_type, True) for name, vgpu_type in TYPES.items()}
        node.until(lambda: admin.permitted() == listed, lambda: str(admin.permitted()))
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

        as_before = json.dumps({**TYPES, HALF: "GRID T4-4Q"})  # as a driver with other numbers would have left it
        node.kubectl("annotate", "node", NODE, "--overwrite", f"gpuvirt.io/vgpu-types={as_before}")
        node.until(lambda: f"{HALF} now stands for GRID T4-8Q" in type_changes(node), lambda: type_changes(node))
        node.until(lambda: annotation(node) == TYPES, lambda: str(annotation(node)))

        admin.cluster.label(f"{WORKLOAD}=vm-passthrough")
        node.until(lambda: annotation(node) == {}, lambda: str(annotation(node)))
