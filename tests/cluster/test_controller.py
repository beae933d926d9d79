"""The controller on a real API server: labels decide the mode of a real node's GPUs, without losing VMs."""

import pytest
from lab.cluster.settings import NODE

from gpuvirt.kube.labels import SETS
from gpuvirt.model.desired.workload import Workload
from tests.cluster.clusterlab import LabNode, PodRequest
from tests.cluster.controllerlab import PRESENT, WORKLOAD, controlled

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

WHOLE, HALF = "nvidia.com/TU104GL_TESLA_T4", "nvidia.com/GRID_T4-8Q"
CONTAINER, PASSTHROUGH, VGPU = (
    set(SETS[workload]) for workload in (Workload.CONTAINER, Workload.PASSTHROUGH, Workload.VGPU)
)


def test_a_node_changes_to_its_labelled_workload_and_waits_for_vms(node: LabNode) -> None:
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
    with controlled(node) as cluster, cluster.controller(), node.simulated_host("4xT4"), node.nodes_kept():
        cluster.apply_policy({})
        cluster.until_reported("True NoGPUNodes")
        cluster.label(f"{PRESENT}=true")
        cluster.until_deployed(CONTAINER)
        cluster.label(f"{WORKLOAD}=vm-passthrough")
        cluster.until_deployed(PASSTHROUGH)
        cluster.until_reported(
            f"False ImageUnknown node {NODE}: ImageUnknown: the controller was started without the image"
        )
        assert "ImageUnknown" in cluster.status()
        with node.agent("", asks):
            node.until_allocatable(WHOLE, 4)
            cluster.until_reported("True Reconciled")
            node.start("keeps", PodRequest({WHOLE: 1}, "env | grep PCI_RESOURCE; sleep 1000"))
            mine = node.devices("keeps")
            cluster.label(f"{WORKLOAD}=vm-vgpu")
            cluster.until_deployed(VGPU)
            node.until_allocatable(HALF, 6)
            cluster.label("nvidia.com/vgpu.config=T4-4Q")
            node.until_allocatable("nvidia.com/GRID_T4-4Q", 12)
            cluster.until_reported(f"pod {node.namespace}/keeps")
            cluster.label(f"{WORKLOAD}=container")
            (gpu,) = mine
            cluster.until_reported(
                f"the node becomes container once these GPUs are free: {gpu} (passthrough, used by pod"
            )
            node.until_allocatable("nvidia.com/GRID_T4-4Q", 0)
            assert cluster.deployed() == VGPU, "a container driver would unbind the VM's GPU"
            assert node.devices("keeps") == mine
            assert "Draining" in node.kubectl("describe", "node", NODE)
            node.delete("keeps")
            cluster.until_deployed(CONTAINER)
            cluster.until_reported("False ImageUnknown")
            assert "gpuvirt.io/node" not in cluster.labels()


def test_vgpu_counts_of_the_gpu_operators_guide(node: LabNode) -> None:
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
    with controlled(node) as cluster, cluster.controller(), node.simulated_host("2xA10-sriov"), node.nodes_kept():
        cluster.apply_policy({})
        cluster.label(f"{PRESENT}=true", f"{WORKLOAD}=vm-vgpu")
        with node.agent("", asks):
            node.until_allocatable("nvidia.com/NVIDIA_A10-12Q", 4)
            cluster.label("nvidia.com/vgpu.config=A10-4Q")
            node.until_allocatable("nvidia.com/NVIDIA_A10-4Q", 12)
            cluster.until_reported("True Reconciled")
