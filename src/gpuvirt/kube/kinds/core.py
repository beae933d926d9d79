"""Kubernetes' own objects as they are read: the fields of nodes, pods, ConfigMaps and DaemonSets that gpuvirt needs.

Source: Kubernetes' API reference, core/v1, apps/v1. Undeclared fields are dropped to save memory. `Node` and `WholePod`
are the whole types. `ReadNode` and `Pod` are the parts of them that the controller keeps by the thousand;
`shares.objects` has the types that the extender and the agent's shares keep, `shares.confinement` a pod with the rights
of its containers, `webhook.pod` those of admission, and `kubevirt` VMs. They extend the types of this module, and so no
type of the API is declared twice. These types are never written, because their defaults would overwrite existing
values. `parts` and `podparts` have the types that are written. Types that the extender keeps refer to no object that
refers to them, so that the garbage collector need not go through them (`gc=False`).

A pod of two containers decoded as a whole takes 5.6 kB and 17 us, with the controller's fields alone 2.3 kB and 8 us.
Refused: one narrow type for all programs, since each would keep the others' fields; `msgspec.Raw` in kept objects, a
view that keeps the whole message.
"""

from collections.abc import Iterable

import msgspec

from gpuvirt.facts.ids import ResourceName
from gpuvirt.kube.resources import Metadata

ENDED = frozenset({"Succeeded", "Failed"})
"""Phases of pods that have ended: their devices are free again."""
STATIC_POD = "kubernetes.io/config.mirror"
"""The annotation of a static pod's object at the API server (pkg/kubelet/types): its value is the UID that the kubelet
has for the pod."""


class AnyObject(msgspec.Struct, frozen=True):
    """An object of any kind, with its metadata alone."""

    metadata: Metadata


class Condition(msgspec.Struct, frozen=True, gc=False):
    """A condition of a node, a pod or a VM. Unlike metav1.Condition it may lack a reason."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""

    @property
    def text(self) -> str:
        """Its reason and message on one line."""
        return ": ".join(part for part in (self.reason, " ".join(self.message.split())) if part)


def condition(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """Return the condition of a type."""
    return next((found for found in conditions if found.type == kind), None)


class Owner(msgspec.Struct, frozen=True, rename="camel"):
    """An owner of an object."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class OwnedMetadata(Metadata, frozen=True, rename="camel"):
    """The metadata of an object with its owners."""

    owner_references: tuple[Owner, ...] = ()

    @property
    def controller(self) -> Owner | None:
        """The owner that controls the object; None if there is none."""
        return next((owner for owner in self.owner_references if owner.controller), None)


class Taint(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A taint of a node with all its fields, since taints are written as a whole list."""

    key: str = ""
    effect: str = ""
    value: str = ""
    time_added: str = ""

    @property
    def text(self) -> str:
        """The taint as `kubectl taint` writes it."""
        return f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"


class Toleration(msgspec.Struct, frozen=True):
    """A taint that a pod tolerates; an empty key with `Exists` tolerates every taint."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def tolerates(self, taint: Taint) -> bool:
        """Return whether the toleration matches a taint."""
        if self.effect not in {"", taint.effect}:
            return False
        if self.operator == "Exists":
            return self.key in {"", taint.key}
        return (self.key, self.value) == (taint.key, taint.value)


class Placement(msgspec.Struct, frozen=True, rename="camel"):
    """The nodes that a pod or a VM can be scheduled on; affinity is not read."""

    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()

    def untolerated(self, taints: Iterable[Taint]) -> Taint | None:
        """Return the first taint that is not tolerated, None where all are."""
        hard = (taint for taint in taints if taint.effect in {"NoSchedule", "NoExecute"})
        return next(
            (taint for taint in hard if not any(toleration.tolerates(taint) for toleration in self.tolerations)), None
        )


class ReadNodeInfo(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The kubelet's report on its host, with the fields that the controller decides from."""

    container_runtime_version: str = ""
    """`containerd://2.1.3`."""


class NodeInfo(ReadNodeInfo, frozen=True, rename="camel"):
    """The kubelet's report on its host."""

    kernel_version: str = ""
    """`6.8.0-31-generic`."""
    system_uuid: str = msgspec.field(name="systemUUID", default="")
    """The UUID of SMBIOS."""


class NodeSpec(msgspec.Struct, frozen=True):
    """Whether pods can be scheduled on a node, and which VM of a provider it is."""

    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()
    provider_id: str = msgspec.field(name="providerID", default="")


class ReadNodeStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The resources that a node has for pods, and its runtime."""

    allocatable: dict[str, str] = {}
    capacity: dict[str, str] = {}
    """The kubelet keeps the name of a resource whose device plugin is away."""
    node_info: ReadNodeInfo = ReadNodeInfo()


class NodeAddress(msgspec.Struct, frozen=True):
    """An address of a node: `InternalIP`, `ExternalIP`, `Hostname` and others."""

    type: str = ""
    address: str = ""


class NodeStatus(ReadNodeStatus, frozen=True, rename="camel"):
    """The status of a node."""

    addresses: tuple[NodeAddress, ...] = ()

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

    @property
    def is_ready(self) -> bool:
        """Whether the condition Ready is True."""
        return any(condition.type == "Ready" and condition.status == "True" for condition in self.status.conditions)


class Quantities(msgspec.Struct, frozen=True, gc=False):
    """The resources of a container; the API server sets requests where only limits are given. For an extended resource
    the limit equals the request."""

    requests: dict[str, str | int | float] = {}
    limits: dict[str, str | int | float] = {}


class Container(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A container, an init container or a sidecar of a pod."""

    name: str = ""
    resources: Quantities = Quantities()
    restart_policy: str = ""

    @property
    def is_sidecar(self) -> bool:
        """Whether an init container runs as long as the pod."""
        return self.restart_policy == "Always"

    def quantity(self, resource: ResourceName) -> str | int | float | None:
        """Return the requested quantity of a resource, None where the container does not name the resource."""
        return self.resources.requests.get(resource, self.resources.limits.get(resource))


class Capabilities(msgspec.Struct, frozen=True, gc=False):
    """The capabilities of a container besides the default ones."""

    add: tuple[str, ...] = ()


class SecurityContext(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The privileges of a container."""

    privileged: bool = False
    capabilities: Capabilities = Capabilities()


class Absent(msgspec.Struct, frozen=True):
    """An object whose fields do not count."""


class HostPath(msgspec.Struct, frozen=True):
    """A folder of the node."""

    path: str = ""


class SecretVolume(msgspec.Struct, frozen=True, rename="camel"):
    """A Secret of the pod's namespace."""

    secret_name: str = ""


class Volume(msgspec.Struct, frozen=True, rename="camel"):
    """A volume of a pod."""

    name: str = ""
    empty_dir: Absent | None = None
    """Storage that lives as long as its pod."""
    host_path: HostPath | None = None
    secret: SecretVolume | None = None


class PodClaim(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A claim of a pod (DRA), by its name in the pod: of the spec, or of the status where it was made for the pod."""

    name: str = ""
    resource_claim_name: str = ""
    """The claim; empty where it is made from a template, or is not made yet."""


class SchedulingGate(msgspec.Struct, frozen=True, gc=False):
    """A reason why kube-scheduler leaves a pod alone, and why the API server refuses its binding."""

    name: str = ""


DEFAULT_SCHEDULER = "default-scheduler"
"""The scheduler of pods that name none."""


class PodSpec(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The node of a pod."""

    node_name: str = ""


class WholePodSpec(PodSpec, frozen=True, gc=True, rename="camel"):
    """The node of a pod, the nodes that it can be scheduled on, the requests of its containers, and its volumes."""

    scheduler_name: str = DEFAULT_SCHEDULER
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    scheduling_gates: tuple[SchedulingGate, ...] = ()
    volumes: tuple[Volume, ...] = ()
    resource_claims: tuple[PodClaim, ...] = ()


class Waiting(msgspec.Struct, frozen=True):
    """The reason why a container does not run."""

    reason: str = ""
    message: str = ""


class Running(msgspec.Struct, frozen=True):
    """A container runs."""


class ContainerState(msgspec.Struct, frozen=True):
    """The state of a container."""

    waiting: Waiting | None = None
    running: Running | None = None


class ContainerStatus(msgspec.Struct, frozen=True):
    """The status of a container."""

    state: ContainerState = ContainerState()
    name: str = ""


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
    def initializing(self) -> str:
        """The init container whose end the pod's other containers wait for; empty if there is none that runs."""
        if any(condition.type == "Initialized" and condition.status == "True" for condition in self.conditions):
            return ""
        running = [container.name for container in self.init_container_statuses if container.state.running is not None]
        return running[-1] if running else ""  # sidecars before it run on

    @property
    def ready(self) -> bool:
        """Whether the pod is Ready."""
        return any(condition.type == "Ready" and condition.status == "True" for condition in self.conditions)


class WholePodStatus(PodStatus, frozen=True, rename="camel"):
    """The status of a pod with its claims, and the one that the scheduler has made of its extended resources."""

    resource_claim_statuses: tuple[PodClaim, ...] = ()
    extended_resource_claim_status: dict[str, object] = {}


class Pod(msgspec.Struct, frozen=True):
    """A pod with its node and status. It has few fields, since the controller keeps thousands of pods in memory."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def app(self) -> str:
        """The operand that the pod belongs to, from the label `app`."""
        return self.metadata.labels.get("app", "")


class WholePod(Pod, frozen=True):
    """A pod with all that is read of pods. It takes more than twice the memory of a `Pod`, so none is kept."""

    metadata: OwnedMetadata
    spec: WholePodSpec = WholePodSpec()
    status: WholePodStatus = WholePodStatus()

    @property
    def where(self) -> str:
        """Its namespace and name: `default/virt-launcher-vm-1-abcde`."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def claims(self) -> dict[str, str]:
        """The ResourceClaims of the pod by their names in it, those that are not made yet with an empty name."""
        found = (*self.spec.resource_claims, *self.status.resource_claim_statuses)
        return {claim.name: claim.resource_claim_name for claim in found}

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
