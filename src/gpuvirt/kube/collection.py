"""The objects of the API server to list and watch, chosen by name, node, labels and fields."""

from typing import Generic, TypeVar
from urllib.parse import urlencode

import msgspec

from gpuvirt.kube.resources import KubernetesObject, Resource

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
