"""A VgpuSchedule of nodes' vGPU configs, on a real API server and kubelet: its phase decides, and vGPUs in use wait."""

from collections.abc import Mapping

import pytest
from lab.cluster.settings import NODE

from gpuvirt.plain import Plain
from tests.cluster.clusterlab import LabNode, PodRequest
from tests.cluster.controllerlab import NAMESPACE, PRESENT, ROOT, WORKLOAD, ControlledNode, controlled

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

QUARTER, WHOLE = "nvidia.com/NVIDIA_A10-4Q", "nvidia.com/NVIDIA_A10-24Q"
CONFIGS = {"day": "A10-4Q", "night": "A10-24Q"}
STARTS = {"day": "0 7 * * *", "night": "0 20 * * *"}
POOL = "example.com/pool"
SHOW = r"tr '\0' '\n' < /proc/1/environ | grep MDEV_PCI_RESOURCE"
"""A shell drops variables whose names have a hyphen, as that of this resource has."""


def apply_schedule(node: LabNode, phase: str) -> None:
    """Have a phase hold, whatever the time of day is."""
    phases: list[Plain] = [
        {"name": name, "start": STARTS[name], "nodes": {"matchLabels": {POOL: "vgpu"}}, "vgpuConfig": config}
        for name, config in CONFIGS.items()
    ]
    holds: Mapping[str, Plain] = {"phase": phase, "from": "2020-01-01T00:00", "until": "2099-01-01T00:00"}
    kind = {"apiVersion": "gpuvirt.io/v1alpha1", "kind": "VgpuSchedule"}
    spec = {"phases": phases, "overrides": [holds]}
    node.apply({**kind, "metadata": {"name": "gpus", "namespace": NAMESPACE}, "spec": spec})


def status(node: LabNode) -> str:
    """Return the code of the schedule's condition, and its row of the node."""
    ready = r'{.status.conditions[?(@.type=="Ready")].reason} {.status.nodes}'
    done = node.cluster.kubectl("get", "vgpuschedule", "gpus", "-n", NAMESPACE, "-o", f"jsonpath={ready}")
    return done.stdout


def until_status(node: LabNode, text: str) -> None:
    node.until(lambda: text in status(node), lambda: f"{status(node)}: {node.log}")


def origin(cluster: ControlledNode) -> str:
    """Return where the vGPU config of the node's GpuNode comes from."""
    return cluster.get(f"gpunode/{NODE}", ".spec.vgpuConfig} {.spec.origins.vgpuConfig")


def test_a_phase_gives_nodes_their_vgpu_config_once_no_vm_has_a_vgpu(node: LabNode) -> None:
    node.kubectl("apply", "-f", str(ROOT / "deploy/vgpuschedules.yaml"))
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
    with (
        controlled(node) as cluster,
        cluster.controller("--schedules"),
        node.simulated_host("2xA10-sriov"),
        node.nodes_kept(),
        node.agent("", asks),
    ):
        cluster.apply_policy({})
        cluster.label(f"{PRESENT}=true", f"{WORKLOAD}=vm-vgpu", "nvidia.com/vgpu.config=A10-12Q", f"{POOL}=vgpu")
        node.until_allocatable("nvidia.com/NVIDIA_A10-12Q", 4)
        apply_schedule(node, "day")
        node.until_allocatable(QUARTER, 12)
        until_status(node, "PhaseReached")
        assert origin(cluster) == "A10-4Q VgpuSchedule gpus phase day"
        node.start("keeps", PodRequest({QUARTER: 1}, f"{SHOW}; sleep 1000"))
        mine = node.devices("keeps")

        apply_schedule(node, "night")
        node.until_allocatable(WHOLE, 1)
        until_status(node, f"pod {node.namespace}/keeps")
        assert origin(cluster) == "A10-24Q VgpuSchedule gpus phase night"
        assert "A10-24Q" in cluster.gpuvirt("schedule", "show", "gpus")
        assert (node.status("keeps").phase, node.devices("keeps")) == ("Running", mine)
        node.delete("keeps")
        node.until_allocatable(WHOLE, 2)
        until_status(node, "PhaseReached")

        admins = f'{{"apiVersion": "gpuvirt.io/v1alpha1", "kind": "GpuNode", "metadata": {{"name": "{NODE}"}},'
        admins += ' "spec": {"vgpuConfig": "A10-8Q"}}'
        command = ("apply", "--server-side", "--force-conflicts", "--field-manager=admin", "-f", "-")
        assert node.cluster.kubectl(*command, given=admins).returncode == 0
        node.until_allocatable("nvidia.com/NVIDIA_A10-8Q", 6)
        until_status(node, "VgpuConfigOverridden")
        assert origin(cluster).startswith("A10-8Q set in this GpuNode by admin")
        node.kubectl("delete", "vgpuschedule", "gpus", "-n", NAMESPACE)
        node.kubectl("delete", "gpunode", NODE)
        node.until_allocatable("nvidia.com/NVIDIA_A10-12Q", 4)
        cluster.label(f"{POOL}-")
