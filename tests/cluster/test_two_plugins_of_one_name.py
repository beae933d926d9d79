"""A real kubelet to which KubeVirt registers a resource of gpuvirt: two plugins of the same name."""

import json
import signal

import pytest
from lab.cluster.cluster import KUBELET_ROOT

from gpuvirt.agent.kubelet.podresources import ask_allocatable
from gpuvirt.facts.ids import ResourceName
from tests.agent.kubelet.foreignplugin import GROUPS, kubevirt_offers_beside
from tests.cluster.clusterlab import POD_RESOURCES, LabNode, PodRequest
from tests.cluster.labnamespace import PATIENCE_S
from tests.cluster.reportingagent import HALF, reporting, row, set_spec

A10 = ResourceName("nvidia.com/GA102GL_A10")

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]


def withhold(node: LabNode, *, withheld: bool) -> None:
    entry = {"resource": HALF, "code": "ForeignProvider", "message": "is offered by KubeVirt itself"}
    set_spec(node, json.dumps({"mode": "unmanaged", "withheld": [entry] if withheld else []}))


def test_kubevirts_device_plugin_keeps_its_devices_while_gpuvirt_withholds_the_resource(node: LabNode) -> None:
    with reporting(node):
        node.until(lambda: row(node)[-1:] == ["Reconciled"], lambda: str(row(node)))
        set_spec(node, '{"mode": "vgpu", "vgpuConfig": "T4-8Q"}')
        node.until_allocatable(HALF, 8)
        assert len(GROUPS) < 8
        withhold(node, withheld=True)
        node.until(lambda: row(node)[-1:] == ["ForeignProvider"], lambda: str(row(node)))
        with kubevirt_offers_beside(KUBELET_ROOT, ResourceName(HALF)):
            node.until_allocatable(HALF, len(GROUPS))
        node.until_allocatable(HALF, 0)
        withhold(node, withheld=False)
        node.until_allocatable(HALF, 8)


def test_ending_the_agent_unregisters_kubevirts_plugin_of_the_same_resource(node: LabNode) -> None:
    """A bug of the kubelet, which confuses the two plugins; the reference documents it."""
    with reporting(node) as agent:
        node.until(lambda: row(node)[-1:] == ["Reconciled"], lambda: str(row(node)))
        withhold(node, withheld=True)
        node.until(lambda: row(node)[-1:] == ["ForeignProvider"], lambda: str(row(node)))
        with kubevirt_offers_beside(KUBELET_ROOT, ResourceName(HALF)):
            node.until_allocatable(HALF, len(GROUPS))
            agent.send_signal(signal.SIGTERM)
            agent.wait(PATIENCE_S)
            node.until_allocatable(HALF, 0)


def test_a_gpu_that_kubevirts_plugin_gave_by_its_group_is_not_given_again(node: LabNode) -> None:
    """gpuvirt takes over the resource name of a plugin whose ids are groups, while a pod of that plugin runs."""

    def groups() -> set[str]:
        return set(node.output("theirs")) & set(GROUPS)

    with node.simulated_host("2xA10"):
        with kubevirt_offers_beside(KUBELET_ROOT, A10):
            node.until_allocatable(A10, len(GROUPS))
            node.start("theirs", PodRequest({A10: 1}, "ls /dev/vfio; sleep 1000"))
            node.until(lambda: bool(groups()), lambda: f"{node.status('theirs')}, {node.output('theirs')}")
        (group,) = groups()
        other = {"12": "0000:ca:00.0", "22": "0000:65:00.0"}[group]
        with node.agent():
            node.until_allocatable(A10, 1)
            assert {device for resource, device in ask_allocatable(POD_RESOURCES) if resource == A10} == {other}
            node.delete("theirs")
            node.until_allocatable(A10, 2)
            node.run("ours", PodRequest({A10: 2}))
