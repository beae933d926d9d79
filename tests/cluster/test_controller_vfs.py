"""The vGPU driver's label on a real API server: it stays until vGPUs and VFs are removed, and is restored with them."""

import pytest
from lab.cluster.settings import NODE

from gpuvirt.kube.labels import SETS
from gpuvirt.model.desired.workload import Workload
from tests.cluster.clusterlab import LabNode
from tests.cluster.controllerlab import PRESENT, WORKLOAD, controlled

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

VGPU, PASSTHROUGH = set(SETS[Workload.VGPU]), set(SETS[Workload.PASSTHROUGH])
HALF, WHOLE = "nvidia.com/NVIDIA_A10-12Q", "nvidia.com/TU104GL_TESLA_T4"
READY = '{range .status.conditions[?(@.type=="Ready")]}{.reason} {.message}{end}'
TRIES = 40


def vgpus(node: LabNode) -> dict[str, int]:
    """Return the existing vGPUs, each with an identity that differs for a later vGPU of the same id."""
    return {path.name: path.stat().st_ino for path in (node.host / "sys/bus/mdev/devices").iterdir()}


def gpus(node: LabNode, field: str) -> set[str]:
    return set(node.kubectl("get", "gpunode", NODE, "-o", f"jsonpath={{.status.gpus[*].{field}}}").split())


def test_without_sriov_manage_vgpus_and_the_vgpu_driver_stay(node: LabNode) -> None:
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
    with controlled(node) as cluster, cluster.controller(), node.simulated_host("2xA10-sriov"), node.nodes_kept():
        cluster.apply_policy({})
        cluster.label(f"{PRESENT}=true", f"{WORKLOAD}=vm-vgpu")
        with node.agent("", asks):
            node.until_allocatable(HALF, 4)
            existing = vgpus(node)
            node.until(lambda: gpus(node, "vfs") == {"32"}, lambda: str(gpus(node, "vfs")))
            cluster.label(f"{WORKLOAD}=vm-passthrough")
            cluster.until_reported("needs sriov-manage, which is not installed")
            node.until_allocatable(HALF, 0)
            for _ in range(TRIES):
                assert vgpus(node) == existing
                assert cluster.deployed() == VGPU
            why = node.kubectl("get", "gpunode", NODE, "-o", f"jsonpath={READY}")
            assert "PrerequisiteMissing" in why
            cluster.label(f"{WORKLOAD}=vm-vgpu")
            node.until_allocatable(HALF, 4)
            assert vgpus(node) == existing
