"""Bindings as they are sent: the node of a pod, its GPUs, and the version that the pod must still have."""

import msgspec

from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.shares.annotations import SHARES_ANNOTATION, pod_shares_text
from gpuvirt.model.shares.placement import Placement
from gpuvirt.shares.objects import SharingPod


class CannotBindError(GpuvirtError):
    """A pod cannot be bound as kube-scheduler asks; the text has the reason."""


class _BindingMetadata(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    name: str
    namespace: str
    uid: str
    resource_version: str = ""
    annotations: dict[str, str] = {}


class _Target(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    kind: str = "Node"
    api_version: str = "v1"


class Binding(msgspec.Struct, frozen=True, rename="camel"):
    """The Binding of a pod to a node, with the annotations that the pod gets."""

    metadata: _BindingMetadata
    target: _Target
    api_version: str = "v1"
    kind: str = "Binding"


class Write(msgspec.Struct, frozen=True):
    """A binding that is to be written."""

    pod: SharingPod
    """The pod in the version that the API server must still have."""
    node: NodeName
    chosen: Placement

    @property
    def key(self) -> tuple[PodUid, NodeName]:
        """The pod and the node."""
        return self.pod.uid, self.node

    @property
    def content(self) -> Binding:
        """The object to create."""
        metadata = self.pod.metadata
        annotations = {SHARES_ANNOTATION: pod_shares_text(self.chosen)} if self.chosen.containers else {}
        return Binding(
            _BindingMetadata(metadata.name, metadata.namespace, metadata.uid, metadata.resource_version, annotations),
            _Target(self.node),
        )

    @property
    def failed(self) -> str:
        """The begin of the text for a write that was not made."""
        return f"pod {self.pod.where} was not bound to node {self.node}"
