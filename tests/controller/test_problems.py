"""Nodes without operands and disabled nodes, in the ClusterPolicy's status and in `gpuvirt status`."""

from collections.abc import Mapping, Sequence
from random import SystemRandom

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from msgspec.structs import replace as with_

from gpuvirt.clock import RealClock
from gpuvirt.controller import process
from gpuvirt.controller.clusterstatus import Row, rows
from gpuvirt.controller.controller import Controller, ControllerDependencies
from gpuvirt.controller.decisions import Decisions
from gpuvirt.controller.nodes.problems import Deployer
from gpuvirt.controller.nodes.resolve import OwnedGpuNode
from gpuvirt.controller.policy.status import verdict_of
from gpuvirt.controller.settings import ControllerSettings
from gpuvirt.controller.writes import ApplyGpuNode, ApplyObject, PatchPolicyStatus
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, State, choose
from gpuvirt.kube.kinds.core import Condition, Node, NodeStatus, Pod, PodSpec, PodStatus
from gpuvirt.kube.kinds.gpunode import GpuNode, Status
from gpuvirt.kube.labels import DEPLOY, NODE_LABEL, OPERANDS_LABEL, SETS
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.workload import LABEL, Workload
from tests.controller.observedcluster import NFD, SETTINGS, ObservedCluster, gpu_node, node, policy, ready

DEPLOYS = replace(SETTINGS, image="gpuvirt:1")
MANAGER = {"enabled": True, "repository": "registry.example", "image": "vgpu-manager", "version": "1"}
OS = {"gpuvirt.io/os": "ubuntu22.04"}


def labelled(workload: Workload, name: str = "node01", /, **more: str) -> Node:
    """Return a node as the controller has labelled it; `more` are labels without dots and slashes in their names."""
    deploy = {f"{DEPLOY}{component}": "true" for component in SETS[workload]}
    base = {**NFD, **deploy, LABEL: workload.value, "nvidia.com/gpu.present": "true", "kubernetes.io/os": "linux"}
    return Node(Metadata(name=name, labels=base | more))


def with_labels(found: Node, labels: Mapping[str, str]) -> Node:
    return with_(found, metadata=with_(found.metadata, labels={**found.metadata.labels, **labels}))


def pod(app: str, name: str = "node01", *, is_ready: bool = True) -> Pod:
    conditions = (Condition("Ready", "True" if is_ready else "False"),)
    metadata = Metadata(name=f"{app}-x", labels={"app": app})
    return Pod(metadata, PodSpec(name), PodStatus("Running", conditions=conditions))


def problem_text(observed_cluster: ObservedCluster, settings: ControllerSettings = DEPLOYS) -> str:
    """Return the problem of the only node of a observed_cluster."""
    (verdict,) = observed_cluster.decided(settings).nodes
    return verdict.against or ""


def whole(kept: OwnedGpuNode) -> GpuNode:
    """Return a GpuNode as `gpuvirt status` reads it."""
    assert kept.status is None or isinstance(kept.status, Status)
    return GpuNode(metadata=kept.metadata, spec=kept.spec, status=kept.status)


def shown(observed_cluster: ObservedCluster, settings: ControllerSettings = DEPLOYS) -> Sequence[Row]:
    """Return the rows of `gpuvirt status` for a observed_cluster."""
    choice = choose(observed_cluster.policies)
    assert choice is not None
    assert isinstance(choice.policy, ClusterPolicy)
    has_image = settings.image is not None
    deployer = Deployer(choice.policy, has_image=has_image, has_daemon_sets=has_image)
    return rows(
        observed_cluster.nodes,
        {node.metadata.name: whole(node) for node in observed_cluster.gpu_nodes},
        observed_cluster.pods,
        deployer,
    )


def unready_components(
    observed_cluster: ObservedCluster, settings: ControllerSettings = DEPLOYS
) -> set[tuple[str, str]]:
    """Return the component and state of all unready rows of `gpuvirt status`."""
    return {(row.component, row.state) for row in shown(observed_cluster, settings) if not row.ready}


# A controller without an image


@pytest.mark.parametrize("workload", list(Workload))
def test_a_controller_without_an_image_is_reported_for_every_waiting_node(workload: Workload) -> None:
    observed_cluster = ObservedCluster([labelled(workload, **OS)])
    condition = ready(observed_cluster.decided(SETTINGS))
    assert (condition.status, condition.reason) == ("False", "ImageUnknown")
    assert "the controller was started without the image to deploy" in condition.message
    assert "--image or GPUVIRT_IMAGE" in condition.message
    assert {state for _, state in unready_components(observed_cluster, SETTINGS)} == {"ImageUnknown"}
    assert all("GPUVIRT_IMAGE" in row.detail for row in shown(observed_cluster, SETTINGS))


def test_agents_deployed_by_other_means_need_no_image() -> None:
    observed_cluster = ObservedCluster([labelled(Workload.VGPU)], gpu_nodes=[gpu_node()])
    assert ready(observed_cluster.decided(SETTINGS)).reason == "Reconciled"
    assert unready_components(observed_cluster, SETTINGS) == set()
    offers = with_(labelled(Workload.CONTAINER, **OS), status=NodeStatus(allocatable={"nvidia.com/gpu": "8"}))
    assert problem_text(ObservedCluster([offers]), SETTINGS) == ""


# Disabled nodes


@pytest.mark.parametrize("workload", list(Workload))
@pytest.mark.parametrize("settings", [SETTINGS, DEPLOYS])
def test_a_disabled_node_does_not_count(workload: Workload, settings: ControllerSettings) -> None:
    off = node(workload.value, gpu_deploy_operands="false")
    ill = gpu_node(against="VgpuInUse: pod vm-a")
    observed_cluster = ObservedCluster([with_labels(off, {"nvidia.com/gpu.present": "true"})], gpu_nodes=[ill])
    found = observed_cluster.decided(settings)
    assert found.nodes == ()
    assert (ready(found).status, ready(found).reason) == ("True", "NoGPUNodes")
    assert ready(found).message == f"every node with GPUs is labelled {OPERANDS_LABEL}=false: node01"
    (status,) = (write.status for write in found.writes if isinstance(write, PatchPolicyStatus))
    assert status.state is State.READY
    assert status.nodes is not None
    assert (status.nodes.total, status.nodes.ready) == (0, 0)
    assert not [write for write in found.writes if isinstance(write, ApplyObject) and "driver" in write.target.name]
    assert not [announcement for announcement in found.announcements if announcement.about.kind == "Node"], (
        "no program drains the node"
    )
    (row,) = shown(observed_cluster, settings)
    assert (row.component, row.ready, row.state) == ("operands", True, "Off")
    assert row.detail == f"label {OPERANDS_LABEL}=false"


def test_beside_nvidias_operator_the_disabling_label_is_gpuvirts_own() -> None:
    ours = node("vm-vgpu", gpu_deploy_operands="false")
    ours = with_labels(ours, {NODE_LABEL: "true", "nvidia.com/gpu.present": "true"})
    found = ObservedCluster([ours], gpu_nodes=[gpu_node()]).decided(replace(SETTINGS, coexists=True))
    assert [verdict.name for verdict in found.nodes] == ["node01"]


# Disabled components, and drivers without an operating system


@pytest.mark.parametrize(
    ("fields", "labels", "where"),
    [
        ({"devicePlugin": {"enabled": False}}, {}, "$.spec.devicePlugin.enabled is false"),
        (
            {name: {"enabled": False} for name in ("driver", "toolkit", "devicePlugin", "dcgm", "dcgmExporter", "gfd")},
            {},
            "$.spec.driver.enabled is false",
        ),
        ({}, {f"{DEPLOY}device-plugin": "false"}, "label nvidia.com/gpu.deploy.device-plugin=false"),
    ],
)
@pytest.mark.parametrize("settings", [SETTINGS, DEPLOYS])
def test_a_container_node_whose_components_are_off_is_never_ready(
    fields: Mapping[str, object], labels: Mapping[str, str], where: str, settings: ControllerSettings
) -> None:
    off = with_labels(labelled(Workload.CONTAINER), {**OS, **labels})
    observed_cluster = ObservedCluster([off], [policy(fields)])
    assert "ComponentsOff" in problem_text(observed_cluster, settings)
    assert where in problem_text(observed_cluster, settings)
    assert not verdict_of(observed_cluster.decided(settings).progress).ready
    assert unready_components(observed_cluster, settings) == {("device-plugin", "ComponentsOff")}
    served = with_(off, status=NodeStatus(allocatable={"nvidia.com/mig-1g.10gb": "7", "cpu": "8"}))
    assert problem_text(replace(observed_cluster, nodes=[served]), settings) == "", (
        "another device plugin offers the GPUs"
    )


@pytest.mark.parametrize("workload", [Workload.PASSTHROUGH, Workload.VGPU])
def test_a_node_for_vms_without_an_agent_by_policy_does_not_repeat_the_last_report(workload: Workload) -> None:
    off = policy({"sandboxDevicePlugin": {"enabled": False}})
    observed_cluster = ObservedCluster([labelled(workload)], [off], gpu_nodes=[gpu_node(mode="passthrough")])
    assert "ComponentsOff" in problem_text(observed_cluster)
    assert "$.spec.sandboxDevicePlugin.enabled is false" in problem_text(observed_cluster)
    assert {state for _, state in unready_components(observed_cluster)} == {"ComponentsOff"}


@pytest.mark.parametrize("workload", [Workload.VGPU, Workload.ON_DEMAND])
def test_a_vgpu_manager_that_can_not_be_rendered_is_reported(workload: Workload) -> None:
    observed_cluster = ObservedCluster(
        [labelled(workload)], [policy({"vgpuManager": MANAGER})], [gpu_node()], [pod("gpuvirt-node")]
    )
    assert "OsUnknown: the vGPU manager can't be deployed" in problem_text(observed_cluster)
    assert "gpuvirt.io/os=ubuntu22.04" in problem_text(observed_cluster)
    assert unready_components(observed_cluster) == {("vgpu-manager", "OsUnknown")}
    known = [with_labels(observed_cluster.nodes[0], OS)]
    assert problem_text(replace(observed_cluster, nodes=known)) == ""
    discovered = {"gpuvirt.io/os-release.id": "ubuntu", "gpuvirt.io/os-release.version-id": "22.04"}
    assert problem_text(replace(observed_cluster, nodes=[with_labels(observed_cluster.nodes[0], discovered)])) == ""
    preinstalled = with_labels(observed_cluster.nodes[0], {f"{DEPLOY}vgpu-manager": "false"})
    assert problem_text(replace(observed_cluster, nodes=[preinstalled])) == ""
    assert problem_text(replace(observed_cluster, policies=[policy()])) == ""


def test_a_driver_that_can_not_be_rendered_is_reported_and_the_other_components_are_deployed() -> None:
    parts = {name: {"repository": "r", "image": name.lower(), "version": "1"} for name in ("toolkit", "devicePlugin")}
    manager = {"repository": "r", "image": "manager", "version": "1"}
    driver = {"driver": {"repository": "r", "image": "driver", "version": "1", "manager": manager}}
    observed_cluster = ObservedCluster([labelled(Workload.CONTAINER)], [policy({**parts, **driver})])
    found = observed_cluster.decided(DEPLOYS)
    assert "OsUnknown: NVIDIA's driver can't be deployed" in (found.nodes[0].against or "")
    assert ("driver", "OsUnknown") in unready_components(observed_cluster)
    deployed = {write.target.name for write in found.writes if isinstance(write, ApplyObject)}
    assert {"nvidia-container-toolkit-daemonset", "nvidia-device-plugin-daemonset"} <= deployed
    by_host = replace(observed_cluster, policies=[policy({**parts, "driver": {"enabled": False}})])
    assert "OsUnknown" not in problem_text(by_host)


def test_a_node_that_another_plugin_serves_is_ready_and_says_so() -> None:
    served = Node(Metadata(name="node01", labels=dict(NFD)), NodeStatus(allocatable={"nvidia.com/gpu": "2"}))
    found = ObservedCluster([served], [policy()]).decided(DEPLOYS)
    assert [verdict.against for verdict in found.nodes] == [None]
    (event,) = (each.event for each in found.announcements if each.about.name == "node01")
    assert event.reason == "LeftAlone"
    assert "a device plugin that gpuvirt did not deploy offers nvidia.com/gpu" in event.note
    assert "label the node nvidia.com/gpu.deploy.device-plugin=false" in event.note
    present = with_labels(served, {"nvidia.com/gpu.present": "true"})
    deployer = Deployer(ClusterPolicy(metadata=Metadata(name="p")), has_image=True, has_daemon_sets=True)
    (row,) = rows([present], {}, [], deployer)
    assert (row.component, row.ready, row.state, row.detail) == ("operands", True, "LeftAlone", event.note)
    assert rows([present], {}, [], replace(deployer, beside=True)) == ()
    beside = ObservedCluster([served], [policy()]).decided(replace(DEPLOYS, coexists=True))
    assert not [each for each in beside.announcements if each.about.name == "node01"]


# Missing agents


def test_the_report_of_an_agent_without_a_pod_does_not_count() -> None:
    observed_cluster = ObservedCluster([labelled(Workload.VGPU)], gpu_nodes=[gpu_node()])
    lost = "PodMissing: DaemonSet gpuvirt-node has no pod on this node; the agent's last report may be outdated"
    assert lost in problem_text(observed_cluster)
    assert {state for _, state in unready_components(observed_cluster)} == {"PodMissing"}
    assert problem_text(replace(observed_cluster, pods=[pod("gpuvirt-node")])) == ""
    elsewhere = replace(observed_cluster, pods=[pod("gpuvirt-node", "node02")])
    assert "PodMissing" in problem_text(elsewhere)
    waits = replace(observed_cluster, pods=[pod("gpuvirt-node", is_ready=False)])
    assert unready_components(waits) == {("gpuvirt-node", "Running")}


def test_a_leaving_node_without_an_agent_reports_both_problems() -> None:
    leaving = with_labels(labelled(Workload.VGPU), {LABEL: "container"})
    found = problem_text(ObservedCluster([leaving], gpu_nodes=[gpu_node()]))
    assert "the node becomes container once these GPUs are free: 0000:65:00.0" in found
    assert "PodMissing" in found


def test_a_container_node_without_a_pod_of_the_device_plugin_is_reported() -> None:
    observed_cluster = ObservedCluster([labelled(Workload.CONTAINER, **OS)])
    assert "PodMissing: DaemonSet nvidia-device-plugin-daemonset has no pod" in problem_text(observed_cluster)
    assert problem_text(replace(observed_cluster, pods=[pod("nvidia-device-plugin-daemonset")])) == ""
    paused = with_labels(observed_cluster.nodes[0], {f"{DEPLOY}device-plugin": "paused-for-driver-upgrade"})
    assert problem_text(replace(observed_cluster, nodes=[paused])) == ""


LABELS = st.dictionaries(
    st.sampled_from(
        [
            LABEL,
            OPERANDS_LABEL,
            NODE_LABEL,
            "gpuvirt.io/os",
            *(f"{DEPLOY}{label}" for label in SETS[Workload.CONTAINER]),
        ]
    ),
    st.sampled_from(["true", "false", "container", "vm-passthrough", "vm-vgpu", "paused-for-driver-upgrade"]),
)
FIELDS = st.dictionaries(
    st.sampled_from(["driver", "toolkit", "devicePlugin", "sandboxDevicePlugin", "vgpuManager"]),
    st.sampled_from([{"enabled": False}, {"enabled": True}, {}]),
)


@given(LABELS, FIELDS, st.booleans(), st.booleans(), st.booleans())
def test_the_policy_and_status_agree(
    labels: Mapping[str, str],
    fields: Mapping[str, object],
    has_image: bool,
    reports: bool,
    has_pod: bool,
) -> None:
    one = with_labels(node(), {**labels, "nvidia.com/gpu.present": "true"})
    pods = [pod("gpuvirt-node"), pod("nvidia-device-plugin-daemonset")] if has_pod else []
    observed: list[OwnedGpuNode] = [gpu_node(mode="passthrough")] if reports else []
    observed_cluster = ObservedCluster([one], [policy(fields)], observed, pods)
    settings = DEPLOYS if has_image else SETTINGS
    found: Decisions = observed_cluster.decided(settings)
    codes = {str(code) for verdict in found.nodes for code in verdict.codes}
    states = {row.state for row in shown(observed_cluster, settings)}
    assert codes <= states
    assert ("Off" in states) == (not found.nodes)
    if codes:
        assert not verdict_of(found.progress).ready
    assert not any(isinstance(write, ApplyGpuNode) and write.target.name != "node01" for write in found.writes)


def test_metrics_count_the_nodes_that_count_with_their_codes() -> None:
    off = with_labels(node("vm-vgpu", "node02"), {OPERANDS_LABEL: "false"})
    observed_cluster = ObservedCluster([labelled(Workload.CONTAINER), off])
    dependencies = ControllerDependencies(
        Client(Credentials("127.0.0.1", 1, "gpu-operator", token=b"x")), RealClock(), SystemRandom()
    )
    term = Controller(dependencies, SETTINGS)
    term.decisions = observed_cluster.decided(SETTINGS)
    page = process.page(term).splitlines()
    assert "gpu_operator_gpu_nodes_total 1" in page
    assert 'gpuvirt_nodes{workload="container",ready="false"} 1' in page
    assert 'gpuvirt_controller_reasons{reason="ImageUnknown"} 1' in page
    assert 'gpuvirt_controller_reasons{reason="OsUnknown"} 1' in page
    assert not [line for line in page if "node02" in line]
