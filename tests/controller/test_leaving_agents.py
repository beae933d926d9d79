"""An agent that leaves its node: it stays while pods have shares, and the controller removes what it wrote."""

import msgspec
import pytest
from msgspec.structs import replace

from gpuvirt.controller.nodes.labels import LabelInputs, desired_labels
from gpuvirt.controller.nodes.placement import Defaults, leaving, placement_of
from gpuvirt.controller.nodes.resolve import ManagedMetadata, OwnedGpuNode
from gpuvirt.controller.writes import PatchNode
from gpuvirt.kube.kinds.core import Node, Pod
from gpuvirt.kube.kinds.gpunode import Gpu, Status
from gpuvirt.kube.labels import NODE_LABEL, REASON_ANNOTATION, STATE_LABEL, WORKLOAD_STATE_LABEL
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.workload import LABEL
from gpuvirt.model.shares.annotations import SHARED_GPUS_ANNOTATION
from gpuvirt.shares.nodekeys import OWNED_ANNOTATION
from tests.controller.observedcluster import NFD, SETTINGS, ObservedCluster
from tests.controller.observedcluster import node as gpu_node_of

TYPE = "vgpu.type"
WRITTEN = {
    SHARED_GPUS_ANNOTATION: '{"GPU-a":1000}',
    OWNED_ANNOTATION: '{"vgpu.type":"v100-8q-8GB"}',
    REASON_ANNOTATION: "VgpuInUse: is in use",
}
DEPLOYED = replace(SETTINGS, image="registry.example/gpuvirt:1")


def left(agent: str | None, workload: str = "container", *, kind: str = "v100-8q-8GB", **annotations: str) -> Node:
    """Return a node with what an agent wrote there."""
    labels = {**NFD, LABEL: workload, TYPE: kind, STATE_LABEL: "pending", WORKLOAD_STATE_LABEL: "success"} | (
        {NODE_LABEL: agent} if agent is not None else {}
    )
    return Node(Metadata(name="node01", labels=labels, annotations={**WRITTEN, "kept": "yes", **annotations}))


def agent_pod(name: str = "node01") -> Pod:
    value = {
        "metadata": {"name": "a", "namespace": "gpu-operator", "labels": {"app": "gpuvirt-node"}},
        "spec": {"nodeName": name},
    }
    return msgspec.convert(value, Pod)


def written(observed_cluster: ObservedCluster) -> tuple[dict[str, str], dict[str, str]]:
    """Return the labels and annotations of the node after the controller's writes."""
    (node,) = observed_cluster.nodes
    labels, annotations = dict[str, str | None](node.metadata.labels), dict[str, str | None](node.metadata.annotations)
    for write in observed_cluster.decided(DEPLOYED).writes:
        if isinstance(write, PatchNode):
            labels |= write.patch.metadata.labels
            annotations |= write.patch.metadata.annotations
    return _present(labels), _present(annotations)


def _present(found: dict[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in found.items() if value is not None}


def after(observed_cluster: ObservedCluster) -> ObservedCluster:
    """Return the observed_cluster after the controller's writes to its node."""
    labels, annotations = written(observed_cluster)
    return replace(observed_cluster, nodes=[Node(Metadata(name="node01", labels=labels, annotations=annotations))])


@pytest.mark.parametrize("workload", ["container", "shared"])
def test_an_agent_that_runs_keeps_its_keys(workload: str) -> None:
    if workload == "container":
        observed_cluster = ObservedCluster([gpu_node_of("shared")], pods=[agent_pod()])
    else:
        observed_cluster = ObservedCluster([left("true", "shared")], pods=[agent_pod()])
    (node,) = observed_cluster.nodes
    labels, annotations = written(observed_cluster)
    assert annotations.items() >= node.metadata.annotations.items()
    assert labels[NODE_LABEL] == "true"


def test_the_keys_of_an_agent_are_removed_once_its_pod_is_gone() -> None:
    observed_cluster = ObservedCluster([left("true")], pods=[agent_pod()])
    for _ in range(2):
        observed_cluster = after(observed_cluster)
        labels, annotations = observed_cluster.nodes[0].metadata.labels, observed_cluster.nodes[0].metadata.annotations
        assert (labels[NODE_LABEL], labels[TYPE]) == ("false", "v100-8q-8GB"), "the agent's pod still exists"
        assert annotations.items() >= WRITTEN.items()
    observed_cluster = after(replace(observed_cluster, pods=[agent_pod("elsewhere")]))
    labels, annotations = observed_cluster.nodes[0].metadata.labels, observed_cluster.nodes[0].metadata.annotations
    assert not {NODE_LABEL, TYPE, STATE_LABEL, WORKLOAD_STATE_LABEL} & labels.keys()
    assert annotations == {"kept": "yes"}
    assert after(observed_cluster) == observed_cluster


def test_a_label_that_an_admin_has_changed_stays() -> None:
    labels, annotations = written(ObservedCluster([left("false", kind="mine")]))
    assert labels[TYPE] == "mine"
    assert annotations == {"kept": "yes"}


def test_an_agent_that_the_controller_did_not_deploy_keeps_its_keys() -> None:
    labels, annotations = written(ObservedCluster([left(None)]))
    assert labels[TYPE] == "v100-8q-8GB"
    assert annotations.items() >= WRITTEN.items()


def test_beside_nvidias_operator_the_keys_go_too() -> None:
    observed_cluster = ObservedCluster([left("true")], other_operator="NVIDIA's operator")
    decided = observed_cluster.decided(replace(DEPLOYED, coexists=True))
    (patch,) = [write.patch for write in decided.writes if isinstance(write, PatchNode)]
    assert patch.metadata.labels[NODE_LABEL] == "false"


@pytest.mark.parametrize(
    ("users", "generation", "waits"), [(("pod default/a",), 2, True), ((), 2, False), ((), 1, True)]
)
def test_the_agent_stays_until_no_pod_has_a_share(users: tuple[str, ...], generation: int, *, waits: bool) -> None:
    gpu = Gpu(address="0000:02:00.0", mode="shared", users=users, vfs=0)
    metadata = ManagedMetadata(name="node01", generation=2)
    reported = OwnedGpuNode(metadata=metadata, status=Status(observed_generation=generation, gpus=(gpu,)))
    labels = left("true").metadata.labels
    placement = placement_of(labels, reported, Defaults(sandboxed=True))
    found = leaving(placement, labels, reported, spec_is_due=False)
    assert bool(found.leaving) == waits
    assert desired_labels(left("true").metadata, found, LabelInputs()).labels[NODE_LABEL] == ("true" if waits else None)
    assert leaving(placement, labels, reported, spec_is_due=True).leaving, "the agent has not read that the mode ends"
