"""A real kubelet starts again without its checkpoint, while an idle pod has a GPU of another device plugin."""

import socket

import pytest
from lab.cluster.cluster import KUBELET_ROOT
from lab.cluster.settings import NODE

from gpuvirt.agent.store.agentstate import HISTORY_FILE
from gpuvirt.facts.ids import PciAddress, ResourceName
from gpuvirt.paths import KubeletPaths
from gpuvirt_sim.devices.nvidia import gpu_uuid
from tests.agent.kubelet.foreignplugin import kubevirt_offers_beside
from tests.cluster.clusterlab import LabNode, PodRequest
from tests.cluster.nodeworkload import REASON, is_for, node_key, until
from tests.cluster.reportingagent import WHOLE

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

NVIDIAS = ResourceName("nvidia.com/gpu")
T4S = [PciAddress(f"0000:{bus}:00.0") for bus in ("3b", "5e", "86", "af")]


def drivers(node: LabNode) -> list[str]:
    return [(node.host / f"sys/bus/pci/devices/{address}/driver").readlink().name for address in T4S]


def forget_devices(node: LabNode) -> None:
    """Restart the kubelet without its checkpoint."""
    node.cluster.stop("kubelet")
    KubeletPaths(KUBELET_ROOT).checkpoint.unlink()
    node.cluster.start_kubelet()
    node.until(accepts_plugins, lambda: "the kubelet accepts no registration")


def accepts_plugins() -> bool:
    """Return whether the kubelet listens; its last run has left its socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(KubeletPaths(KUBELET_ROOT).registration_socket)) == 0


@pytest.mark.parametrize("registers", [False, True])
def test_no_gpu_is_bound_while_a_pod_has_one_that_the_kubelet_has_forgotten(node: LabNode, *, registers: bool) -> None:
    """With or without a new checkpoint, which the kubelet writes when the other plugin registers again."""
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
    ids = [gpu_uuid(T4S[0])]
    with node.simulated_host("4xT4"), node.nodes_kept():
        native = drivers(node)
        with kubevirt_offers_beside(KUBELET_ROOT, NVIDIAS, ids):
            node.until_allocatable(NVIDIAS, 1)
            node.start("cuda", PodRequest({NVIDIAS: 1}, "sleep 1000"))
            node.until(lambda: node.status("cuda").phase == "Running", lambda: str(node.status("cuda")))
        is_for(node, "container")
        with node.agent("workload_label: true", asks):
            history = node.host / "var/lib/gpuvirt" / HISTORY_FILE
            node.until(history.exists, lambda: "the agent has not read the checkpoint")
            forget_devices(node)
            if registers:
                with kubevirt_offers_beside(KUBELET_ROOT, NVIDIAS, ids):
                    node.until_allocatable(NVIDIAS, 1)
            is_for(node, "vm-passthrough")
            cuda = f"pod {node.namespace}/cuda"
            node.until(lambda: "may be allocated" in reason(node) or cuda in reason(node), lambda: reason(node))
            assert node.status("cuda").phase == "Running"
            assert drivers(node)[0] == native[0] == "nvidia"
            node.delete("cuda")
            node.until_allocatable(WHOLE, 4)
            until(node, "success")


def reason(node: LabNode) -> str:
    return node_key(node, "annotations", REASON)
