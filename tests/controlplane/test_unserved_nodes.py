"""Nodes without operands on a real API server, in the ClusterPolicy's status and in `gpuvirt status`."""

import pytest
from lab.cluster.settings import NODE

from tests.cluster.controllerlab import PRESENT, WORKLOAD, agents_parts, controlled
from tests.cluster.deployedagents import IMAGE
from tests.cluster.labnamespace import LabNamespace

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

OPERANDS = "nvidia.com/gpu.deploy.operands"
OURS = ("--image", IMAGE, "--image-pull-policy", "Never")


def test_a_controller_without_an_image_is_reported_by_all_outlets(node: LabNamespace) -> None:
    log = node.cluster.folder / "log/controller.log"
    with controlled(node) as cluster:
        written = len(log.read_bytes()) if log.exists() else 0
        with cluster.controller():
            cluster.apply_policy({})
            cluster.label(f"{PRESENT}=true", f"{WORKLOAD}=vm-vgpu")
            cluster.until_reported(
                f"False ImageUnknown node {NODE}: ImageUnknown: the controller was started without the image"
            )
            assert "--image or GPUVIRT_IMAGE" in cluster.reported()
            cluster.until_shown(*agents_parts("ImageUnknown"))
            reported = log.read_bytes()[written:].decode()
            assert "gpuvirt's own image is not known, so this controller deploys nothing" in reported
            assert "is notReady: ImageUnknown" in reported
            cluster.label(f"{OPERANDS}=false")
            cluster.until_reported("True NoGPUNodes every node with GPUs")
            cluster.label(f"{OPERANDS}-", f"{WORKLOAD}=container")
            cluster.until_reported("False ImageUnknown")
            cluster.until_shown(["device-plugin", "no", "ImageUnknown"], ["driver", "no", "OsUnknown"])


def test_an_unrenderable_driver_and_disabled_components_are_reported(node: LabNamespace) -> None:
    manager = {"enabled": True, "repository": "registry.example", "image": "vgpu-manager", "version": "1"}
    off = {name: {"enabled": False} for name in ("driver", "toolkit", "devicePlugin", "dcgm", "dcgmExporter", "gfd")}
    with controlled(node) as cluster:
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
