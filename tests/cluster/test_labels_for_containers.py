"""Nodes for containers on a real cluster: the agent labels the vGPU type, and the pod that asks for it is scheduled."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import yaml
from lab.cluster.cluster import KUBELET_ROOT
from lab.cluster.images import PREFIX
from lab.cluster.ourimage import NAME

from gpuvirt.controller.operands.agent import labeller
from gpuvirt.controller.operands.inputs import RenderInputs
from gpuvirt.controller.settings import ControllerSettings
from gpuvirt.facts.ids import ResourceName
from gpuvirt.kube.kinds.workloads import DaemonSet
from gpuvirt.kube.labels import AGENT_LABELS, NODE_LABEL
from tests.agent.kubelet.foreignplugin import kubevirt_offers_beside
from tests.cluster.apilab import NAMESPACE, NODE, ROOT, ApiLab
from tests.cluster.clusterlab import LabNode
from tests.cluster.labnamespace import BOX
from tests.controller.operands.policies import policy_of

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

GPU, TYPE = ResourceName("nvidia.com/gpu"), "vgpu.type"
IDS = ("vgpu-a", "vgpu-b")
"""The ids of a plugin whose answers name no nodes: the real runtime would look for them."""
AGENTS = "gpuvirt-node-labels"
HOST = {"name": "host", "mountPath": "/host", "readOnly": True, "mountPropagation": "HostToContainer"}


def agents_on(host: Path) -> Mapping[str, object]:
    """Return the DaemonSet as the controller renders it, with a simulated host in place of the node."""
    settings = ControllerSettings(NAMESPACE, pull_policy="Never", labels_vgpu_types=True)
    inputs = RenderInputs(settings, f"{PREFIX}/{NAME}")
    (rendered,) = labeller(policy_of({}), inputs)
    assert isinstance(rendered, DaemonSet)
    found = yaml.safe_load(msgspec.json.encode(rendered))
    del found["metadata"]["ownerReferences"]  # to a policy that does not exist
    pod = found["spec"]["template"]["spec"]
    pod["volumes"].append({"name": "host", "hostPath": {"path": str(host)}})
    pod["containers"][0]["volumeMounts"].append(HOST)
    pod["containers"][0]["env"].append({"name": "GPUVIRT_HOST_ROOT", "value": "/host"})
    manifest: Mapping[str, object] = found
    return manifest


class Worker:
    """A worker VM with a vGPU, which NVIDIA's device plugin gives to containers."""

    def __init__(self, node: LabNode) -> None:
        self.node = node

    def label(self) -> str:
        return self.node.node().metadata.labels.get(TYPE, "")

    def reported(self) -> str:
        logs = self.node.cluster.kubectl("--namespace", NAMESPACE, "logs", f"daemonset/{AGENTS}", "--tail=20")
        pods = self.node.cluster.kubectl("--namespace", NAMESPACE, "get", "pods", "-o", "wide")
        return f"{self.node.node().metadata.labels}\n{pods.stdout}{logs.stdout}{logs.stderr}"

    def sockets(self) -> set[str]:
        return {path.name for path in (KUBELET_ROOT / "device-plugins").iterdir() if path.is_socket()}


@contextmanager
def worker(node: LabNode, tmp_path: Path) -> Iterator[Worker]:
    found = Worker(node)
    ApiLab(node.cluster, tmp_path).apply_roles()
    with node.simulated_host("vm-V100-8Q") as host, kubevirt_offers_beside(KUBELET_ROOT, GPU, IDS):
        node.until_allocatable(GPU, len(IDS))
        try:
            node.apply(agents_on(host))
            yield found
        finally:
            node.kubectl("--namespace", NAMESPACE, "delete", "daemonset", AGENTS, "--wait=true")
            node.kubectl("label", "node", NODE, f"{NODE_LABEL}-", f"{TYPE}-")
            node.kubectl("annotate", "node", NODE, "gpuvirt.io/vgpu-type-labels-")


def chosen_by_type(node: LabNode) -> Mapping[str, object]:
    """Return the example's pod, with an image that the node has."""
    pod = yaml.safe_load((ROOT / "examples/pod-on-vgpu-type.yaml").read_text())
    assert pod["spec"]["nodeSelector"] == {TYPE: "v100-8q-8GB"}
    (main,) = pod["spec"]["containers"]
    assert main["resources"]["limits"] == {GPU: 1}
    main |= {"image": BOX, "imagePullPolicy": "Never", "command": None, "args": ["true"]}
    pod["metadata"] |= {"name": "chosen", "namespace": node.namespace}
    manifest: Mapping[str, object] = pod
    return manifest


def test_a_pod_gets_the_vgpu_of_the_type_that_the_agent_labels(
    node: LabNode,
    image: None,  # noqa: ARG001
    tmp_path: Path,
) -> None:
    with worker(node, tmp_path) as vm:
        node.apply(chosen_by_type(node))
        time.sleep(2)  # noqa: TID251  the scheduler's time
        assert node.status("chosen").phase == "Pending", "no node has the label yet"
        sockets = vm.sockets()
        node.kubectl("label", "node", NODE, f"{NODE_LABEL}={AGENT_LABELS}")
        node.until(lambda: vm.label() == "v100-8q-8GB", vm.reported)
        node.until(lambda: node.status("chosen").phase == "Succeeded", lambda: str(node.status("chosen")))
        assert vm.sockets() == sockets, "the agent has registered no device plugin"
        ready = "jsonpath={.items[*].status.containerStatuses[*].ready}"
        node.until(
            lambda: node.kubectl("--namespace", NAMESPACE, "get", "pods", "-l", f"app={AGENTS}", "-o", ready) == "true",
            vm.reported,
        )
        node.kubectl("label", "node", NODE, "--overwrite", f"{TYPE}=mine")
        time.sleep(2)  # noqa: TID251  the agent's time
        assert vm.label() == "mine", "a label that an admin has changed stays"
