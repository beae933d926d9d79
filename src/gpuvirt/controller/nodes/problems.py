"""Why a node's GPUs are not offered, apart from what its agent reports: each problem with its component."""

from collections.abc import Iterator, Mapping

import msgspec

from gpuvirt.controller.nodes.placement import NodePlacement
from gpuvirt.controller.operands import agent
from gpuvirt.controller.operands.inputs import OperandName
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy
from gpuvirt.kube.kinds.gpunode import ReadGpuNode
from gpuvirt.kube.labels import (
    AGENT,
    GPU_RESOURCES,
    OPERANDS_LABEL,
    OS_LABEL,
    OS_SOURCES,
    PAUSED,
    VGPU_DRIVER,
    WITH_VGPU_DRIVER,
    deploy_label,
)
from gpuvirt.model.desired.workload import LABEL, Workload
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, clusterproblems

DEVICE_PLUGIN = "device-plugin"
CONTAINER_SWITCHES = {"driver": "driver", "container-toolkit": "toolkit", DEVICE_PLUGIN: "devicePlugin"}
"""The components without which containers get no GPUs, and their parts of the ClusterPolicy."""


class NodeProblem(msgspec.Struct, frozen=True):
    """One problem of one node."""

    component: str
    """The affected component, by its name in `nvidia.com/gpu.deploy.*`."""
    reason: Reason


class NodeVerdict(msgspec.Struct, frozen=True):
    """Whether one node with GPUs is ready."""

    name: str
    workload: Workload | None
    against: str | None = None
    """Why the node is not ready; None if it is."""
    codes: frozenset[ReasonCode] = frozenset()
    """The codes of the problems for which its GPUs are not offered."""


class Deployer(msgspec.Struct, frozen=True):
    """The policy that operands are deployed by, and whether the controller can deploy them."""

    policy: ClusterPolicy
    has_image: bool
    """Whether the controller has gpuvirt's image in its settings, without which it deploys nothing."""
    has_daemon_sets: bool
    """Whether DaemonSets of the controller's namespace run the components; if not, agents may run in another way."""
    beside: bool = False
    """Whether NVIDIA's operator manages the nodes that are for containers."""


class ObservedNode(msgspec.Struct, frozen=True):
    """The facts of one node from which its problems follow."""

    labels: Mapping[str, str]
    placement: NodePlacement
    gpu_node: ReadGpuNode | None = None
    pods: frozenset[str] = frozenset()
    """The operands with a pod on the node, by their label `app`."""
    resources: frozenset[str] = frozenset()
    """The extended resources of which the node has at least one."""

    @property
    def serves_containers(self) -> bool:
        """Whether containers can request its GPUs, from any device plugin."""
        return any(name.startswith(GPU_RESOURCES) for name in self.resources)


def problems_of(node: ObservedNode, deployer: Deployer) -> tuple[NodeProblem, ...]:
    """Return why a node's GPUs are not offered."""
    placement = node.placement
    if not placement.counts or placement.workload is None:
        return ()
    if placement.workload is Workload.CONTAINER and not placement.leaving:
        return () if deployer.beside or placement.other_plugin else tuple(_of_container_node(node, deployer))
    return tuple(_of_agents_node(node, deployer))


def _of_agents_node(node: ObservedNode, deployer: Deployer) -> Iterator[NodeProblem]:
    policy = deployer.policy
    reported = node.gpu_node is not None and node.gpu_node.status is not None
    switch = agent.switched_off_by(policy)
    if off := (_switch(policy, switch) if switch else None) or _off_by_label(node.labels, AGENT):
        users = "pods in units" if node.placement.workload is Workload.SHARED else "VMs"
        follows = f"no GPU is offered to {users}"
        yield NodeProblem(AGENT, _components_off("the node agent", follows, off))
    elif not deployer.has_image:
        if not reported:
            yield NodeProblem(AGENT, _image_unknown())
    elif deployer.has_daemon_sets and OperandName.AGENT not in node.pods:
        known = "; the agent's last report may be outdated" if reported else ""
        yield NodeProblem(AGENT, clusterproblems.pod_missing(f"DaemonSet {OperandName.AGENT}", known))
    manager, needs_driver = policy.spec.vgpu_manager, node.placement.workload in WITH_VGPU_DRIVER
    desired = manager.enabled is True and policy.spec.driver.use_nvidia_driver_crd is not True
    if needs_driver and desired and _needs_os(node.labels, VGPU_DRIVER):
        yield NodeProblem(VGPU_DRIVER, _os_unknown("the vGPU manager"))


def _of_container_node(node: ObservedNode, deployer: Deployer) -> Iterator[NodeProblem]:
    policy = deployer.policy
    off = dict(_container_components_off(node.labels, policy))
    if not node.serves_containers:
        if DEVICE_PLUGIN in off:
            yield NodeProblem(
                DEVICE_PLUGIN,
                _components_off(", ".join(off), "no GPU is offered to containers", "; ".join(off.values())),
            )
        elif not deployer.has_image:
            yield NodeProblem(DEVICE_PLUGIN, _image_unknown())
        elif deployer.has_daemon_sets and OperandName.DEVICE_PLUGIN not in node.pods and not _paused(node.labels):
            missing = clusterproblems.pod_missing(f"DaemonSet {OperandName.DEVICE_PLUGIN}", "")
            yield NodeProblem(DEVICE_PLUGIN, missing)
    if (
        "driver" not in off
        and policy.spec.driver.use_nvidia_driver_crd is not True
        and _needs_os(node.labels, "driver")
    ):
        yield NodeProblem("driver", _os_unknown("NVIDIA's driver"))


def _container_components_off(labels: Mapping[str, str], policy: ClusterPolicy) -> Iterator[tuple[str, str]]:
    """Yield the disabled components, each with the field or label that disables it."""
    spec = policy.spec
    enabled = {"driver": spec.driver, "container-toolkit": spec.toolkit, DEVICE_PLUGIN: spec.device_plugin}
    for component, part in CONTAINER_SWITCHES.items():
        switch = _switch(policy, part) if enabled[component].enabled is False else None
        if off := switch or _off_by_label(labels, component):
            yield component, off


def _switch(policy: ClusterPolicy, part: str) -> str:
    return f"ClusterPolicy {policy.metadata.name} $.spec.{part}.enabled is false"


def _off_by_label(labels: Mapping[str, str], component: str) -> str | None:
    """Return the label that keeps a component off a node; None if it is missing, since the controller will set it."""
    value = labels.get(deploy_label(component), "")
    return None if value in {"", "true"} or PAUSED in value else f"label {deploy_label(component)}={value}"


def _paused(labels: Mapping[str, str]) -> bool:
    return PAUSED in labels.get(deploy_label(DEVICE_PLUGIN), "")


def _needs_os(labels: Mapping[str, str], component: str) -> bool:
    """Return whether a driver's image cannot be chosen because the node's operating system is unknown."""
    known = OS_LABEL in labels or any(identity in labels and version in labels for identity, version in OS_SOURCES)
    return not known and _off_by_label(labels, component) is None


def _components_off(subject: str, follows: str, where: str) -> Reason:
    labels = f"{OPERANDS_LABEL}=false if another product manages its GPUs, or {LABEL} for its workload"
    return Reason(
        ReasonCode.COMPONENTS_OFF,
        subject,
        f"{'are' if ',' in subject else 'is'} disabled for this node, so {follows}",
        (Seen("", where),),
        f"enable it, or label the node {labels}",
    )


def _os_unknown(driver: str) -> Reason:
    return Reason(
        ReasonCode.OS_UNKNOWN,
        driver,
        "can't be deployed to this node: the operating system selects its image, and no label names it",
        (Seen.absent(f"label {' or '.join(label for label, _ in OS_SOURCES)}"),),
        f"run gpuvirt discover or NFD, or label the node by hand: {OS_LABEL}=ubuntu22.04",
    )


def _image_unknown() -> Reason:
    """The controller deploys its own image."""
    message = "was started without the image to deploy, so it deploys nothing to this node"
    fix = "run the controller with --image or GPUVIRT_IMAGE, as the chart does"
    return Reason(ReasonCode.IMAGE_UNKNOWN, "the controller", message, fix=fix)
