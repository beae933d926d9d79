"""The GPU Operator's guide on a real kubelet: a label changes vGPUs, and allocated ones stay until their pods end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from lab.cluster.settings import NODE

from tests.cluster.clusterlab import LabNode, PodRequest, devices_of
from tests.cluster.labnamespace import PodStatus

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

LABEL, STATE = "nvidia.com/vgpu.config", r".metadata.labels.nvidia\.com/vgpu\.config\.state"
REASON = r".metadata.annotations.gpuvirt\.io/vgpu\.config\.reason"
SHOW = r"tr '\0' '\n' < /proc/1/environ | grep MDEV_PCI_RESOURCE"
"""The variable's name has a dash, by KubeVirt's contract, and shells hand on none that is no name of theirs."""
QUEUED = 40


def resource(name: str) -> str:
    return f"nvidia.com/NVIDIA_A10-{name}"


@contextmanager
def change(node: LabNode) -> Iterator[None]:
    """Run an agent that changes vGPUs."""
    asks = ("--node-name", NODE, "--kubeconfig", str(node.cluster.kubeconfig))
    with node.simulated_host("2xA10-sriov"), node.agent("mode: vgpu", asks):
        yield


def set_config(node: LabNode, config: str) -> None:
    node.kubectl("label", "node", NODE, f"{LABEL}={config}", "--overwrite")


def node_field(node: LabNode, what: str) -> str:
    return node.kubectl("get", "node", NODE, "-o", f"jsonpath={{{what}}}")


def test_a_label_changes_the_vgpus_of_the_node(node: LabNode) -> None:
    with change(node):
        node.until_allocatable(resource("12Q"), 4)
        node.until(lambda: node_field(node, STATE) == "success", lambda: node_field(node, STATE))
        for config, count in (("4Q", 12), ("8Q", 6)):
            began = time.monotonic()  # noqa: TID251  said, not asserted
            set_config(node, f"A10-{config}")
            node.until_counted(resource(config), count)
            counted = time.monotonic() - began  # noqa: TID251
            node.until_allocatable(resource(config), count)
            print(f"A10-{config}: counted after {counted:.1f} s, allocatable after {time.monotonic() - began:.1f} s")  # noqa: T201, TID251
        node.until_allocatable(resource("4Q"), 0)
        node.until(lambda: node_field(node, STATE) == "success", lambda: node_field(node, STATE))
        node.make_nodes()
        assert len(devices_of(node.run("vm", PodRequest({resource("8Q"): 2}, SHOW)))) == 2


def test_pods_bound_before_a_vgpu_change_are_admitted(node: LabNode) -> None:
    """The queue is longer than the node's capacity, so pods are bound continuously.

    Scheduler and kubelet are given half a second for what they have begun, as tests/agent/node/test_notice.py
    proves. A busy computer exceeds that now and then: one switch of three has to refuse no pod.
    """
    seen = list[str]()
    with change(node), node.nodes_kept():
        node.until_allocatable(resource("12Q"), 4)
        for before, after, count in (("12Q", "4Q", 12), ("4Q", "12Q", 4), ("12Q", "4Q", 12)):
            bound, refused = bound_amid_a_change(node, resource(before), f"A10-{after}", resource(after), count)
            print(f"of {bound} pods that were bound, {len(refused)} were refused")  # noqa: T201
            if 0 < bound < QUEUED and not refused:
                return
            seen.append(f"{bound} of {QUEUED} pods were bound, refused: {refused}")
            node.kubectl("delete", "pods", "--all", "--wait=true")
    raise AssertionError("\n".join(seen))


def bound_amid_a_change(node: LabNode, named: str, config: str, then: str, count: int) -> tuple[int, list[PodStatus]]:
    """Change the vGPUs while pods are bound one after another; return how many were, and those that were refused."""
    names = [f"queued-{number}" for number in range(QUEUED)]

    def ended(phase: str) -> int:
        return node.kubectl("get", "pods", "-o", "jsonpath={.items[*].status.phase}").split().count(phase)

    node.start_all({name: PodRequest({named: 1}, "true") for name in names})
    node.until(lambda: ended("Succeeded") >= 6, lambda: str(ended("Succeeded")))
    set_config(node, config)
    node.until_allocatable(then, count)
    bound = QUEUED - ended("Pending")
    return bound, [status for status in map(node.status, names) if status.phase == "Failed"]


def test_a_vgpu_of_a_pod_stays_until_the_pod_ends(node: LabNode) -> None:
    with change(node):
        node.until_allocatable(resource("12Q"), 4)
        node.make_nodes()
        node.start("keeps", PodRequest({resource("12Q"): 1}, f"{SHOW}; sleep 1000"))
        mine = node.devices("keeps")
        set_config(node, "A10-4Q")
        node.until_allocatable(resource("4Q"), 6)
        node.until(lambda: node_field(node, STATE) == "pending", lambda: node_field(node, STATE))
        node.until(lambda: f"pod {node.namespace}/keeps" in node_field(node, REASON), lambda: node_field(node, REASON))
        assert node.status("keeps").phase == "Running"
        assert node.devices("keeps") == mine
        node.make_nodes()
        node.run("other", PodRequest({resource("4Q"): 1}, SHOW))
        node.delete("keeps")
        node.until_allocatable(resource("4Q"), 12)
        node.until(lambda: node_field(node, STATE) == "success", lambda: node_field(node, STATE))


def test_a_pod_whose_init_container_has_ended_outlives_a_kubelet_while_a_change_waits(node: LabNode) -> None:
    """A kubelet that starts rejects a pod that runs if the device of a container that has ended is unhealthy then."""
    with change(node):
        node.until_allocatable(resource("12Q"), 4)
        node.make_nodes()
        vgpu = {resource("12Q"): 1}
        node.start("keeps", PodRequest(vgpu, f"{SHOW}; sleep 1000", init=vgpu))
        mine = node.devices("keeps")
        set_config(node, "A10-4Q")
        node.until_allocatable(resource("4Q"), 6)
        for _ in range(2):
            node.cluster.stop("kubelet")
            node.cluster.start_kubelet()
            node.make_nodes()
            node.run("admitted-after-it", PodRequest({resource("4Q"): 1}, SHOW))
            node.delete("admitted-after-it")
        assert node.status("keeps").phase == "Running", node.status("keeps")
        assert [container.restartCount for container in node.status("keeps").containerStatuses] == [0]
        assert node.devices("keeps") == mine
        assert node_field(node, STATE) == "pending"
        node.delete("keeps")
        node.until_allocatable(resource("4Q"), 12)


def test_an_unknown_config_fails_with_the_reason(node: LabNode) -> None:
    with change(node):
        node.until_allocatable(resource("12Q"), 4)
        set_config(node, "A10-13Q")
        node.until(lambda: node_field(node, STATE) == "failed", lambda: node_field(node, STATE))
        assert "ConfigInvalid: label nvidia.com/vgpu.config is 'A10-13Q'" in node_field(node, REASON)
        node.until_allocatable(resource("12Q"), 4)
