"""The kinds of objects that the controller writes: DaemonSets, ConfigMaps, Roles, Services, RuntimeClasses.

Source: Kubernetes' API reference: apps/v1, core/v1, rbac.authorization.k8s.io/v1, node.k8s.io/v1.
"""

import msgspec

from gpuvirt.kube.kinds.parts import Kind, OwnerReference, Written
from gpuvirt.kube.kinds.podparts import PodTemplate
from gpuvirt.kube.resources import Metadata, Resource, daemon_sets

APPS, CORE, RBAC, NODE = "apps/v1", "v1", "rbac.authorization.k8s.io/v1", "node.k8s.io/v1"


class LabelSelector(Written, frozen=True, kw_only=True):
    """The labels by which a DaemonSet finds its pods."""

    match_labels: dict[str, str]


class RollingUpdate(Written, frozen=True, kw_only=True):
    """The number or share of nodes that are updated at once."""

    max_unavailable: int | str


class UpdateStrategy(Written, frozen=True, kw_only=True):
    """How a DaemonSet replaces its pods."""

    type: str
    rolling_update: RollingUpdate | None = None


class DaemonSetSpec(Written, frozen=True, kw_only=True):
    """The spec of a DaemonSet."""

    selector: LabelSelector
    template: PodTemplate
    update_strategy: UpdateStrategy


class DaemonSet(Kind, frozen=True, kw_only=True, tag="DaemonSet"):
    """A DaemonSet: a pod on each node that its template selects."""

    spec: DaemonSetSpec


class ConfigMap(Kind, frozen=True, kw_only=True, tag="ConfigMap"):
    """A ConfigMap with files for pods."""

    data: dict[str, str]


class PolicyRule(Written, frozen=True, kw_only=True):
    """Permitted verbs on resources."""

    api_groups: tuple[str, ...]
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    resource_names: tuple[str, ...] = ()


class Role(Kind, frozen=True, kw_only=True, tag="Role"):
    """Permissions in a namespace."""

    rules: tuple[PolicyRule, ...]


class RoleReference(Written, frozen=True, kw_only=True):
    """A reference to the role that a binding grants."""

    api_group: str
    kind: str
    name: str


class Subject(Written, frozen=True, kw_only=True):
    """The account that a binding grants a role to."""

    kind: str
    name: str
    namespace: str


class RoleBinding(Kind, frozen=True, kw_only=True, tag="RoleBinding"):
    """Grants a role to accounts in a namespace."""

    role_ref: RoleReference
    subjects: tuple[Subject, ...]


class ServicePort(Written, frozen=True, kw_only=True):
    """A port of a Service."""

    name: str
    port: int


class ServiceSpec(Written, frozen=True, kw_only=True):
    """The spec of a Service."""

    selector: dict[str, str]
    ports: tuple[ServicePort, ...]
    type: str = ""
    internal_traffic_policy: str = ""


class Service(Kind, frozen=True, kw_only=True, tag="Service"):
    """A Service: one name for several pods."""

    spec: ServiceSpec


class RuntimeClass(Kind, frozen=True, kw_only=True, tag="RuntimeClass"):
    """A RuntimeClass: the name of a handler of the container runtime."""

    handler: str


Manifest = DaemonSet | ConfigMap | Role | RoleBinding | Service | RuntimeClass
_PLURALS = {
    DaemonSet: "daemonsets",
    ConfigMap: "configmaps",
    Role: "roles",
    RoleBinding: "rolebindings",
    Service: "services",
    RuntimeClass: "runtimeclasses",
}


def resource_of(manifest: Manifest) -> Resource:
    """Return the collection of an object."""
    group, _, version = manifest.api_version.rpartition("/")
    return Resource(_PLURALS[type(manifest)], group, version, manifest.metadata.namespace or None)


def made_in(namespace: str) -> tuple[Resource, ...]:
    """Return the collections with objects of operands, in the order in which the objects can be deleted."""
    return (
        daemon_sets(namespace),
        Resource("services", namespace=namespace),
        Resource("rolebindings", "rbac.authorization.k8s.io", "v1", namespace),
        Resource("roles", "rbac.authorization.k8s.io", "v1", namespace),
        Resource("configmaps", namespace=namespace),
        Resource("runtimeclasses", "node.k8s.io", "v1"),
    )


def encoded(manifest: Manifest) -> bytes:
    """Return an object as deterministic JSON."""
    return msgspec.json.encode(manifest, order="deterministic")


# --- Secrets with certificates

TLS = "kubernetes.io/tls"
"""The type of a Secret with `tls.crt` and `tls.key`, which can't be changed."""


class SecretMetadata(Metadata, frozen=True, rename="camel", omit_defaults=True):
    """The metadata of a Secret with its owner: Kubernetes deletes the Secret after the owner."""

    owner_references: tuple[OwnerReference, ...] = ()


class Secret(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """A Secret. JSON has the values in base64."""

    metadata: SecretMetadata
    data: dict[str, bytes] = {}
    type: str = TLS
    api_version: str = "v1"
    kind: str = "Secret"


def secrets(namespace: str) -> Resource:
    """Return the Secrets of a namespace."""
    return Resource("secrets", namespace=namespace)
