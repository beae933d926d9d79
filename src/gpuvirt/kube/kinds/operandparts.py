"""The fields that all operands of a ClusterPolicy have: image, resources, arguments, environment variables.

The fields are those of NVIDIA's `nvidia.com/v1`. An empty string and a null boolean mean that the field is not set.
"""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from gpuvirt.kube.kinds.parts import Part

Quantity = Annotated[
    str | int,
    Meta(
        description="A quantity of Kubernetes: 200Mi, 500m, 1.",
        extra_json_schema={
            "pattern": r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$",
        },
    ),
]


class EnvVar(Part, frozen=True, kw_only=True):
    """An environment variable of a container."""

    name: str
    value: str = ""


class Resources(Part, frozen=True, kw_only=True):
    """The resources that a container requests, and their limits."""

    limits: dict[str, Quantity] = msgspec.field(default_factory=dict)
    requests: dict[str, Quantity] = msgspec.field(default_factory=dict)


class ImageParts(Part, frozen=True, kw_only=True):
    """The image of a container: repository, image and version, or the whole reference in image alone."""

    repository: Annotated[str, Meta(description="The registry and path before the image's name.")] = ""
    image: Annotated[
        str,
        Meta(
            description="The image's name. If repository and version are unset: the whole image reference.",
            extra_json_schema={"pattern": r"[a-zA-Z0-9\-]+"},
        ),
    ] = ""
    version: Annotated[str, Meta(description="The image's tag, or its digest: sha256:...")] = ""
    image_pull_policy: Annotated[str, Meta(description="Always, IfNotPresent or Never. If unset: IfNotPresent.")] = ""
    image_pull_secrets: Annotated[
        tuple[str, ...], Meta(description="Names of pull Secrets in the operands' namespace.")
    ] = ()


class Operand(ImageParts, frozen=True, kw_only=True):
    """An operand for nodes whose GPUs are for VMs."""

    enabled: Annotated[bool | None, Meta(description="Whether the operand is deployed.")] = None
    resources: Annotated[Resources | None, Meta(description="Requests and limits of the container.")] = None
    args: Annotated[
        tuple[str, ...], Meta(description="Arguments of the container. They replace the operand's own.")
    ] = ()
    env: Annotated[
        tuple[EnvVar, ...],
        Meta(description="Environment variables of the container. They override the operand's own of the same name."),
    ] = ()
    host_network: Annotated[
        bool | None, Meta(description="Whether the pods use the host's network. If unset: false.")
    ] = None


class OpenOperand(Operand, frozen=True, kw_only=True):
    """An operand for nodes whose GPUs are for containers. It runs NVIDIA's image. Undeclared fields are kept."""

    keeps_unknown: ClassVar[bool] = True


class OpenPart(Part, frozen=True, kw_only=True):
    """A part of an operand that keeps undeclared fields."""

    keeps_unknown: ClassVar[bool] = True


class DriverManager(ImageParts, frozen=True, kw_only=True):
    """The init container that unloads the running driver before the operand loads its own."""

    keeps_unknown: ClassVar[bool] = True
    env: tuple[EnvVar, ...] = ()


class ConfigMapName(OpenPart, frozen=True, kw_only=True):
    """A ConfigMap in the operands' namespace."""

    name: str = ""


class ConfigMapEntry(OpenPart, frozen=True, kw_only=True):
    """A ConfigMap in the operands' namespace, and its default entry."""

    name: Annotated[str, Meta(description="The name of the ConfigMap.")] = ""
    default: Annotated[str, Meta(description="The entry that applies to nodes whose label names none.")] = ""
