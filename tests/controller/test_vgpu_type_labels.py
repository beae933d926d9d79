"""Agents on nodes for containers, which only label worker VMs with the types of their vGPUs."""

import msgspec
import pytest
from msgspec.structs import replace

from gpuvirt.controller.operands.inputs import OperandName
from gpuvirt.controller.settings import ControllerSettings
from gpuvirt.controller.writes import ApplyObject, PatchNode
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.kinds.workloads import DaemonSet
from gpuvirt.kube.labels import NODE_LABEL
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.workload import LABEL
from gpuvirt.shares.nodekeys import OWNED_ANNOTATION
from tests.controller.observedcluster import NFD, SETTINGS, ObservedCluster, node, policy

DEPLOYS = replace(SETTINGS, image="registry.example/gpuvirt:1")
LABELS = replace(DEPLOYS, labels_vgpu_types=True)


def agents_label(observed_cluster: ObservedCluster, settings: ControllerSettings = LABELS) -> str | None:
    """Return the label of the node by which its agent is deployed."""
    (found,) = observed_cluster.nodes
    labels = dict[str, str | None](found.metadata.labels)
    for write in observed_cluster.decided(settings).writes:
        if isinstance(write, PatchNode):
            labels |= write.patch.metadata.labels
    return labels.get(NODE_LABEL)


def daemon_set(observed_cluster: ObservedCluster) -> DaemonSet | None:
    written = (write.content for write in observed_cluster.decided(LABELS).writes if isinstance(write, ApplyObject))
    found = (
        manifest
        for manifest in written
        if isinstance(manifest, DaemonSet) and manifest.metadata.name == OperandName.LABELLER
    )
    return next(found, None)


@pytest.mark.parametrize(
    ("workload", "label"),
    [("container", "labels"), (None, "labels"), ("shared", "true"), ("vm-passthrough", "true"), ("vm-vgpu", "true")],
)
def test_nodes_for_containers_get_an_agent_that_labels_them(workload: str | None, label: str) -> None:
    assert agents_label(ObservedCluster([node(workload)])) == label


def test_without_the_setting_no_agent_runs_on_nodes_for_containers() -> None:
    observed_cluster = ObservedCluster([node("container")])
    assert agents_label(observed_cluster, DEPLOYS) is None
    decided = observed_cluster.decided(DEPLOYS)
    names = {write.target.name for write in decided.writes if isinstance(write, ApplyObject)}
    assert OperandName.LABELLER not in names


def test_also_where_no_vms_run_and_beside_nvidias_operator() -> None:
    off = policy({"sandboxWorkloads": {"enabled": False}})
    assert agents_label(ObservedCluster([node("vm-vgpu")], [off])) == "labels"
    observed_cluster = ObservedCluster([node("container")], other_operator="NVIDIA's operator")
    decided = observed_cluster.decided(replace(LABELS, coexists=True))
    (patch,) = [write.patch for write in decided.writes if isinstance(write, PatchNode)]
    assert patch.metadata.labels == {NODE_LABEL: "labels"}
    kept_off = replace(observed_cluster, nodes=[node("container", gpu_deploy_operands="false")])
    decided = kept_off.decided(replace(LABELS, coexists=True))
    assert not [write for write in decided.writes if isinstance(write, PatchNode)]


def test_a_node_without_gpus_or_without_operands_has_no_agent() -> None:
    assert agents_label(ObservedCluster([Node(Metadata(name="node01"))])) is None
    assert agents_label(ObservedCluster([node("container", gpu_deploy_operands="false")])) is None


def test_the_agent_has_no_privileges_and_nothing_of_the_host() -> None:
    found = daemon_set(ObservedCluster([node("container")]))
    assert found is not None
    pod = found.spec.template.spec
    assert pod.node_selector[NODE_LABEL] == "labels"
    assert pod.service_account_name == "gpuvirt-node"
    assert (pod.host_pid, pod.host_ipc, pod.host_network) == (False, False, False)
    assert all(volume.host_path is None for volume in pod.volumes)
    (container,) = pod.containers
    assert container.args[:2] == ("node", "--labels-only")
    assert msgspec.to_builtins(container.security_context) == {
        "readOnlyRootFilesystem": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ("ALL",)},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_the_label_goes_with_the_agent_once_the_setting_is_off() -> None:
    labels = {**NFD, LABEL: "container", NODE_LABEL: "labels", "vgpu.type": "v100-8q-8GB"}
    annotations = {OWNED_ANNOTATION: '{"vgpu.type":"v100-8q-8GB"}'}
    observed_cluster = ObservedCluster([Node(Metadata(name="node01", labels=labels, annotations=annotations))])
    assert agents_label(observed_cluster) == "labels"
    assert agents_label(observed_cluster, DEPLOYS) == "false"
    gone = ObservedCluster(
        [Node(Metadata(name="node01", labels=labels | {NODE_LABEL: "false"}, annotations=annotations))]
    )
    (patch,) = [write.patch for write in gone.decided(DEPLOYS).writes if isinstance(write, PatchNode)]
    assert patch.metadata.labels.items() >= {NODE_LABEL: None, "vgpu.type": None}.items()
    assert patch.metadata.annotations == {OWNED_ANNOTATION: None}
