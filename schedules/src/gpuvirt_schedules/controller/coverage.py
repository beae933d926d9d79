"""Controllers that would delete or replace the VM of a worker while it is away: cluster autoscaler and health checks.

It is read from the ConfigMap of a cluster autoscaler, the Machines of nodes, and their health checks. Source:
cluster-autoscaler, core/scaledown/eligibility: it never removes a node with the annotation
`cluster-autoscaler.kubernetes.io/scale-down-disabled: "true"`; it writes its status to a ConfigMap. Of Machines:
cluster-api, api/core/v1beta1 and v1beta2 (annotations in common_types.go), and what its machinehealthcheck
reconciler skips; openshift/machine-api-operator, pkg/controller/machinehealthcheck, which skips paused checks alone.
"""

from collections.abc import AsyncIterator, Iterable, Mapping

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ForbiddenError, NotFoundError
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.labels import LabelSelector
from gpuvirt.kube.resources import Collection, Metadata, Resource
from gpuvirt.model.reasons import Reason, ReasonCode, Seen

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


SCALE_DOWN_DISABLED = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
MAY_LEAVE = "gpuvirt.io/may-leave"
"""Annotation of nodes. By `true` an admin states that nothing deletes or replaces the VM while it is away."""


AUTOSCALER = "cluster-autoscaler-status"
"""The ConfigMap's name by default (`--status-config-map-name`); its namespace is that of the autoscaler."""
CONFIG_MAPS = Resource("configmaps")
AGAIN_S = 30.0
"""How long workers that nothing covers are not looked at again: a round follows each second."""


class _Named(msgspec.Struct, frozen=True):
    metadata: Metadata


class _MachineRef(msgspec.Struct, frozen=True):
    group: str
    versions: tuple[str, ...]
    namespace: str
    name: str

    @property
    def text(self) -> str:
        """The Machine in words: `Machine openshift-machine-api/worker-1 of machine.openshift.io`."""
        return f"Machine {self.namespace}/{self.name} of {self.group}"


class CoverageReading(msgspec.Struct):
    """The coverage of one schedule's workers, as it was read last."""

    client: Client
    clock: Clock
    _clear: Mapping[NodeName, Mapping[str, str]] | None = None
    """The annotations of the workers that nothing covered."""
    _read_s: float = msgspec.field(default=0.0)

    async def faults(self, nodes: Iterable[Node]) -> tuple[Reason, ...]:
        """Return the workers whose VMs may be deleted while they are away; raises ApiError."""
        annotations = {NodeName(node.metadata.name): node.metadata.annotations for node in nodes}
        now_s = self.clock.monotonic_s()
        if not annotations or (annotations == self._clear and now_s - self._read_s < AGAIN_S):
            return ()
        try:
            problems = tuple([fault async for fault in self._read(annotations)])
        except ForbiddenError as error:
            message = "can't be read, so gpuvirt does not know whether they would delete workers that are off"
            fix = "give the controller the rights of docs/schedules.md"  # it has those of an older chart
            subject = "autoscaler or health checks"
            problems = (Reason(ReasonCode.COVERAGE_UNKNOWN, subject, f"{message}: {error}", fix=fix),)
        self._clear, self._read_s = (None if problems else annotations), now_s
        return problems

    async def _read(self, nodes: Mapping[NodeName, Mapping[str, str]]) -> AsyncIterator[Reason]:
        """Yield the faults of nodes, of which these are the annotations."""
        workers = sorted(name for name, annotations in nodes.items() if annotations.get(MAY_LEAVE) != "true")
        machines = {
            name: [
                fault
                for machine in _machines_of(nodes[name])
                if (fault := await self._machine(name, machine)) is not None
            ]
            for name in workers
        }
        maps = (await self.client.list(Collection(CONFIG_MAPS, _Named, name=AUTOSCALER))).items
        autoscaler = next((f"{found.metadata.namespace}/{found.metadata.name}" for found in maps), None)
        for name in workers:
            if autoscaler is not None and nodes[name].get(SCALE_DOWN_DISABLED) != "true":
                yield _autoscaled(name, autoscaler)
            for fault in machines[name]:
                yield fault

    async def _machine(self, node: NodeName, machine: _MachineRef) -> Reason | None:
        """Return the fault of a node whose Machine health checks replace, or whose Machine is unknown; None without.

        A kind that the cluster lacks is that of a management cluster.
        """
        for version in machine.versions:
            try:
                checks = machine_health_checks(machine.group, version, machine.namespace)
                listed = (await self.client.list(Collection(checks, MachineHealthCheck))).items
                place = machines(machine.group, version, machine.namespace)
                found = await self.client.get(place, machine.name, Machine)
            except NotFoundError:
                continue
            replacing = [check.metadata for check in listed if check.replaces(found, machine.group)]
            names = tuple(f"{metadata.namespace}/{metadata.name}" for metadata in replacing)
            return _health_checked(node, machine, names) if names else None
        message = f"is {machine.text}, which this cluster does not show, so its health checks are unknown"
        management = "exclude the Machine from health checks in its management cluster"
        fix = f"{management}, then kubectl annotate node {node} {MAY_LEAVE}=true"
        return Reason(ReasonCode.MACHINE_UNKNOWN, f"node {node}", message, fix=fix)


def _machines_of(annotations: Mapping[str, str]) -> Iterable[_MachineRef]:
    if name := annotations.get(MACHINE_OF):
        namespace = annotations.get(NAMESPACE_OF, "default")
        yield _MachineRef(CLUSTER_API, CLUSTER_API_VERSIONS, namespace, name)
    namespace, _, name = annotations.get(OPENSHIFT_MACHINE_OF, "").rpartition("/")
    if namespace and name:
        yield _MachineRef(OPENSHIFT, OPENSHIFT_VERSIONS, namespace, name)


def _autoscaled(node: NodeName, config_map: str) -> Reason:
    """The autoscaler removes nodes that are not ready for 20 minutes."""
    message = "is not excluded from the cluster autoscaler, which deletes VMs of nodes that are not ready"
    annotate = f"kubectl annotate node {node} {SCALE_DOWN_DISABLED}=true"
    fix = f"{annotate}; or delete the ConfigMap if no autoscaler runs any more"
    return Reason(ReasonCode.WORKER_AUTOSCALED, f"node {node}", message, (Seen("its ConfigMap", config_map),), fix)


def _health_checked(node: NodeName, machine: _MachineRef, checks: tuple[str, ...]) -> Reason:
    """A health check takes a worker that is away for a broken one. Checks are named by namespace and name."""
    if machine.group == CLUSTER_API:
        object_name = f"machines.{machine.group} {machine.name}"
        fix = f"kubectl annotate -n {machine.namespace} {object_name} {SKIPPED}="
    else:
        name = f"machinehealthchecks.{machine.group} {checks[0].partition('/')[2]}"
        pause = f"kubectl annotate -n {machine.namespace} {name} {PAUSED}="
        fix = f"have the selector of the check leave the Machine out, or pause the check: {pause}"
    message = f"is {machine.text}, which MachineHealthCheck {', '.join(checks)} replaces while it is not ready"
    return Reason(ReasonCode.WORKER_HEALTH_CHECKED, f"node {node}", message, fix=fix)
