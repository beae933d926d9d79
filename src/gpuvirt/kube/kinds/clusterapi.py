"""Machines and MachineHealthChecks, by which the Cluster API and OpenShift replace VMs of nodes that are not ready.

Source: cluster-api, api/core/v1beta1 and v1beta2 (annotations in common_types.go), and what its machinehealthcheck
reconciler skips; openshift/machine-api-operator, pkg/controller/machinehealthcheck, which skips paused checks alone.
"""

import msgspec

from gpuvirt.kube.labels import LabelSelector
from gpuvirt.kube.resources import Metadata, Resource

CLUSTER_API, OPENSHIFT = "cluster.x-k8s.io", "machine.openshift.io"
CLUSTER_API_VERSIONS = ("v1beta2", "v1beta1")
OPENSHIFT_VERSIONS = ("v1beta1",)
MACHINE_OF, NAMESPACE_OF = f"{CLUSTER_API}/machine", f"{CLUSTER_API}/cluster-namespace"
"""Annotations of nodes: the name of the Machine, and its namespace."""
OPENSHIFT_MACHINE_OF = f"{OPENSHIFT}/machine"
"""Annotation of nodes: `NAMESPACE/NAME` of the Machine."""
PAUSED, SKIPPED = f"{CLUSTER_API}/paused", f"{CLUSTER_API}/skip-remediation"
"""Annotations, whose values do not count. OpenShift knows PAUSED of health checks."""


class _MachineSpec(msgspec.Struct, frozen=True, rename="camel"):
    cluster_name: str = ""
    """Empty in OpenShift's kind."""


class Machine(msgspec.Struct, frozen=True):
    """A Machine."""

    metadata: Metadata
    spec: _MachineSpec = _MachineSpec()


class _CheckSpec(msgspec.Struct, frozen=True, rename="camel"):
    cluster_name: str = ""
    selector: LabelSelector = LabelSelector()


class MachineHealthCheck(msgspec.Struct, frozen=True):
    """A MachineHealthCheck."""

    metadata: Metadata
    spec: _CheckSpec = _CheckSpec()

    def replaces(self, machine: Machine, group: str) -> bool:
        """Return whether the check replaces a Machine of its namespace and API group, once its node is not ready."""
        if PAUSED in self.metadata.annotations or self.spec.cluster_name != machine.spec.cluster_name:
            return False
        if group == CLUSTER_API and {PAUSED, SKIPPED} & machine.metadata.annotations.keys():
            return False
        return self.spec.selector.matches(machine.metadata.labels)


def machines(group: str, version: str, namespace: str) -> Resource:
    """Return the Machines of a namespace."""
    return Resource("machines", group, version, namespace)


def machine_health_checks(group: str, version: str, namespace: str) -> Resource:
    """Return the MachineHealthChecks of a namespace."""
    return Resource("machinehealthchecks", group, version, namespace)
