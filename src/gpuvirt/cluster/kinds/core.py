"""Kubernetes' own objects as they are read: the fields of nodes, pods, ConfigMaps and DaemonSets that gpuvirt needs.

Source: Kubernetes' API reference, core/v1, apps/v1. Undeclared fields are dropped to save memory. These types are never
written, because their defaults would overwrite existing values. `manifests` has the types that are written.
"""

import msgspec

from gpuvirt.cluster.resources import Metadata

ENDED = frozenset({"Succeeded", "Failed"})
"""Phases of pods that have ended: their devices are free again."""


class AnyObject(msgspec.Struct, frozen=True):
    """An object of any kind, with its metadata alone."""

    metadata: Metadata


class Condition(msgspec.Struct, frozen=True):
    """A condition of a node, a pod or a VM. Unlike metav1.Condition it may lack a reason."""

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


class ReadNodeInfo(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """What the kubelet reports about its host, as far as the controller decides from it."""

    container_runtime_version: str = ""
    """`containerd://2.1.3`."""


class NodeInfo(ReadNodeInfo, frozen=True, rename="camel"):
    """What the kubelet reports about its host."""

    kernel_version: str = ""
    """`6.8.0-31-generic`."""


class NodeSpec(msgspec.Struct, frozen=True):
    """Whether pods can be scheduled on a node."""

    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class ReadNodeStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The resources that a node has for pods, and its runtime."""

    allocatable: dict[str, str] = {}
    capacity: dict[str, str] = {}
    """The kubelet keeps the name of a resource whose device plugin is away."""
    node_info: ReadNodeInfo = ReadNodeInfo()


class NodeStatus(ReadNodeStatus, frozen=True, rename="camel"):
    """The status of a node."""

    node_info: NodeInfo = NodeInfo()
    conditions: tuple[Condition, ...] = ()


class ReadNode(msgspec.Struct, frozen=True):
    """A node with the fields that the controller decides from, since it keeps thousands of nodes in memory."""

    metadata: Metadata
    status: ReadNodeStatus = ReadNodeStatus()

    @property
    def resources(self) -> frozenset[str]:
        """The extended resources that the node offers."""
        return frozenset(name for name, count in self.status.allocatable.items() if "/" in name and count != "0")


class Node(ReadNode, frozen=True):
    """A node."""

    status: NodeStatus = NodeStatus()
    spec: NodeSpec = NodeSpec()


class ResourceLimits(msgspec.Struct, frozen=True):
    """The resource limits of a container. For an extended resource the limit equals the request."""

    limits: dict[str, str | int] = {}


class Container(msgspec.Struct, frozen=True):
    """A container of a pod."""

    resources: ResourceLimits = ResourceLimits()


class SchedulingGate(msgspec.Struct, frozen=True):
    """A gate that keeps a pod from being scheduled."""

    name: str = ""


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The node of a pod."""

    node_name: str = ""


class RequestingPodSpec(PodSpec, frozen=True, rename="camel"):
    """The node of a pod, the nodes that it can be scheduled on, and the requests of its containers."""

    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    scheduling_gates: tuple[SchedulingGate, ...] = ()


class Waiting(msgspec.Struct, frozen=True):
    """The reason why a container does not run."""

    reason: str = ""
    message: str = ""


class ContainerState(msgspec.Struct, frozen=True):
    """The state of a container."""

    waiting: Waiting | None = None


class ContainerStatus(msgspec.Struct, frozen=True):
    """The status of a container."""

    state: ContainerState = ContainerState()


class PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The status of a pod."""

    phase: str = ""
    message: str = ""
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    reason: str = ""

    @property
    def waiting_reason(self) -> str:
        """The kubelet's message about why the pod does not run; empty if there is none."""
        for container in (*self.init_container_statuses, *self.container_statuses):
            if container.state.waiting is not None and container.state.waiting.message:
                return f"{container.state.waiting.reason}: {container.state.waiting.message}"
        return self.message

    @property
    def ready(self) -> bool:
        """Whether the pod is Ready."""
        return any(condition.type == "Ready" and condition.status == "True" for condition in self.conditions)


class Pod(msgspec.Struct, frozen=True):
    """A pod with its node and status. It has few fields, since the controller keeps thousands of pods in memory."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def app(self) -> str:
        """The operand that the pod belongs to, from the label `app`."""
        return self.metadata.labels.get("app", "")


class RequestingPod(Pod, frozen=True):
    """A pod with its requests. It takes more than twice the memory of a `Pod`."""

    spec: RequestingPodSpec = RequestingPodSpec()

    @property
    def requests(self) -> frozenset[str]:
        """The names of all extended resources that the pod requests, not only GPUs; empty once the pod has ended."""
        if self.status.phase in ENDED:
            return frozenset()
        containers = (*self.spec.init_containers, *self.spec.containers)
        return frozenset(name for container in containers for name in container.resources.limits if "/" in name)


class ConfigMap(msgspec.Struct, frozen=True):
    """A ConfigMap."""

    metadata: Metadata
    data: dict[str, str] = {}


class ServicePort(msgspec.Struct, frozen=True):
    """A port of a Service."""

    port: int = 0
    name: str = ""
    """Names the port in the Service's EndpointSlices; empty only where the Service has a single port."""


class ServiceSpec(msgspec.Struct, frozen=True):
    """The address of a Service within the cluster, and its ports."""

    cluster_ip: str = msgspec.field(name="clusterIP", default="")
    """`None` for a headless Service, empty until the API server has chosen one."""
    ports: tuple[ServicePort, ...] = ()


class Service(msgspec.Struct, frozen=True):
    """A Service."""

    metadata: Metadata
    spec: ServiceSpec = ServiceSpec()


class DaemonSetStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The numbers of pods of a DaemonSet."""

    observed_generation: int = 0
    desired_number_scheduled: int = 0
    number_available: int = 0
