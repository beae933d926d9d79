"""What every object that the controller writes has in common.

Objects are encoded without what is at its default, so that applying one claims nothing that it does not say
(server-side apply). `kind` is each type's tag, and `apiVersion` stands there always.
"""

import msgspec


class Written(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """Base of all that is written: names as Kubernetes writes them, defaults left out."""


class OwnerReference(Written, frozen=True, kw_only=True):
    """An object with which this one goes away."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool = False


class ObjectMeta(Written, frozen=True, kw_only=True):
    """An object's name, and what is said of it."""

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
