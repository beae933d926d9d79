"""What the controller reads of Kubernetes' own objects: fields of core/v1 and apps/v1, as far as it decides by them."""

import msgspec

from gpuvirt.cluster.resources import Metadata, Resource


class NodeObject(msgspec.Struct, frozen=True):
    """A node, as far as the controller reads it."""

    metadata: Metadata


class PodCondition(msgspec.Struct, frozen=True):
    """One of a pod's conditions."""

    type: str
    status: str


class PodStatus(msgspec.Struct, frozen=True):
    """How a pod is."""

    phase: str = ""
    conditions: tuple[PodCondition, ...] = ()

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


class DaemonSetStatus(msgspec.Struct, frozen=True, rename="camel"):
    """How many pods a DaemonSet has."""

    observed_generation: int = 0
    desired_number_scheduled: int = 0
    updated_number_scheduled: int = 0
    number_available: int = 0
    number_unavailable: int = 0


class DaemonSetObject(msgspec.Struct, frozen=True):
    """A DaemonSet, with its spec as the API server writes it."""

    metadata: Metadata
    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: DaemonSetStatus = DaemonSetStatus()


def daemon_sets(namespace: str) -> Resource:
    """Return the DaemonSets of a namespace."""
    return Resource("daemonsets", "apps", "v1", namespace)
