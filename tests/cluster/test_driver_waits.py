"""A container node that still has vGPUs gets NVIDIA's driver only after they are removed."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cluster.clusterlab import LabNode
from tests.cluster.controllerlab import NAMESPACE, PRESENT, WORKLOAD, controlled
from tests.cluster.deployedagents import IMAGE

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

CHECK = "gpus-unused-validation"


def parts(**on: object) -> Mapping[str, object]:
    """Return a policy's container components, all disabled except the named ones."""
    names = ("driver", "toolkit", "devicePlugin", "dcgm", "dcgmExporter", "gfd", "validator")
    return {**{name: {"enabled": False} for name in names}, **on}


def test_the_driver_waits_until_no_gpu_carries_vgpus(node: LabNode, image: None) -> None:  # noqa: ARG001
    named = {"repository": "registry.example", "image": "none", "version": "1"}
    with controlled(node) as cluster, node.simulated_host("4xT4"), node.nodes_kept():
        cluster.apply_operand_access()
        with cluster.controller("--image", IMAGE, "--image-pull-policy", "Never"):
            driver = {**named, "manager": named}
            cluster.apply_policy({**parts(driver=driver), "hostPaths": {"rootFS": str(node.host)}})
            cluster.label(f"{PRESENT}=true", f"{WORKLOAD}=container", "gpuvirt.io/os=ubuntu22.04")

            def reported() -> str:
                logs = Path("/var/log/pods").glob(f"{NAMESPACE}_nvidia-driver-*/{CHECK}/*.log")
                return "".join(log.read_text() for log in logs)

            def state(container: int) -> str:
                return cluster.get("pods", f".items[0].status.initContainerStatuses[{container}].state")

            node.until(lambda: "CarriesVgpus: 0000:3b:00.0 carries" in reported(), lambda: f"{reported()} {state(0)}")
            assert "PodInitializing" in state(1), "NVIDIA's driver-manager"
            for vgpu in sorted((node.host / "sys/bus/mdev/devices").iterdir()):
                (vgpu.resolve() / "remove").write_text("1")
            node.until(lambda: '"exitCode":0' in state(0), lambda: f"{reported()} {state(0)}")
