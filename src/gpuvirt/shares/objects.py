"""The fields of nodes and pods that matter for shares, and the requests of pods.

Source: Kubernetes' API reference, core/v1. All other fields are dropped, since the extender keeps all pods of the
cluster in memory.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from msgspec.structs import force_setattr

from gpuvirt.facts.ids import NodeName, PodUid, ResourceName
from gpuvirt.kube.kinds import core
from gpuvirt.kube.kinds.core import STATIC_POD, Condition, Container, SchedulingGate
from gpuvirt.kube.labels import CLIENT, UPGRADE_LABEL, deploy_label
from gpuvirt.kube.resources import NODES, Collection, Resource
from gpuvirt.model.shares.annotations import (
    LIMITS_ANNOTATION,
    OWN_ANNOTATIONS,
    REQUIRED_ANNOTATION,
    SHARED_GPUS_ANNOTATION,
    verify_annotations,
)
from gpuvirt.model.shares.demand import (
    WHOLE,
    ContainerDemand,
    ContainerKind,
    ContainerName,
    Demand,
    Units,
    demand_of,
    units_of,
)
from gpuvirt.model.workers.spec import CORDONED_BY


class NodeAnnotations(msgspec.Struct, frozen=True, gc=False):
    """The annotations of a node that have its shared GPUs, and what limits their shares."""

    shared_gpus: str = msgspec.field(default="", name=SHARED_GPUS_ANNOTATION)
    limits: str = msgspec.field(default="", name=LIMITS_ANNOTATION)


class ClosingLabels(msgspec.Struct, frozen=True, gc=False):
    """The labels of a node that keep it from more pods: of a VgpuSchedule, and of an upgrade of its driver."""

    cordoned_by: str = msgspec.field(default="", name=CORDONED_BY)
    upgrade_state: str = msgspec.field(default="", name=UPGRADE_LABEL)
    client: str = msgspec.field(default="", name=deploy_label(CLIENT))


class NodeMetadata(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The metadata of a node."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: ClosingLabels = ClosingLabels()
    annotations: NodeAnnotations = NodeAnnotations()

    @property
    def namespace(self) -> str:
        """Nodes have no namespace."""
        return ""


class SharingNode(msgspec.Struct, frozen=True, gc=False):
    """A node with its shared GPUs."""

    metadata: NodeMetadata

    @property
    def name(self) -> NodeName:
        """The name of the node."""
        return NodeName(self.metadata.name)


KEPT = (OWN_ANNOTATIONS, STATIC_POD)
"""How the keys of the annotations begin that matter here."""
_NO_ANNOTATIONS = dict[str, str]()


class PodMetadata(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The metadata of a pod."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str = ""
    labels: dict[str, str] = {}
    """By which PodDisruptionBudgets select pods."""
    annotations: dict[str, str] = _NO_ANNOTATIONS
    """Those of gpuvirt, misspelt ones among them, and the one that names a static pod."""

    def __post_init__(self) -> None:
        """Leave out all other annotations, some of which are as long as their pods."""
        if self.annotations:
            own = {key: text for key, text in self.annotations.items() if key.startswith(KEPT)}
            force_setattr(self, "annotations", own or _NO_ANNOTATIONS)


class SchedulingGroup(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The PodGroup of a pod, with which it is placed."""

    pod_group_name: str = ""


class PodGroupKey(NamedTuple):
    """A PodGroup among those of the cluster."""

    namespace: str
    name: str


class PodSpec(core.PodSpec, frozen=True, gc=False, rename="camel"):
    """The node, the containers, the priority, the gates and the group of a pod."""

    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    priority: int = 0
    scheduling_gates: tuple[SchedulingGate, ...] = ()
    scheduling_group: SchedulingGroup = SchedulingGroup()


class PodStatus(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The node that kube-scheduler has nominated for a pod, and why it has not placed the pod."""

    nominated_node_name: str = ""
    """It has evicted others for the pod there, or the pod waits there to be bound."""
    conditions: tuple[Condition, ...] = ()
    """The condition PodScheduled of a pod whose scheduling has failed, else none: each bound pod has several."""

    def __post_init__(self) -> None:
        """Leave out all other conditions."""
        if self.conditions:
            failed = (
                condition
                for condition in self.conditions
                if (condition.type, condition.status) == ("PodScheduled", "False")
            )
            force_setattr(self, "conditions", tuple(failed))


class SharingPod(msgspec.Struct, frozen=True, gc=False):
    """A pod with its requests and its shares."""

    metadata: PodMetadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def uid(self) -> PodUid:
        """The UID of the pod."""
        return PodUid(self.metadata.uid)

    @property
    def where(self) -> str:
        """The pod as users name it: `namespace/name`."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def group(self) -> PodGroupKey | None:
        """The PodGroup that the pod is placed with, if any."""
        name = self.spec.scheduling_group.pod_group_name
        return PodGroupKey(self.metadata.namespace, name) if name else None

    def names(self, resource: ResourceName) -> bool:
        """Return whether a container names a resource, be it with 0 units: then the extender binds the pod."""
        containers = (*self.spec.init_containers, *self.spec.containers)
        return any(container.quantity(resource) is not None for container in containers)


SHARING_NODES = Collection(NODES, SharingNode)
SHARING_PODS = Collection(Resource("pods"), SharingPod, fields="status.phase!=Succeeded,status.phase!=Failed")
"""All pods of the cluster that have not ended: for the API server, a pod that ends leaves this collection."""


def requested(pod: SharingPod, resource: ResourceName) -> Iterable[ContainerDemand]:
    """Yield the request of each container, in the order of their start; raise InvalidQuantityError."""
    for container in pod.spec.init_containers:
        kind = ContainerKind.SIDECAR if container.is_sidecar else ContainerKind.INIT
        yield _requested(container, kind, resource)
    for container in pod.spec.containers:
        yield _requested(container, ContainerKind.APP, resource)


def demand_of_pod(pod: SharingPod, resource: ResourceName, whole: Units = WHOLE) -> Demand:
    """Return the units that a pod requests; raise InvalidQuantityError, and UnplaceableError where no GPU can fit."""
    return demand_of(tuple(requested(pod, resource)), whole)


def needs_limits(pod: SharingPod, demand: Demand, whole: Units = WHOLE) -> bool:
    """Return whether a pod may run only where shares are limits.

    Nobody else has a share of whole GPUs, so a pod that has no part of one runs anywhere. Raises
    InvalidAnnotationError for an annotation of gpuvirt with an unknown key or value, so that no misspelt one leaves a
    pod without its limit.
    """
    annotations = pod.metadata.annotations
    verify_annotations(annotations)
    has_part = any(0 < container.units < whole for container in demand.containers)
    return has_part and bool(annotations.get(REQUIRED_ANNOTATION))


def _requested(container: Container, kind: ContainerKind, resource: ResourceName) -> ContainerDemand:
    quantity = container.quantity(resource)
    return ContainerDemand(ContainerName(container.name), kind, Units(0) if quantity is None else units_of(quantity))
