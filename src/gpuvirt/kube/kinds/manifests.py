"""The base types of all objects that the controller writes.

Objects are encoded without fields that have their default value, so that server-side apply takes ownership of the given
fields alone. `kind` is each type's tag, and `apiVersion` is always encoded.
"""

import msgspec


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
