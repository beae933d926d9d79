"""Kubernetes' own objects as they are read: what of nodes, pods, ConfigMaps and DaemonSets anything is decided by.

Source: Kubernetes' API reference, core/v1, apps/v1. What is not declared here is not kept in memory. None of it is
written: an object that is written has fields of its own, lest a default overwrite what stands there.
"""

import msgspec

from gpuvirt.cluster.resources import Metadata

ENDED = frozenset({"Succeeded", "Failed"})
"""Phases of pods whose devices are free again."""


class AnyObject(msgspec.Struct, frozen=True):
    """Any object, of which the name, labels and annotations count."""

    metadata: Metadata


class Condition(msgspec.Struct, frozen=True):
    """A condition of a node, a pod, a VM; unlike metav1.Condition it may lack a reason."""

    type: str
    status: str = ""
    reason: str = ""
    message: str = ""


class Taint(msgspec.Struct, frozen=True):
    """A taint of a node."""

    key: str = ""
    effect: str = ""
    value: str = ""


class Toleration(msgspec.Struct, frozen=True):
    """A taint that a pod tolerates."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


class NodeInfo(msgspec.Struct, frozen=True, rename="camel"):
    """What a node's kubelet says of its host."""

    container_runtime_version: str = ""
    """`containerd://2.1.3`."""


class NodeSpec(msgspec.Struct, frozen=True):
    """Whether a node takes pods."""

    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class NodeStatus(msgspec.Struct, frozen=True, rename="camel"):
    """How a node is, and what it has for pods."""

    allocatable: dict[str, str] = {}
    node_info: NodeInfo = NodeInfo()
    conditions: tuple[Condition, ...] = ()


class Node(msgspec.Struct, frozen=True):
    """A node."""

    metadata: Metadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def resources(self) -> frozenset[str]:
        """The extended resources that it offers."""
        return frozenset(name for name, count in self.status.allocatable.items() if "/" in name and count != "0")


class ResourceLimits(msgspec.Struct, frozen=True):
    """What a container requests; of an extended resource the limit is the request."""

    limits: dict[str, str | int] = {}


class Container(msgspec.Struct, frozen=True):
    """A container of a pod."""

    resources: ResourceLimits = ResourceLimits()


class SchedulingGate(msgspec.Struct, frozen=True):
    """What keeps a pod from being scheduled."""

    name: str = ""


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    """Where a pod is."""

    node_name: str = ""


class RequestingPodSpec(PodSpec, frozen=True, rename="camel"):
    """Where a pod is or may be, and what its containers request."""

    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    scheduling_gates: tuple[SchedulingGate, ...] = ()


class Waiting(msgspec.Struct, frozen=True):
    """Why a container does not run."""

    reason: str = ""
    message: str = ""


class ContainerState(msgspec.Struct, frozen=True):
    """What a container does."""

    waiting: Waiting | None = None


class ContainerStatus(msgspec.Struct, frozen=True):
    """How a container is."""

    state: ContainerState = ContainerState()


class PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    """How a pod is."""

    phase: str = ""
    message: str = ""
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    reason: str = ""

    @property
    def held_up_by(self) -> str:
        """What keeps it from running, as the kubelet says it; empty where it says nothing."""
        for container in (*self.init_container_statuses, *self.container_statuses):
            if container.state.waiting is not None and container.state.waiting.message:
                return f"{container.state.waiting.reason}: {container.state.waiting.message}"
        return self.message

    @property
    def ready(self) -> bool:
        """Whether it serves."""
        return any(condition.type == "Ready" and condition.status == "True" for condition in self.conditions)


class Pod(msgspec.Struct, frozen=True):
    """A pod: where it is, and how; the controller keeps thousands of them."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def app(self) -> str:
        """The operand that it is a pod of."""
        return self.metadata.labels.get("app", "")


class RequestingPod(Pod, frozen=True):
    """A pod with what it requests, which takes more than twice the memory."""

    spec: RequestingPodSpec = RequestingPodSpec()

    @property
    def requests(self) -> frozenset[str]:
        """The names of all devices that it requests, be they no GPUs; nothing once it has ended."""
        if self.status.phase in ENDED:
            return frozenset()
        containers = (*self.spec.init_containers, *self.spec.containers)
        return frozenset(name for container in containers for name in container.resources.limits if "/" in name)


class ConfigMap(msgspec.Struct, frozen=True):
    """A ConfigMap."""

    metadata: Metadata
    data: dict[str, str] = {}


class DaemonSetStatus(msgspec.Struct, frozen=True, rename="camel"):
    """How many pods a DaemonSet has."""

    observed_generation: int = 0
    desired_number_scheduled: int = 0
    number_available: int = 0
