"""The devices of a pod that Kata's cold plug finds on a real kubelet, by its answer to Get and Kata's CDI library."""

import json
import subprocess
from pathlib import Path

import pytest
from lab.cluster.cluster import KUBELET_ROOT
from lab.cluster.settings import NODE
from lab.kata.witness import witness

from tests.cluster.clusterlab import LabNode, PodRequest

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.ring("kata"), pytest.mark.xdist_group("cluster")]

ONE_L40S = """
about: one L40S whose VFs carry vendor-VFIO vGPUs on demand
slots:
  - {at: "0000:3b:00.0", board: L40S, group: 31, vfs: 4}
"""
A10, L40S_12Q = "nvidia.com/GA102GL_A10", "tencent.com/vgpu-1156"


def nodes_found(node: LabNode, pod: str, specs: Path) -> list[str]:
    """Return the device nodes that Kata would plug into a pod's VM."""
    socket = f"{KUBELET_ROOT}/pod-resources/kubelet.sock"
    command = (witness(), "-socket", socket, "-namespace", node.namespace, "-spec-dirs", str(specs), pod)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [found["path"] for found in json.loads(done.stdout)["nodes"]]


def test_the_groups_of_whole_gpus_are_found(node: LabNode) -> None:
    with node.simulated_host("2xA10"), node.cdi_folder() as specs, node.agent():
        node.until_allocatable(A10, 2)
        node.start("whole", PodRequest({A10: 2}, "sleep 1000"))
        node.until(lambda: node.status("whole").phase == "Running", lambda: str(node.status("whole")))
        assert sorted(nodes_found(node, "whole", specs)) == ["/dev/vfio/12", "/dev/vfio/22"]


def test_the_one_node_of_a_vgpu_on_demand_is_found(node: LabNode, tmp_path: Path) -> None:
    """Kata asks before the containers start; the init container has the same device, and adds none."""
    (tmp_path / "1xL40S.yaml").write_text(ONE_L40S)
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
    host, agent = node.simulated_host(str(tmp_path / "1xL40S.yaml")), node.agent("mode: on-demand", asks)
    with host, node.cdi_folder() as specs, agent, node.nodes_kept():
        node.until_allocatable(L40S_12Q, 1)
        node.start("vgpu", PodRequest({L40S_12Q: 1}, "sleep 1000", init={L40S_12Q: 1}))
        node.until(lambda: node.status("vgpu").phase == "Running", lambda: str(node.status("vgpu")))
        (found,) = nodes_found(node, "vgpu", specs)
        assert found.startswith("/dev/vfio/")
        assert found != "/dev/vfio/vfio"
