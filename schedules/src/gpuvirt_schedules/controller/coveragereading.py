"""Reads what covers workers: the ConfigMap of a cluster autoscaler, Machines of nodes, and their health checks."""

from collections.abc import Iterable, Mapping

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.client import Client
from gpuvirt.kube.collection import Collection
from gpuvirt.kube.failures import ForbiddenError, NotFoundError
from gpuvirt.kube.kinds import clusterapi as kind
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.resources import Metadata, Resource
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt_schedules.decide.coverage import (
    MAY_LEAVE,
    SCALE_DOWN_DISABLED,
    MachineCoverage,
    WorkerCoverage,
    coverage_faults,
)

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
        found = {NodeName(node.metadata.name): node for node in nodes}
        seen = {name: node.metadata.annotations for name, node in found.items()}
        now_s = self.clock.monotonic_s()
        if not found or (seen == self._clear and now_s - self._read_s < AGAIN_S):
            return ()
        try:
            covered = [await self._coverage(name, node) for name, node in found.items()]
            problems = tuple(coverage_faults(covered, await self._autoscaler()))
        except ForbiddenError as error:
            problems = (
                Reason(
                    ReasonCode.COVERAGE_UNKNOWN,
                    "autoscaler or health checks",
                    f"can't be read, so gpuvirt does not know whether they would delete workers that are off: {error}",
                    fix="give the controller the rights of docs/schedules.md",
                ),
            )
        self._clear, self._read_s = (None if problems else seen), now_s
        return problems

    async def _autoscaler(self) -> str | None:
        listed = await self.client.list(Collection(CONFIG_MAPS, _Named, name=AUTOSCALER))
        return next((f"{found.metadata.namespace}/{found.metadata.name}" for found in listed.items), None)

    async def _coverage(self, name: NodeName, node: Node) -> WorkerCoverage:
        annotations = node.metadata.annotations
        if annotations.get(MAY_LEAVE) == "true":
            return WorkerCoverage(name, may_leave=True)
        return WorkerCoverage(
            name,
            is_never_scaled_down=annotations.get(SCALE_DOWN_DISABLED) == "true",
            machines=tuple([await self._machine(machine) for machine in _machines_of(annotations)]),
        )

    async def _machine(self, machine: _MachineRef) -> MachineCoverage:
        """Return what covers a Machine. A kind that the cluster lacks is that of a management cluster."""
        for version in machine.versions:
            try:
                checks = kind.machine_health_checks(machine.group, version, machine.namespace)
                listed = (await self.client.list(Collection(checks, kind.MachineHealthCheck))).items
                place = kind.machines(machine.group, version, machine.namespace)
                found = await self.client.get(place, machine.name, kind.Machine)
            except NotFoundError:
                continue
            replacing = [check.metadata for check in listed if check.replaces(found, machine.group)]
            names = tuple(f"{metadata.namespace}/{metadata.name}" for metadata in replacing)
            return MachineCoverage(machine.text, names, _fix(machine, names))
        return MachineCoverage(machine.text, None, "")


def _machines_of(annotations: Mapping[str, str]) -> Iterable[_MachineRef]:
    if name := annotations.get(kind.MACHINE_OF):
        namespace = annotations.get(kind.NAMESPACE_OF, "default")
        yield _MachineRef(kind.CLUSTER_API, kind.CLUSTER_API_VERSIONS, namespace, name)
    namespace, _, name = annotations.get(kind.OPENSHIFT_MACHINE_OF, "").rpartition("/")
    if namespace and name:
        yield _MachineRef(kind.OPENSHIFT, kind.OPENSHIFT_VERSIONS, namespace, name)


def _fix(machine: _MachineRef, checks: tuple[str, ...]) -> str:
    if machine.group == kind.CLUSTER_API:
        object_name = f"machines.{machine.group} {machine.name}"
        return f"kubectl annotate -n {machine.namespace} {object_name} {kind.SKIPPED}="
    first = checks[0].partition("/")[2] if checks else "NAME"
    pause = f"kubectl annotate -n {machine.namespace} machinehealthchecks.{machine.group} {first} {kind.PAUSED}="
    return f"have the selector of the check leave the Machine out, or pause the check: {pause}"
