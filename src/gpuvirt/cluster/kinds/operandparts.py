"""What a ClusterPolicy says of one operand, whichever it is: its image, its pods' resources, arguments, environment.

The fields are those of `nvidia.com/v1`. A text that is empty is one that is not set; a switch that is null is not set.
"""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from gpuvirt.cluster.kinds.parts import Part

Quantity = Annotated[
    str | int,
    Meta(
        description="An amount, as Kubernetes writes it: 200Mi, 500m, 1.",
        extra_json_schema={
            "pattern": r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$",
        },
    ),
]


class EnvVar(Part, frozen=True, kw_only=True):
    """A variable in the environment of a container."""

    name: str
    value: str = ""


class Resources(Part, frozen=True, kw_only=True):
    """What a container asks for, and what it may use at most."""

    limits: dict[str, Quantity] = msgspec.field(default_factory=dict)
    requests: dict[str, Quantity] = msgspec.field(default_factory=dict)


class ImageParts(Part, frozen=True, kw_only=True):
    """Where an image is: all three of its parts, or `image` alone with the whole reference in it."""

    repository: Annotated[str, Meta(description="The registry and path before the image's name.")] = ""
    image: Annotated[
        str,
        Meta(
            description="The image's name; without repository and version its whole reference.",
            extra_json_schema={"pattern": r"[a-zA-Z0-9\-]+"},
        ),
    ] = ""
    version: Annotated[str, Meta(description="The image's tag, or its digest: sha256:...")] = ""
    image_pull_policy: Annotated[str, Meta(description="Always, IfNotPresent or Never; else IfNotPresent.")] = ""
    image_pull_secrets: Annotated[tuple[str, ...], Meta(description="Secrets in the operands' namespace.")] = ()


class Operand(ImageParts, frozen=True, kw_only=True):
    """An operand of the VM half."""

    enabled: bool | None = None
    resources: Resources | None = None
    args: Annotated[tuple[str, ...], Meta(description="Arguments, instead of its own.")] = ()
    env: Annotated[tuple[EnvVar, ...], Meta(description="Variables, beside its own and instead of them.")] = ()
    host_network: bool | None = None


class OpenOperand(Operand, frozen=True, kw_only=True):
    """An operand of the container half, whose images are NVIDIA's, and whose newer fields are kept."""

    keeps_unknown: ClassVar[bool] = True


class OpenPart(Part, frozen=True, kw_only=True):
    """A part of the container half."""

    keeps_unknown: ClassVar[bool] = True


class DriverManager(ImageParts, frozen=True, kw_only=True):
    """The container that unloads a driver before another is loaded."""

    keeps_unknown: ClassVar[bool] = True
    env: tuple[EnvVar, ...] = ()


class ConfigMapName(OpenPart, frozen=True, kw_only=True):
    """A ConfigMap in the operands' namespace."""

    name: str = ""


class ConfigMapEntry(OpenPart, frozen=True, kw_only=True):
    """A ConfigMap in the operands' namespace, and which of its entries is meant where a node does not say."""

    name: str = ""
    default: str = ""
