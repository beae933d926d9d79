"""CustomResourceDefinitions: which are ours to make, to bring up to date and to take away, and which another product's.

A kind of `nvidia.com` may be NVIDIA's operator's: what somebody else has defined is theirs, and is left as it is.
Source of the shapes: Kubernetes' API reference, CustomResourceDefinition v1 apiextensions.k8s.io.
"""

import msgspec

from gpuvirt.cluster.kinds.gpunode import GROUP
from gpuvirt.cluster.resources import Metadata, Resource

KIND = "CustomResourceDefinition"
API_VERSION = "apiextensions.k8s.io/v1"
DEFINITIONS = Resource("customresourcedefinitions", "apiextensions.k8s.io")
PART_OF = "app.kubernetes.io/part-of"
OURS = "gpuvirt"
"""What the label `app.kubernetes.io/part-of` of our definitions says, and that of our ClusterPolicy."""
ESTABLISHED = "Established"
"""The condition of a kind that is served."""


class Name(msgspec.Struct, frozen=True):
    """What a manifest says of itself."""

    name: str
    labels: dict[str, str] = {}


class Manifest(msgspec.Struct, frozen=True, rename="camel"):
    """An object that is to be, as it lies in a file."""

    api_version: str
    kind: str
    metadata: Name
    spec: dict[str, object]


class Spec(msgspec.Struct, frozen=True):
    """What is read of what is defined."""

    group: str


class Condition(msgspec.Struct, frozen=True):
    """A condition of a definition; unlike metav1.Condition it may lack a reason."""

    type: str
    status: str


class Status(msgspec.Struct, frozen=True):
    """How far the API server is with it."""

    conditions: tuple[Condition, ...] = ()


class Definition(msgspec.Struct, frozen=True):
    """A definition at the API server."""

    metadata: Metadata
    spec: Spec
    status: Status = Status()


def is_ours(definition: Definition) -> bool:
    """Return whether we made a definition: its group is ours, or it says so."""
    return definition.spec.group == GROUP or definition.metadata.labels.get(PART_OF) == OURS


def is_served(definition: Definition) -> bool:
    """Return whether objects of the kind can be written."""
    return any(one.type == ESTABLISHED and one.status == "True" for one in definition.status.conditions)
