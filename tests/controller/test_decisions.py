"""The specs, statuses and events that the controller derives from an observed cluster."""

import pytest
from msgspec.structs import replace
from msgspec.structs import replace as with_

from gpuvirt.controller.controller import LEASE, QUIET_S, OtherOperator
from gpuvirt.controller.decisions import Decisions
from gpuvirt.controller.kubevirt.decisions import KubeVirtObserved
from gpuvirt.controller.nodes.resolve import AppliedSpec, OwnedGpuNode
from gpuvirt.controller.picture import OperandPods, pods_by_node
from gpuvirt.controller.writes import ApplyGpuNode, DeleteObject, PatchNode, PatchPolicyStatus, WriteTarget
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.election import Lease, LeaseSpec
from gpuvirt.kube.kinds import core
from gpuvirt.kube.kinds.clusterpolicy import State
from gpuvirt.kube.kinds.core import Node, Pod, PodSpec, PodStatus
from gpuvirt.kube.kinds.gpunode import GPU_NODES, Origins, Spec
from gpuvirt.kube.labels import NODE_LABEL, PAUSED_FOR_DRIVER, PAUSED_FOR_VGPUS, VGPU_DRIVER_LABEL
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.gpumodes import DesiredMode
from tests.controller.observedcluster import NFD, SETTINGS, ObservedCluster, gpu_node, node, policy, ready


def spec(decisions: Decisions) -> AppliedSpec:
    (found,) = (write.content.spec for write in decisions.writes if isinstance(write, ApplyGpuNode))
    return found


def states(decisions: Decisions) -> dict[str, State | None]:
    return {write.target.name: write.status.state for write in decisions.writes if isinstance(write, PatchPolicyStatus)}


def test_a_spec_from_labels_and_policy_names_the_origin_of_each_field() -> None:
    found = spec(ObservedCluster([node("vm-vgpu", vgpu_config="A10-4Q")]).decided())
    assert (found.mode, found.vgpu_config) == (DesiredMode.VGPU, "A10-4Q")
    assert found.origins is not None
    assert found.origins.mode == "label nvidia.com/gpu.workload.config"
    assert found.origins.vgpu_config == "label nvidia.com/vgpu.config"
    sandbox = {"enabled": True, "defaultWorkload": "vm-passthrough"}
    named = {"enabled": True, "config": {"default": "A10-8Q"}}
    by_policy = policy({"vgpuDeviceManager": named, "sandboxWorkloads": sandbox})
    found = spec(ObservedCluster([node()], [by_policy]).decided())
    assert (found.mode, found.vgpu_config) == (DesiredMode.PASSTHROUGH, "A10-8Q")
    assert found.origins is not None
    assert "$.spec.sandboxWorkloads.defaultWorkload" in found.origins.mode
    assert "$.spec.vgpuDeviceManager.config.default" in found.origins.vgpu_config


@pytest.mark.parametrize(("workload", "off"), [("vm-passthrough", "vfioManager"), ("vm-vgpu", "vgpuDeviceManager")])
def test_a_disabled_component_leaves_the_node_unmanaged(workload: str, off: str) -> None:
    found = spec(ObservedCluster([node(workload)], [policy({off: {"enabled": False}})]).decided())
    assert found.mode is DesiredMode.UNMANAGED
    assert found.origins is not None
    assert f"$.spec.{off}.enabled" in found.origins.mode


def test_a_node_on_demand_creates_vgpus_without_the_vgpu_device_manager() -> None:
    off = policy({"vgpuDeviceManager": {"enabled": False}})
    assert spec(ObservedCluster([node("on-demand")], [off]).decided()).mode is DesiredMode.ON_DEMAND
    by_default = policy({"sandboxWorkloads": {"enabled": True, "defaultWorkload": "on-demand"}})
    assert spec(ObservedCluster([node()], [by_default]).decided()).mode is DesiredMode.ON_DEMAND
    (status,) = (
        write.status
        for write in ObservedCluster([node("on-demand")]).decided().writes
        if isinstance(write, PatchPolicyStatus)
    )
    assert status.nodes is not None
    assert (status.nodes.total, status.nodes.on_demand, status.nodes.vm_vgpu) == (1, 1, 0)


def test_a_gpunode_field_that_an_admin_set_is_not_overwritten() -> None:
    observed = gpu_node(owners={"mode": "kubectl-patch", "vgpuConfig": "gpuvirt"})
    found = spec(ObservedCluster([node("vm-passthrough")], gpu_nodes=[observed]).decided())
    assert found.mode is None
    assert found.vgpu_config == "default"
    assert found.origins is not None
    assert found.origins.mode == "set in this GpuNode by kubectl-patch"


def test_a_gpunode_is_deleted_with_its_node_unless_another_field_owner_set_fields() -> None:
    origins = Origins(mode="label", vgpu_config="label")
    ours = with_(gpu_node(), spec=Spec(mode=DesiredMode.VGPU, vgpu_config="default", origins=origins))
    gone = DeleteObject(WriteTarget(GPU_NODES, "node01"), "uid-1", "its node no longer exists")
    other = node("vm-vgpu", "node02")

    def deleted(observed: OwnedGpuNode, *nodes: Node) -> list[DeleteObject]:
        decided = ObservedCluster([other, *nodes], gpu_nodes=[observed]).decided()
        return [write for write in decided.writes if isinstance(write, DeleteObject)]

    assert deleted(ours) == [gone]
    assert deleted(ours, node("vm-vgpu")) == []
    assert deleted(gpu_node()) == [], "the controller never owned this GpuNode"
    by_hand = gpu_node(owners={"gpus": "kubectl-patch"})
    assert deleted(with_(by_hand, spec=Spec(mode=DesiredMode.VGPU, origins=origins))) == []


def test_a_second_pass_writes_nothing() -> None:
    first = ObservedCluster([node("vm-vgpu")]).decided()
    labels = next(write.patch for write in first.writes if isinstance(write, PatchNode)).metadata.labels
    labelled = NFD | {"nvidia.com/gpu.workload.config": "vm-vgpu"} | {k: v for k, v in labels.items() if v is not None}
    applied = spec(first)
    assert applied.mode is not None
    observed = with_(gpu_node(), spec=Spec(mode=applied.mode, vgpu_config="default", origins=applied.origins))
    observed_cluster = ObservedCluster([Node(Metadata(name="node01", labels=labelled))], gpu_nodes=[observed])
    second = observed_cluster.decided()
    (status,) = (write for write in second.writes if isinstance(write, PatchPolicyStatus))
    assert len(second.writes) == 1
    reported = [with_(observed_cluster.policies[0], status=status.status)]
    assert replace(observed_cluster, policies=reported).decided().writes == ()


def test_the_policy_names_the_nodes_that_are_not_ready_and_why() -> None:
    unseen = ready(ObservedCluster([node("vm-vgpu")], gpu_nodes=[gpu_node(seen=1)]).decided())
    assert (unseen.status, unseen.reason, unseen.observed_generation) == ("False", "NodesNotReady", 3)
    assert unseen.message == "node node01: the node agent has not read the newest spec of its GpuNode yet"
    ill = ready(ObservedCluster([node("vm-vgpu")], gpu_nodes=[gpu_node(against="VgpuInUse: pod vm-a")]).decided())
    assert ill.message == "node node01: VgpuInUse: pod vm-a"
    well = ObservedCluster([node("vm-vgpu")], gpu_nodes=[gpu_node()]).decided()
    assert (ready(well).status, ready(well).reason) == ("True", "Reconciled")
    assert states(well) == {"cluster-policy": State.READY}
    leaving = ready(ObservedCluster([node("container")], gpu_nodes=[gpu_node()]).decided())
    assert leaving.message == "node node01: the node becomes container once these GPUs are free: 0000:65:00.0 (vgpu)"


def test_a_cluster_without_gpus_is_ready_and_the_policy_reports_it() -> None:
    bare = Node(Metadata(name="node01"))
    found = ObservedCluster([bare]).decided()
    assert (ready(found).status, ready(found).reason) == ("True", "NoGPUNodes")
    assert not any(isinstance(write, ApplyGpuNode | PatchNode) for write in found.writes)


def test_the_oldest_policy_counts_and_a_younger_policy_is_reported_as_ignored() -> None:
    younger = policy({"sandboxWorkloads": {"enabled": False}}, "a", "2026-02-01T00:00:00Z")
    found = ObservedCluster([node("vm-vgpu")], [younger, policy()]).decided()
    assert states(found) == {"cluster-policy": State.NOT_READY, "a": State.IGNORED}
    assert spec(found).mode is DesiredMode.VGPU
    assert "ClusterPolicy cluster-policy is older" in ready(found, "a").message


def test_an_unreadable_kubevirt_sets_a_condition() -> None:
    forbidden = "list kubevirts: the API server answers 403: no"
    found = ObservedCluster([node()], kubevirt=KubeVirtObserved(problems=(forbidden,))).decided().progress.kubevirt
    assert found is not None
    assert (found.ready, found.reason) == (False, "KubeVirtStateUnknown")
    assert forbidden in found.message
    assert ObservedCluster([node()], kubevirt=KubeVirtObserved()).decided().progress.kubevirt is None
    # Without KubeVirt, unreadable VM kinds do not matter.
    without = KubeVirtObserved(kubevirts={}, problems=(forbidden,))
    assert ObservedCluster([node()], kubevirt=without).decided().progress.kubevirt is None


def test_an_unsupported_field_sets_a_condition() -> None:
    found = ObservedCluster([node("vm-vgpu")], [policy({"gds": {"enabled": True}})]).decided()
    (status,) = (write.status for write in found.writes if isinstance(write, PatchPolicyStatus))
    (condition,) = (condition for condition in status.conditions if condition.type == "UnsupportedField")
    assert condition.status == "True"
    assert "$.spec.gds" in condition.message


def test_without_a_policy_nothing_is_written() -> None:
    assert ObservedCluster([node("vm-vgpu")], []).decided() == Decisions()


@pytest.mark.parametrize(
    ("spec_fields", "says"),
    [
        (
            {"sandboxWorkloads": {"enabled": True, "mode": "xen"}},
            "ConfigInvalid: ClusterPolicy cluster-policy $.spec.sandboxWorkloads.mode",
        ),
        ({"vfioManager": {"enabled": "yes"}}, "$.spec.vfioManager.enabled"),
    ],
)
def test_an_unfeasible_policy_changes_nothing(spec_fields: dict[str, object], says: str) -> None:
    found = ObservedCluster([node("vm-vgpu")], [policy(spec_fields)]).decided()
    assert says in ready(found).message
    assert not any(isinstance(write, ApplyGpuNode | PatchNode) for write in found.writes)


def test_beside_nvidias_operator_nothing_is_written_without_coexist() -> None:
    observed_cluster = ObservedCluster(
        [node("vm-vgpu"), node("container", "node02")], other_operator="lease gpu-operator/x, held by y"
    )
    refused = observed_cluster.decided()
    assert ready(refused).reason == "OtherOperator"
    assert "--coexist" in ready(refused).message
    assert not any(isinstance(write, ApplyGpuNode | PatchNode) for write in refused.writes)
    beside = observed_cluster.decided(replace(SETTINGS, coexists=True))
    assert [write.target.name for write in beside.writes] == ["node01", "node01"]
    (patch,) = (write.patch for write in beside.writes if isinstance(write, PatchNode))
    ours = {NODE_LABEL: "true", VGPU_DRIVER_LABEL: "true", "nvidia.com/gpu.deploy.operands": "false"}
    assert patch.metadata.labels == ours


def test_nvidias_operator_is_active_for_as_long_as_its_lease_is_renewed() -> None:
    other, key = OtherOperator(), ObjectKey("gpu-operator", LEASE)

    def observe(allocated_to: str, version: str, now_s: float) -> None:
        lease = Lease(Metadata(LEASE, "gpu-operator", resource_version=version), LeaseSpec(allocated_to))
        other.observe(Delta({key: lease}, frozenset({key})), now_s)

    assert other.active(0.0) is None
    observe("pod-a", "1", 0.0)
    assert other.active(QUIET_S - 1) == f"lease gpu-operator/{LEASE}, held by pod-a"
    observe("pod-a", "2", QUIET_S - 1)
    assert other.active(QUIET_S + 1) is not None
    assert other.active(3 * QUIET_S) is None
    observe("", "3", 3 * QUIET_S)
    assert other.active(3 * QUIET_S) is None


def test_programs_that_pause_operands_are_found_by_their_pods() -> None:
    def pod(app: str, *, is_ready: bool) -> Pod:
        conditions = (core.Condition("Ready", "True" if is_ready else "False"),)
        metadata = Metadata(name=f"{app}-{is_ready}", labels={"app": app})
        return Pod(metadata, PodSpec("node01"), PodStatus("Running", conditions=conditions))

    manager, driver = "nvidia-vgpu-device-manager", "nvidia-vgpu-manager-daemonset"
    assert pods_by_node([pod(manager, is_ready=True)]) == {
        "node01": OperandPods(frozenset({manager}), frozenset({PAUSED_FOR_VGPUS}))
    }
    assert pods_by_node([pod(driver, is_ready=True)]) == {"node01": OperandPods(frozenset({driver}))}
    assert pods_by_node([pod(driver, is_ready=False)]) == {
        "node01": OperandPods(frozenset({driver}), frozenset({PAUSED_FOR_DRIVER}))
    }


def test_an_invalid_label_is_reported_once_and_leaves_the_spec_alone() -> None:
    found = ObservedCluster([node("kata")], gpu_nodes=[gpu_node()]).decided()
    assert not any(isinstance(write, ApplyGpuNode) for write in found.writes)
    reported = [announcement for announcement in found.announcements if announcement.about.kind == "Node"]
    assert [announcement.event.reason for announcement in reported] == ["ConfigInvalid"]
    assert found.nodes[0].against is not None
