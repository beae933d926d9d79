"""Objects at the API server: their paths, the metadata that all have, and the collections to list and watch."""

from functools import lru_cache
from typing import Generic, Protocol, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from typing_extensions import override

KEPT_TEXTS = 8_192
"""How many keys and values of labels are shared; those of a cluster are some hundreds, besides the nodes' names."""


class Metadata(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The metadata of an object, with the fields that gpuvirt needs."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    """The number of times that the spec has changed."""
    deletion_timestamp: str = ""
    """The time when the deletion began; empty if the object is not being deleted."""
    creation_timestamp: str = ""
    """RFC 3339, in UTC and whole seconds, so that the strings sort by time."""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}

    def __post_init__(self) -> None:
        """Share the texts of labels and the keys of annotations with other objects.

        Thousands of nodes have the same labels, some fifty each, which would be most of a node in memory.
        """
        if self.labels:
            shared = {_shared(key): _shared(value) for key, value in self.labels.items()}
            msgspec.structs.force_setattr(self, "labels", shared)
        if self.annotations:
            shared = {_shared(key): value for key, value in self.annotations.items()}
            msgspec.structs.force_setattr(self, "annotations", shared)


class VersionPrecondition(msgspec.Struct, frozen=True, rename="camel"):
    """The metadata of a merge patch that is refused if the object has another version than the one that was read."""

    resource_version: str


@lru_cache(KEPT_TEXTS)
def _shared(text: str) -> str:
    """Return the first of equal texts."""
    return text


class Identity(Protocol):
    """The metadata by which an object is found in its collection, and its version."""

    @property
    def name(self) -> str:
        """The name of the object."""
        ...

    @property
    def namespace(self) -> str:
        """The namespace; empty for cluster-scoped objects."""
        ...

    @property
    def uid(self) -> str:
        """The UID of the object."""
        ...

    @property
    def resource_version(self) -> str:
        """The version of the object."""
        ...


class KubernetesObject(Protocol):
    """Any type that an object is decoded into."""

    @property
    def metadata(self) -> Identity:
        """The metadata of the object."""
        ...


class FullObject(KubernetesObject, Protocol):
    """A type with the whole metadata."""

    @property
    @override
    def metadata(self) -> Metadata:
        """The metadata of the object."""
        ...


def is_newer(item: KubernetesObject, known: KubernetesObject) -> bool:
    """Return whether `item` has a later version than `known`; versions of one kind can be compared (KEP-5504)."""
    later, earlier = item.metadata.resource_version, known.metadata.resource_version
    return not (later.isdecimal() and earlier.isdecimal()) or int(later) > int(earlier)


class Resource(msgspec.Struct, frozen=True):
    """A collection of objects: the group (empty for core), version, plural name, and namespace if it has one."""

    plural: str
    group: str = ""
    version: str = "v1"
    namespace: str | None = None

    @property
    def path(self) -> str:
        """The path of the collection at the API server."""
        api = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        within = f"/namespaces/{quote(self.namespace, safe='')}" if self.namespace is not None else ""
        return f"{api}{within}/{self.plural}"

    def path_of(self, name: str) -> str:
        """Return the path of one object."""
        return f"{self.path}/{quote(name, safe='')}"


NODES = Resource("nodes")


def config_maps(namespace: str) -> Resource:
    """Return the ConfigMaps of a namespace."""
    return Resource("configmaps", namespace=namespace)


def daemon_sets(namespace: str) -> Resource:
    """Return the DaemonSets of a namespace."""
    return Resource("daemonsets", "apps", "v1", namespace)


def pods(namespace: str) -> Resource:
    """Return the pods of a namespace."""
    return Resource("pods", namespace=namespace)


def services(namespace: str) -> Resource:
    """Return the Services of a namespace."""
    return Resource("services", namespace=namespace)


T = TypeVar("T", bound=KubernetesObject)


class Collection(msgspec.Struct, Generic[T], frozen=True):
    """The objects to list and watch, and the type that they are decoded into."""

    resource: Resource
    shape: type[T]
    name: str | None = None
    """Selects one object by a field selector on its name, which also satisfies `resourceNames` of RBAC."""
    on_node: str | None = None
    """Selects the pods of one node."""
    labelled: str = ""
    """A label selector: `app in (a,b)`."""
    fields: str = ""
    """More of a field selector: `status.phase!=Failed`."""

    def query(self, **more: str) -> str:
        """Return the query string that selects the objects, with more parameters."""
        desired = {"metadata.name": self.name, "spec.nodeName": self.on_node}
        chosen = [f"{field}={value}" for field, value in desired.items() if value is not None]
        fields = ",".join(filter(None, (*chosen, self.fields)))
        selected = {"fieldSelector": fields, "labelSelector": self.labelled}
        return urlencode({key: value for key, value in selected.items() if value} | more)
