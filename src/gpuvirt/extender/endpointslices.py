"""EndpointSlices: the addresses behind a Service, as the nodes' proxies read them.

Source: discovery.k8s.io/v1 (Kubernetes' API reference). Other programs write the slices of a Service without a
selector. kube-proxy joins the Service's port with the port of a slice by their name.
"""

import msgspec

from gpuvirt.kube.kinds.manifests import OwnerReference
from gpuvirt.kube.resources import Metadata, Resource

SERVICE_LABEL = "kubernetes.io/service-name"
"""The Service that a slice belongs to."""
MANAGER_LABEL = "endpointslice.kubernetes.io/managed-by"
"""The program that writes a slice; Kubernetes' own controllers leave the slices of others alone."""


class StoredSlice(msgspec.Struct, frozen=True, rename="camel"):
    """A slice at the API server, without its addresses."""

    metadata: Metadata
    address_type: str = ""


class SliceMetadata(Metadata, frozen=True, rename="camel", omit_defaults=True):
    """The metadata of a slice with its owner: Kubernetes deletes the slice after the owner."""

    owner_references: tuple[OwnerReference, ...] = ()


class Conditions(msgspec.Struct, frozen=True):
    """The state of an endpoint; proxies send connections to endpoints that are ready."""

    ready: bool = True
    serving: bool = True
    terminating: bool = False


class Endpoint(msgspec.Struct, frozen=True):
    """One address behind a Service."""

    addresses: tuple[str, ...]
    conditions: Conditions = Conditions()


class EndpointPort(msgspec.Struct, frozen=True):
    """The port at which the endpoints of a slice listen; it has the name of the Service's port."""

    name: str
    port: int
    protocol: str = "TCP"


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """A slice to write: addresses of one family behind a Service."""

    metadata: SliceMetadata
    address_type: str
    """IPv4 or IPv6; it cannot be changed."""
    endpoints: tuple[Endpoint, ...]
    ports: tuple[EndpointPort, ...]
    api_version: str = "discovery.k8s.io/v1"
    kind: str = "EndpointSlice"


def endpoint_slices(namespace: str) -> Resource:
    """Return the EndpointSlices of a namespace."""
    return Resource("endpointslices", "discovery.k8s.io", "v1", namespace)
