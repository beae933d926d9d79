"""CustomResourceDefinitions: which ones gpuvirt creates, updates and deletes, and which belong to another product.

A kind of `nvidia.com` may belong to NVIDIA's operator. gpuvirt leaves the definitions of other products as they are.
Source of the shapes: Kubernetes' API reference, CustomResourceDefinition v1 apiextensions.k8s.io.
"""

import msgspec

from gpuvirt.kube.kinds.gpunode import GROUP
from gpuvirt.kube.resources import Metadata, Resource

KIND = "CustomResourceDefinition"
API_VERSION = "apiextensions.k8s.io/v1"
DEFINITIONS = Resource("customresourcedefinitions", "apiextensions.k8s.io")
PART_OF = "app.kubernetes.io/part-of"
OURS = "gpuvirt"
"""The value of the label `app.kubernetes.io/part-of` on gpuvirt's definitions and its ClusterPolicy."""
ESTABLISHED = "Established"
"""The condition of a definition whose kind the API server serves."""


class Name(msgspec.Struct, frozen=True):
    """The metadata of a manifest."""

    name: str
    labels: dict[str, str] = {}


class Manifest(msgspec.Struct, frozen=True, rename="camel"):
    """An object to create, as a file has it."""

    api_version: str
    kind: str
    metadata: Name
    spec: dict[str, object]


class DefinitionSpec(msgspec.Struct, frozen=True):
    """The part of a definition's spec that gpuvirt reads."""

    group: str


class DefinitionCondition(msgspec.Struct, frozen=True):
    """A condition of a definition; unlike metav1.Condition it may lack a reason."""

    type: str
    status: str


class DefinitionStatus(msgspec.Struct, frozen=True):
    """The API server's conditions of a definition."""

    conditions: tuple[DefinitionCondition, ...] = ()


class Definition(msgspec.Struct, frozen=True):
    """A CustomResourceDefinition at the API server."""

    metadata: Metadata
    spec: DefinitionSpec
    status: DefinitionStatus = DefinitionStatus()


def is_ours(definition: Definition) -> bool:
    """Return whether gpuvirt made a definition, by its group or its label."""
    return definition.spec.group == GROUP or definition.metadata.labels.get(PART_OF) == OURS


def is_served(definition: Definition) -> bool:
    """Return whether the API server serves the kind, so that objects of it can be written."""
    conditions = definition.status.conditions
    return any(condition.type == ESTABLISHED and condition.status == "True" for condition in conditions)
