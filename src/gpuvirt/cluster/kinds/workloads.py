"""The kinds of objects that operands are made of, as the controller writes them: DaemonSets and what they need.

Source: Kubernetes' API reference: apps/v1, core/v1, rbac.authorization.k8s.io/v1, node.k8s.io/v1.
"""

import msgspec

from gpuvirt.cluster.kinds.manifests import Kind, Written
from gpuvirt.cluster.kinds.podparts import PodTemplate
from gpuvirt.cluster.resources import Resource, daemon_sets

APPS, CORE, RBAC, NODE = "apps/v1", "v1", "rbac.authorization.k8s.io/v1", "node.k8s.io/v1"


class LabelSelector(Written, frozen=True, kw_only=True):
    """Which pods are a DaemonSet's."""

    match_labels: dict[str, str]


class RollingUpdate(Written, frozen=True, kw_only=True):
    """How fast pods are replaced: a number of nodes, or a share of them."""

    max_unavailable: int | str


class UpdateStrategy(Written, frozen=True, kw_only=True):
    """How pods are replaced."""

    type: str
    rolling_update: RollingUpdate | None = None


class DaemonSetSpec(Written, frozen=True, kw_only=True):
    """What a DaemonSet is to do."""

    selector: LabelSelector
    template: PodTemplate
    update_strategy: UpdateStrategy


class DaemonSet(Kind, frozen=True, kw_only=True, tag="DaemonSet"):
    """A pod on each of some nodes."""

    spec: DaemonSetSpec


class ConfigMap(Kind, frozen=True, kw_only=True, tag="ConfigMap"):
    """Files for pods."""

    data: dict[str, str]


class ServiceAccount(Kind, frozen=True, kw_only=True, tag="ServiceAccount"):
    """Whom pods are at the API server."""


class PolicyRule(Written, frozen=True, kw_only=True):
    """What may be done."""

    api_groups: tuple[str, ...]
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    resource_names: tuple[str, ...] = ()


class Role(Kind, frozen=True, kw_only=True, tag="Role"):
    """What may be done in a namespace."""

    rules: tuple[PolicyRule, ...]


class ClusterRole(Kind, frozen=True, kw_only=True, tag="ClusterRole"):
    """What may be done in the cluster."""

    rules: tuple[PolicyRule, ...]


class RoleReference(Written, frozen=True, kw_only=True):
    """The role that is given."""

    api_group: str
    kind: str
    name: str


class Subject(Written, frozen=True, kw_only=True):
    """Whom it is given to."""

    kind: str
    name: str
    namespace: str


class RoleBinding(Kind, frozen=True, kw_only=True, tag="RoleBinding"):
    """Who may do it in a namespace."""

    role_ref: RoleReference
    subjects: tuple[Subject, ...]


class ClusterRoleBinding(Kind, frozen=True, kw_only=True, tag="ClusterRoleBinding"):
    """Who may do it in the cluster."""

    role_ref: RoleReference
    subjects: tuple[Subject, ...]


class ServicePort(Written, frozen=True, kw_only=True):
    """A port of a service."""

    name: str
    port: int


class ServiceSpec(Written, frozen=True, kw_only=True):
    """How pods are reached."""

    selector: dict[str, str]
    ports: tuple[ServicePort, ...]
    type: str = ""
    internal_traffic_policy: str = ""


class Service(Kind, frozen=True, kw_only=True, tag="Service"):
    """Pods behind one name."""

    spec: ServiceSpec


class RuntimeClass(Kind, frozen=True, kw_only=True, tag="RuntimeClass"):
    """A way in which a container runtime starts pods."""

    handler: str


Manifest = (
    DaemonSet
    | ConfigMap
    | ServiceAccount
    | Role
    | ClusterRole
    | RoleBinding
    | ClusterRoleBinding
    | Service
    | RuntimeClass
)
_PLURALS = {
    DaemonSet: "daemonsets",
    ConfigMap: "configmaps",
    ServiceAccount: "serviceaccounts",
    Role: "roles",
    ClusterRole: "clusterroles",
    RoleBinding: "rolebindings",
    ClusterRoleBinding: "clusterrolebindings",
    Service: "services",
    RuntimeClass: "runtimeclasses",
}


def resource_of(manifest: Manifest) -> Resource:
    """Return the collection that an object lies in."""
    group, _, version = manifest.api_version.rpartition("/")
    return Resource(_PLURALS[type(manifest)], group, version, manifest.metadata.namespace or None)


def made_in(namespace: str) -> tuple[Resource, ...]:
    """Return the collections in which operands have objects, in the order in which these may be taken away."""
    return (
        daemon_sets(namespace),
        Resource("services", namespace=namespace),
        Resource("rolebindings", "rbac.authorization.k8s.io", "v1", namespace),
        Resource("roles", "rbac.authorization.k8s.io", "v1", namespace),
        Resource("configmaps", namespace=namespace),
        Resource("runtimeclasses", "node.k8s.io", "v1"),
    )


def encoded(manifest: Manifest) -> bytes:
    """Return an object as it is sent, always the same for the same object."""
    return msgspec.json.encode(manifest, order="deterministic")
