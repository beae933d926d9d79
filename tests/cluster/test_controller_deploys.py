"""From a label to a pod's vGPU, with agents that the controller deploys, upgrades and removes."""

import pytest
from lab.cluster.settings import NODE

from tests.cluster.clusterlab import LabNode, PodRequest
from tests.cluster.controllerlab import WORKLOAD
from tests.cluster.deployedagents import IMAGE, deploying, policy

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

BIG, SMALL = "nvidia.com/NVIDIA_A10-12Q", "nvidia.com/NVIDIA_A10-4Q"


def rows(shown: str) -> list[list[str]]:
    """Return component, ready and state of each row of `gpuvirt status`."""
    return [line.split()[2:5] for line in shown.splitlines() if line.startswith(NODE)]


def test_labelling_a_node_deploys_the_agent_and_creates_vgpus(node: LabNode, image: None) -> None:  # noqa: ARG001
    with deploying(node) as cluster:
        node.until_allocatable(BIG, 4)
        cluster.label("nvidia.com/vgpu.config=A10-4Q")
        node.until_allocatable(SMALL, 12)
        vgpus = ("get", "gpunode", NODE, "-o", "jsonpath={.status.totals.vgpus}")
        node.until(lambda: node.kubectl(*vgpus) == "12", lambda: node.kubectl(*vgpus))
        cluster.until_reported("True Reconciled")
        components = ("sandbox-device-plugin", "sandbox-validator", "vgpu-device-manager")
        running = [[component, "yes", "Running"] for component in components]
        node.until(lambda: rows(cluster.status()) == running, cluster.status)
        assert f"12 {SMALL}" in cluster.status()
        node.start("keeps", PodRequest({SMALL: 1}, "sleep 1000"))
        node.until(lambda: node.status("keeps").phase == "Running", lambda: str(node.status("keeps")))

        bad = '[{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": "bad:1"}]'
        node.kubectl("patch", "daemonset", "gpuvirt-node", "-n", "gpu-operator", "--type=json", "-p", bad)
        image_path = ".spec.template.spec.containers[0].image"
        node.until(
            lambda: cluster.get("daemonset/gpuvirt-node", image_path) == IMAGE,
            lambda: cluster.get("daemonset/gpuvirt-node", image_path),
        )

        first = cluster.get("pods", ".items[*].metadata.name")
        cluster.apply_policy(policy(node, resources={"limits": {"memory": "1000Mi", "cpu": "1000m"}}))
        node.until(lambda: first not in cluster.get("pods", ".items[*].metadata.name"), cluster.reported)
        cluster.until_reported("True Reconciled")
        node.until_allocatable(SMALL, 12)
        node.run("late", PodRequest({SMALL: 1}, "true"))

        reported = cluster.gpuvirt("uninstall")
        assert "deleted daemonsets gpuvirt-node" in reported
        assert f"deleted GpuNode {NODE}" in reported
        assert cluster.get("daemonsets,configmaps", ".items[*].metadata.name") == "kube-root-ca.crt"
        ours = {key for key in cluster.labels() if key.startswith(("nvidia.com/", "gpuvirt.io/"))}
        assert ours == {WORKLOAD, "nvidia.com/vgpu.config"}, "an admin's"
        assert node.kubectl("get", "gpunodes", "-o", "name") == ""
        assert node.status("keeps").phase == "Running"
        assert len(list((node.host / "sys/bus/mdev/devices").iterdir())) == 12, "devices are unchanged"
