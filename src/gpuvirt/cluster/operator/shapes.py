"""What the controller reads of Kubernetes' own objects: fields of core/v1 and apps/v1, as far as it decides by them."""

import msgspec

from gpuvirt.cluster.resources import Metadata


class NodeInfo(msgspec.Struct, frozen=True, rename="camel"):
    """What a node's kubelet says of its host."""

    container_runtime_version: str = ""
    """`containerd://2.1.3`."""


class NodeState(msgspec.Struct, frozen=True, rename="camel"):
    """How a node is."""

    node_info: NodeInfo = NodeInfo()
    allocatable: dict[str, str] = {}


class NodeObject(msgspec.Struct, frozen=True):
    """A node, as far as the controller reads it."""

    metadata: Metadata
    status: NodeState = NodeState()

    @property
    def resources(self) -> frozenset[str]:
        """The extended resources that it offers."""
        return frozenset(name for name, count in self.status.allocatable.items() if "/" in name and count != "0")


class PodCondition(msgspec.Struct, frozen=True):
    """One of a pod's conditions."""

    type: str
    status: str


class Waiting(msgspec.Struct, frozen=True):
    """Why a container does not run yet."""

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
    conditions: tuple[PodCondition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()

    @property
    def held_up_by(self) -> str:
        """What keeps it from running, as the kubelet says it; empty where it says nothing."""
        for one in (*self.init_container_statuses, *self.container_statuses):
            if one.state.waiting is not None and one.state.waiting.message:
                return f"{one.state.waiting.reason}: {one.state.waiting.message}"
        return self.message

    @property
    def ready(self) -> bool:
        """Whether it serves."""
        return any(one.type == "Ready" and one.status == "True" for one in self.conditions)


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    """Where a pod is."""

    node_name: str = ""


class OperandPod(msgspec.Struct, frozen=True):
    """A pod of the controller's namespace."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def app(self) -> str:
        """What it is a pod of."""
        return self.metadata.labels.get("app", "")


class AskedFor(msgspec.Struct, frozen=True):
    """What a container asks for; of an extended resource the limit is the request."""

    limits: dict[str, str | int] = {}


class AskingContainer(msgspec.Struct, frozen=True):
    """A container, as far as it asks for something."""

    resources: AskedFor = AskedFor()


class AskingSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The containers of a pod."""

    containers: tuple[AskingContainer, ...] = ()
    init_containers: tuple[AskingContainer, ...] = ()


class AskingPod(msgspec.Struct, frozen=True):
    """Any pod, as far as it asks for devices."""

    metadata: Metadata
    spec: AskingSpec = AskingSpec()
    status: PodStatus = PodStatus()

    @property
    def asks_for(self) -> frozenset[str]:
        """The names of all devices that it asks for, be they no GPUs; nothing once it has ended."""
        if self.status.phase in {"Succeeded", "Failed"}:
            return frozenset()
        containers = (*self.spec.init_containers, *self.spec.containers)
        return frozenset(name for one in containers for name in one.resources.limits if "/" in name)


class DaemonSetStatus(msgspec.Struct, frozen=True, rename="camel"):
    """How many pods a DaemonSet has."""

    observed_generation: int = 0
    desired_number_scheduled: int = 0
    number_available: int = 0
