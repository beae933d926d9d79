"""The bases of the structs in gpuvirt's kinds and in the objects that it writes, and conditions (metav1.Condition).

Objects that gpuvirt writes are encoded without fields that have their default value, so that server-side apply takes
ownership of the given fields alone. `kind` is each type's tag, and `apiVersion` is always encoded.
"""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from gpuvirt.model.reasons import with_code


class Part(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Base of the structs in gpuvirt's kinds."""

    keeps_unknown: ClassVar[bool] = False
    """Whether the API server keeps undeclared fields: those of another program, or of another version."""


class ReadCondition(Part, frozen=True, kw_only=True, gc=False):
    """A condition of the object without its time."""

    type: Annotated[str, Meta(description="The name of the condition: Ready.")]
    status: Annotated[str, Meta(pattern="^(True|False|Unknown)$", description="True, False or Unknown.")]
    reason: Annotated[
        str,
        Meta(
            pattern="^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
            description="The code of the reason for the status, one word.",
        ),
    ]
    message: Annotated[str, Meta(description="The reason in words.")] = ""


class Condition(ReadCondition, frozen=True, kw_only=True):
    """A condition of the object, as in metav1.Condition."""

    last_transition_time: Annotated[str, Meta(description="When the status last changed (RFC 3339).")]
    observed_generation: Annotated[int, Meta(description="The generation of the spec that the condition is about.")] = 0

    @property
    def why(self) -> str:
        """The reason, followed by the message if there is one: `NodesNotReady: node node01: ...`."""
        return with_code(self.reason, self.message)


class Written(
    msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """Base of all types that are written: camelCase names, defaults left out, no other fields in gpuvirt's files."""


class OwnerReference(Written, frozen=True, forbid_unknown_fields=False, kw_only=True):
    """The owner of an object: Kubernetes deletes the object after its owner. Stored ones have more fields."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool = False


class ObjectMeta(Written, frozen=True, kw_only=True):
    """The metadata of an object."""

    name: str
    namespace: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    owner_references: tuple[OwnerReference, ...] = ()


class Kind(Written, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all objects."""

    api_version: str
    metadata: ObjectMeta


class LocalReference(Written, frozen=True, kw_only=True):
    """Another object in the same namespace."""

    name: str
