"""The operands' service accounts and their permissions at the API server: no more than each operand needs.

They depend on no policy. So the installation creates them, and the controller needs no permission to grant any.
"""

from gpuvirt.cluster.kinds import workloads
from gpuvirt.cluster.kinds.manifests import ObjectMeta
from gpuvirt.cluster.kinds.workloads import (
    ClusterRole,
    ClusterRoleBinding,
    Manifest,
    PolicyRule,
    Role,
    RoleBinding,
    RoleReference,
    ServiceAccount,
    Subject,
)
from gpuvirt.cluster.operator.operands.site import MANAGED_BY, PART_OF, RBAC_GROUP

DRIVER, VALIDATOR, GFD = "nvidia-driver", "nvidia-operator-validator", "nvidia-gpu-feature-discovery"
NAMES = (
    "nvidia-vgpu-manager",
    DRIVER,
    "nvidia-container-toolkit",
    VALIDATOR,
    "nvidia-device-plugin",
    GFD,
    "nvidia-dcgm",
    "nvidia-dcgm-exporter",
)
"""The accounts that the manifests of operands with NVIDIA's images name."""
EVERYWHERE = {
    # The driver-manager removes the pods that use the driver, by node labels and by eviction.
    DRIVER: (
        PolicyRule(api_groups=("",), resources=("nodes",), verbs=("get", "list", "watch", "patch", "update")),
        PolicyRule(api_groups=("",), resources=("pods",), verbs=("get", "list", "watch", "delete")),
        PolicyRule(api_groups=("",), resources=("pods/eviction",), verbs=("create",)),
        PolicyRule(api_groups=("apps",), resources=("daemonsets",), verbs=("get",)),
    ),
    VALIDATOR: (PolicyRule(api_groups=("",), resources=("nodes",), verbs=("get",)),),
}
IN_NAMESPACE = {
    GFD: (
        PolicyRule(
            api_groups=("nfd.k8s-sigs.io",),
            resources=("nodefeatures",),
            verbs=("get", "list", "watch", "create", "update"),
        ),
    ),
}


def accounts(namespace: str) -> tuple[Manifest, ...]:
    """Return the service accounts, roles and bindings of all operands that run NVIDIA's images."""
    made: list[Manifest] = [
        ServiceAccount(api_version=workloads.CORE, metadata=_named(name, namespace)) for name in NAMES
    ]
    for name, rules in EVERYWHERE.items():
        made.append(ClusterRole(api_version=workloads.RBAC, metadata=_named(name), rules=rules))
        made.append(
            ClusterRoleBinding(
                api_version=workloads.RBAC,
                metadata=_named(name),
                role_ref=RoleReference(api_group=RBAC_GROUP, kind="ClusterRole", name=name),
                subjects=(Subject(kind="ServiceAccount", name=name, namespace=namespace),),
            )
        )
    for name, rules in IN_NAMESPACE.items():
        made.append(Role(api_version=workloads.RBAC, metadata=_named(name, namespace), rules=rules))
        made.append(
            RoleBinding(
                api_version=workloads.RBAC,
                metadata=_named(name, namespace),
                role_ref=RoleReference(api_group=RBAC_GROUP, kind="Role", name=name),
                subjects=(Subject(kind="ServiceAccount", name=name, namespace=namespace),),
            )
        )
    return tuple(made)


def _named(name: str, namespace: str = "") -> ObjectMeta:
    return ObjectMeta(name=name, namespace=namespace, labels=dict((PART_OF, MANAGED_BY)))
