"""Operands that are missing, differ from the desired state, or are no longer desired."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from msgspec.structs import replace as with_

from gpuvirt.controller.decisions import Decisions
from gpuvirt.controller.deployment import DIGEST_ANNOTATION, Existing, Mark, StoredObject, covers, digest_of
from gpuvirt.controller.nodes.resolve import ManagedMetadata, OwnedGpuNode
from gpuvirt.controller.settings import ControllerSettings
from gpuvirt.controller.writer import Write
from gpuvirt.controller.writes import ApplyObject, DeleteObject, PatchNode
from gpuvirt.kube.kinds.core import Condition, DaemonSetStatus, Node, NodeInfo, NodeStatus, Pod, PodSpec, PodStatus
from gpuvirt.kube.kinds.gpunode import Gpu, Status, Vgpu
from gpuvirt.kube.kinds.workloads import DaemonSet, Manifest
from gpuvirt.kube.labels import NODE_LABEL, TEMPLATE_LABEL
from gpuvirt.kube.objects import ObjectKey, key_of
from gpuvirt.kube.resources import Metadata, Resource
from gpuvirt.plain import Plain
from tests.controller.observedcluster import SETTINGS, ObservedCluster, node, policy

DEPLOYS = replace(SETTINGS, image="gpuvirt:1")
VM_NODES = [node("vm-passthrough")]


def applied(decisions: Decisions) -> dict[str, ApplyObject]:
    return {
        f"{write.target.resource.plural}/{write.target.name}": write
        for write in decisions.writes
        if isinstance(write, ApplyObject)
    }


def deleted(decisions: Decisions) -> list[str]:
    return [write.target.name for write in decisions.writes if isinstance(write, DeleteObject)]


def stored(write: ApplyObject, *, edited: str = "", status: DaemonSetStatus | None = None) -> StoredObject:
    """Return an applied object as the API server has it, perhaps with a text in it changed by hand."""
    text = msgspec.json.encode(write.content).decode()
    if edited:
        old, _, new = edited.partition("->")
        assert old in text
        text = text.replace(old, new)
    found = msgspec.json.decode(text, type=StoredObject)
    return with_(
        found, status=status or DaemonSetStatus(observed_generation=1), metadata=with_(found.metadata, generation=1)
    )


def deployed_objects(
    decisions: Decisions, *pods: Pod, status: DaemonSetStatus | None = None, edited: str = ""
) -> Existing:
    """Return the objects after all are applied; `edited` changes the DaemonSet by hand: `old->new`."""
    found: dict[Resource, dict[ObjectKey, StoredObject]] = {}
    for write in applied(decisions).values():
        is_set = isinstance(write.content, DaemonSet)
        one = stored(write, edited=edited if is_set else "", status=status if is_set else None)
        found.setdefault(write.target.resource, {})[key_of(one)] = one
    return Existing(found, {key_of(pod): pod for pod in pods})


def complete_decisions(observed_cluster: ObservedCluster, settings: ControllerSettings = DEPLOYS) -> Decisions:
    """Return all decisions until no object is missing, as one decision."""
    writes = list[Write]()
    while True:
        decisions = observed_cluster.decided(settings)
        fresh = [write for write in decisions.writes if isinstance(write, ApplyObject)]
        assert not {write.target for write in fresh} & {write.target for write in writes}
        writes += fresh
        if not fresh:
            return replace(decisions, writes=tuple(writes))
        observed_cluster = replace(
            observed_cluster, existing=deployed_objects(replace(decisions, writes=tuple(writes)))
        )


def again(before: Existing) -> Decisions:
    return ObservedCluster(VM_NODES, existing=before).decided(DEPLOYS)


def agent_pod(decisions: Decisions, *, ready: bool = True, template: str | None = None) -> Pod:
    """Return a pod of the agent's DaemonSet, of the current or another template."""
    content = applied(decisions)["daemonsets/gpuvirt-node"].content
    assert isinstance(content, DaemonSet)
    labels = dict(content.spec.template.metadata.labels)
    if template is not None:
        labels[TEMPLATE_LABEL] = template
    conditions = (Condition("Ready", "True" if ready else "False"),)
    metadata = Metadata(name="gpuvirt-node-x", namespace="gpu-operator", uid="u", labels=labels)
    return Pod(metadata, PodSpec("node01"), PodStatus("Running", conditions=conditions))


WELL = DaemonSetStatus(observed_generation=1, desired_number_scheduled=1, number_available=1)


def test_a_missing_object_is_applied_once() -> None:
    first = complete_decisions(ObservedCluster(VM_NODES))
    assert {"daemonsets/gpuvirt-node", "configmaps/gpuvirt-node"} <= applied(first).keys()
    second = again(deployed_objects(first, agent_pod(first), status=WELL))
    assert not applied(second)
    assert not deleted(second)
    assert [(operand.name, operand.against) for operand in second.operands] == [("gpuvirt-node", None)]


def test_objects_are_applied_after_the_objects_they_need() -> None:
    steps, observed_cluster = list[set[str]](), ObservedCluster(VM_NODES)
    first = complete_decisions(observed_cluster)
    while fresh := applied(observed_cluster.decided(DEPLOYS)).keys():
        steps.append(set(fresh))
        kept = [write for name, write in applied(first).items() if name in set[str]().union(*steps)]
        observed_cluster = replace(observed_cluster, existing=deployed_objects(replace(first, writes=tuple(kept))))
    assert steps == [
        {"configmaps/gpuvirt-node", "roles/gpuvirt-node-configs"},
        {"rolebindings/gpuvirt-node-configs"},
        {"daemonsets/gpuvirt-node"},
    ]


def test_a_daemonset_upgrade_waits_for_its_config_map() -> None:
    first = complete_decisions(ObservedCluster(VM_NODES))
    before = deployed_objects(first, agent_pod(first), status=WELL)
    other = policy({"vgpuDeviceManager": {"enabled": True, "config": {"default": "A10-4Q"}}})
    assert applied(ObservedCluster(VM_NODES, [other], existing=before).decided(DEPLOYS)).keys() == {
        "configmaps/gpuvirt-node"
    }


def test_without_our_image_nothing_is_deployed_or_deleted() -> None:
    first = complete_decisions(ObservedCluster(VM_NODES))
    found = ObservedCluster(VM_NODES, existing=deployed_objects(first)).decided(SETTINGS)
    assert not applied(found)
    assert not deleted(found)


def test_an_object_edited_by_hand_is_restored() -> None:
    first = complete_decisions(ObservedCluster(VM_NODES))
    edited = deployed_objects(first, agent_pod(first), status=WELL, edited='"image":"gpuvirt:1"->"image":"bad:1"')
    assert applied(again(edited)).keys() == {"daemonsets/gpuvirt-node"}


def test_a_value_that_the_api_server_normalizes_is_not_applied_again() -> None:
    first = complete_decisions(ObservedCluster(VM_NODES))
    differs = deployed_objects(first, agent_pod(first), status=WELL, edited='"memory":"48Mi"->"memory":"50331648"')
    (write,) = applied(again(differs)).values()
    marked = replace(differs, marks={write.target: Mark(digest_of(unsigned(write)), "1")})
    assert not applied(again(marked))
    newer = replace(differs, marks={write.target: Mark(digest_of(unsigned(write)), "0")})
    assert applied(again(newer))


def unsigned(write: ApplyObject) -> Manifest:
    metadata = write.content.metadata
    kept = {key: value for key, value in metadata.annotations.items() if key != DIGEST_ANNOTATION}
    return with_(write.content, metadata=with_(metadata, annotations=kept))


def test_an_operand_that_the_policy_disables_is_deleted() -> None:
    first = complete_decisions(ObservedCluster(VM_NODES))
    before = deployed_objects(first, agent_pod(first), status=WELL)
    off = policy({"sandboxDevicePlugin": {"enabled": False}})
    found = ObservedCluster(VM_NODES, [off], existing=before).decided(DEPLOYS)
    assert "gpuvirt-node" in deleted(found)


def test_accounts_and_settings_are_deleted_after_the_pods() -> None:
    first = complete_decisions(ObservedCluster(VM_NODES))
    off = policy({"sandboxDevicePlugin": {"enabled": False}})
    before = deployed_objects(first, agent_pod(first), status=WELL)

    def gone(found: Existing) -> list[str]:
        return sorted(deleted(ObservedCluster(VM_NODES, [off], existing=found).decided(DEPLOYS)))

    assert gone(before) == ["gpuvirt-node"], "the DaemonSet"
    left = {resource: objects for resource, objects in before.stored.items() if resource.plural != "daemonsets"}
    assert gone(replace(before, stored=left)) == []
    assert gone(Existing(left)) == ["gpuvirt-node", "gpuvirt-node-configs", "gpuvirt-node-configs"]


def test_the_vgpu_manager_of_running_vms_stays_and_is_reported() -> None:
    manager = {"enabled": True, "repository": "registry.example.com", "image": "vgpu-manager", "version": "1"}
    system = {"gpuvirt.io/os-release.id": "ubuntu", "gpuvirt.io/os-release.version-id": "22.04"}
    labels = {**node("vm-vgpu").metadata.labels, **system, "gpuvirt.io/os": "ubuntu22.04"}
    nodes = [Node(Metadata(name="node01", labels=labels))]
    first = complete_decisions(ObservedCluster(nodes, [policy({"vgpuManager": manager})]))
    driver = "nvidia-vgpu-manager-daemonset-ubuntu22.04"
    assert f"daemonsets/{driver}" in applied(first)
    before = deployed_objects(first, status=WELL)
    used = vgpu_node(users=("pod default/vm-a",))
    kept = ObservedCluster(nodes, gpu_nodes=[used], existing=before).decided(DEPLOYS)
    assert driver not in deleted(kept)
    (against,) = (operand.against for operand in kept.operands if operand.name == driver)
    assert against is not None
    assert "VMs have vGPUs on node01" in against
    assert driver in deleted(ObservedCluster(nodes, gpu_nodes=[vgpu_node(users=())], existing=before).decided(DEPLOYS))


def test_beside_nvidias_operator_agents_run_though_its_policy_has_no_vms() -> None:
    theirs = policy(
        {"sandboxWorkloads": {"enabled": False}, "driver": {"repository": "r", "image": "i", "version": "1"}}
    )
    found = complete_decisions(ObservedCluster(VM_NODES, [theirs]), replace(DEPLOYS, coexists=True))
    assert "daemonsets/gpuvirt-node" in applied(found)
    assert not any("driver" in name for name in applied(found))


def test_the_agent_stays_until_vms_end_after_vms_are_disabled() -> None:
    off = policy({"sandboxWorkloads": {"enabled": False}})
    used = vgpu_node(users=("pod default/vm-a",))
    observed_cluster = ObservedCluster([node("vm-vgpu")], [off], gpu_nodes=[used])
    found = observed_cluster.decided(DEPLOYS)
    assert "daemonsets/gpuvirt-node" in applied(complete_decisions(observed_cluster)), (
        "only the agent can return the GPUs"
    )
    (patch,) = (write.patch for write in found.writes if isinstance(write, PatchNode))
    assert patch.metadata.labels[NODE_LABEL] == "true"
    done = complete_decisions(ObservedCluster([node("vm-vgpu")], [off]))
    assert "daemonsets/gpuvirt-node" not in applied(done)


def vgpu_node(users: tuple[str, ...]) -> OwnedGpuNode:
    vgpus = (Vgpu(id="a97c1d93-75b0-5502-bafc-fef8d1839ded", type="NVIDIA A10-4Q", users=users),)
    status = Status(gpus=(Gpu(address="0000:65:00.0", mode="vgpu", vgpus=vgpus),))
    return OwnedGpuNode(metadata=ManagedMetadata(name="node01"), status=status)


def test_a_missing_image_stops_only_its_own_operand() -> None:
    odd = policy({"vgpuManager": {"enabled": True, "version": "1"}})
    found = complete_decisions(ObservedCluster(VM_NODES, [odd]))
    assert "daemonsets/gpuvirt-node" in applied(found)
    assert any("$.spec.vgpuManager" in operand for operand in found.progress.operands)


@pytest.mark.parametrize(
    ("runtimes", "served"), [(("", ""), True), (("", "crio://1"), True), (("docker://1", ""), False)]
)
def test_nodes_without_a_reported_container_runtime_do_not_count(runtimes: tuple[str, ...], served: bool) -> None:
    toolkit = {"enabled": True, "repository": "registry.example", "image": "toolkit", "version": "1"}
    labels = {**node("container").metadata.labels, "gpuvirt.io/os": "ubuntu22.04"}
    nodes = [
        Node(
            Metadata(name=f"node{number}", labels=labels),
            status=NodeStatus(node_info=NodeInfo(container_runtime_version=runtime)),
        )
        for number, runtime in enumerate(runtimes)
    ]
    found = complete_decisions(ObservedCluster(nodes, [policy({"toolkit": toolkit})]))
    assert ("daemonsets/nvidia-container-toolkit-daemonset" in applied(found)) is served
    assert any("nodes run the container runtime docker" in operand for operand in found.progress.operands) is not served


def test_outdated_agent_pods_are_replaced_and_unready_pods_are_named() -> None:
    first = complete_decisions(ObservedCluster(VM_NODES))
    old = again(deployed_objects(first, agent_pod(first, template="old"), status=WELL))
    assert deleted(old) == ["gpuvirt-node-x"]
    late = DaemonSetStatus(observed_generation=1, desired_number_scheduled=1, number_available=0)
    named = again(deployed_objects(first, agent_pod(first, ready=False), status=late))
    assert named.operands[0].against == "0 of 1 pods are ready; not ready: gpuvirt-node-x on node01"


PLAINS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
    max_leaves=10,
)


@given(PLAINS, st.dictionaries(st.text(min_size=3, max_size=4), PLAINS, max_size=2))
def test_additional_fields_are_no_drift(desired: Plain, more: dict[str, Plain]) -> None:
    assert covers(desired, desired)
    if isinstance(desired, dict):
        assert covers(desired, {**more, **desired})
        assert not any(
            covers(desired, {k: v for k, v in desired.items() if k != key})
            for key in desired
            if desired[key] is not None
        )
