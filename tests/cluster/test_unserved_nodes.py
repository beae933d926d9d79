"""Nodes without operands on a real API server, in the ClusterPolicy's status and in `gpuvirt status`."""

import pytest
from lab.cluster.settings import NODE

from tests.cluster.clusterlab import LabNode
from tests.cluster.controllerlab import PRESENT, WORKLOAD, ControlledNode, controlled
from tests.cluster.test_controller_deploys import IMAGE, deploying

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

OPERANDS = "nvidia.com/gpu.deploy.operands"
OURS = ("--image", IMAGE, "--image-pull-policy", "Never")


def until_shown(cluster: ControlledNode, *expected: list[str]) -> None:
    """Wait until `gpuvirt status` shows exactly these components, their readiness and their states."""
    cluster.node.until(lambda: cluster.components() == list(expected), cluster.status)


def agents_parts(state: str) -> list[list[str]]:
    parts = ("sandbox-device-plugin", "sandbox-validator", "vgpu-device-manager")
    return [[part, "no", state] for part in parts]


def test_a_disabled_node_does_not_count_until_it_is_enabled_again(node: LabNode, image: None) -> None:  # noqa: ARG001
    with deploying(node) as cluster:
        cluster.until_reported("True Reconciled")
        cluster.label(f"{OPERANDS}=false")
        cluster.until_reported(f"True NoGPUNodes every node with GPUs is labelled {OPERANDS}=false: {NODE}")
        until_shown(cluster, ["operands", "yes", "Off"])
        counts = ("get", "clusterpolicy", "cluster-policy", "-o", "jsonpath={.status.state} {.status.nodes}")
        none = 'ready {"container":0,"invalid":0,"onDemand":0,"ready":0,"shared":0,"total":0'
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
            until_shown(cluster, *agents_parts("PodMissing"))
        finally:
            node.kubectl("taint", "node", NODE, "only-")
        cluster.until_reported("True Reconciled")


def test_a_controller_without_an_image_is_reported_by_all_outlets(node: LabNode) -> None:
    log = node.cluster.folder / "log/controller.log"
    with controlled(node) as cluster, node.nodes_kept():
        written = len(log.read_bytes()) if log.exists() else 0
        with cluster.controller():
            cluster.apply_policy({})
            cluster.label(f"{PRESENT}=true", f"{WORKLOAD}=vm-vgpu")
            cluster.until_reported(
                f"False ImageUnknown node {NODE}: ImageUnknown: the controller was started without the image"
            )
            assert "--image or GPUVIRT_IMAGE" in cluster.reported()
            until_shown(cluster, *agents_parts("ImageUnknown"))
            reported = log.read_bytes()[written:].decode()
            assert "gpuvirt's own image is not known, so this controller deploys nothing" in reported
            assert "is notReady: ImageUnknown" in reported
            cluster.label(f"{OPERANDS}=false")
            cluster.until_reported("True NoGPUNodes every node with GPUs")
            cluster.label(f"{OPERANDS}-", f"{WORKLOAD}=container")
            cluster.until_reported("False ImageUnknown")
            until_shown(cluster, ["device-plugin", "no", "ImageUnknown"], ["driver", "no", "OsUnknown"])


def test_an_unrenderable_driver_and_disabled_components_are_reported(node: LabNode) -> None:
    manager = {"enabled": True, "repository": "registry.example", "image": "vgpu-manager", "version": "1"}
    off = {name: {"enabled": False} for name in ("driver", "toolkit", "devicePlugin", "dcgm", "dcgmExporter", "gfd")}
    with controlled(node) as cluster, node.nodes_kept():
        cluster.apply_agent_access()
        with cluster.controller(*OURS):
            cluster.apply_policy({**off, "vgpuManager": manager})
            cluster.label(f"{PRESENT}=true", f"{WORKLOAD}=container")
            cluster.until_reported(f"node {NODE}: ComponentsOff: driver, container-toolkit, device-plugin")
            shown = ["device-plugin", "no", "ComponentsOff"]
            node.until(lambda: shown in cluster.components(), cluster.status)
            cluster.label(f"{WORKLOAD}=vm-vgpu")
            lacking = ["vgpu-manager", "no", "OsUnknown"]
            node.until(lambda: lacking in cluster.components(), cluster.status)
            cluster.label("gpuvirt.io/os=ubuntu22.04")
            driver = "daemonset/nvidia-vgpu-manager-daemonset-ubuntu22.04"
            node.until(lambda: cluster.get(driver, ".metadata.name") != "", lambda: cluster.get("daemonsets", ".items"))
            assert lacking not in cluster.components()
