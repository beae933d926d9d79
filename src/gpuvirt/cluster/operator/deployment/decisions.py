"""What follows for operands: objects to apply and to delete, pods to replace, and how far each operand has come."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gpuvirt.cluster.kinds.clusterpolicy import ClusterPolicy
from gpuvirt.cluster.kinds.core import Pod
from gpuvirt.cluster.kinds.workloads import DaemonSet, Manifest, Role, RoleBinding, resource_of
from gpuvirt.cluster.labels import OPERAND_LABEL
from gpuvirt.cluster.objects import ObjectKey
from gpuvirt.cluster.operator.deployment.drift import Mark, StoredObject, is_due, signed
from gpuvirt.cluster.operator.deployment.rollout import rollout
from gpuvirt.cluster.operator.nodes.placement import Placement
from gpuvirt.cluster.operator.operands.assembly import template_of
from gpuvirt.cluster.operator.operands.site import OperandName, Rendered
from gpuvirt.cluster.operator.store import Objects
from gpuvirt.cluster.operator.writes import ApplyObject, DeleteObject, Target
from gpuvirt.cluster.resources import Resource, pods
from gpuvirt.model.desired.workload import Workload

DAEMON_SETS = "daemonsets"
FOR_VMS = frozenset({OperandName.AGENT, OperandName.VGPU_MANAGER})

Stored = Mapping[Resource, Objects[StoredObject]]
"""All that is there, by collection; of ConfigMaps those of others, too."""


@dataclass(frozen=True, slots=True)
class There:
    """What is there of operands."""

    stored: Stored = field(default_factory=dict)
    pods: Objects[Pod] = field(default_factory=dict)
    marks: Mapping[Target, Mark] = field(default_factory=dict)
    """What was applied in this term."""


@dataclass(frozen=True, slots=True)
class OperandState:
    """How far one DaemonSet has come."""

    name: str
    operand: OperandName
    desired: int = 0
    ready: int = 0
    against: str | None = None
    """Why it is not as it should be; None where it is."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """What follows."""

    writes: tuple[ApplyObject | DeleteObject, ...] = ()
    states: tuple[OperandState, ...] = ()
    faults: tuple[str, ...] = ()
    """What of the policy can't be deployed, and why."""


def decide(policy: ClusterPolicy, rendered: Rendered, there: There, placements: Mapping[str, Placement]) -> Deployment:
    """Return what follows from what is to be there and what is."""
    states, writes = list[OperandState](), list[ApplyObject | DeleteObject]()
    due = [one for one in rendered.manifests if is_due(one, _stored(one, there), there.marks.get(_target(one)))]
    for manifest in rendered.manifests:
        name, stored = manifest.metadata.name, _stored(manifest, there)
        if manifest in due:
            if not any(_needs(manifest, one) for one in due):
                writes.append(ApplyObject(_target(manifest), signed(manifest)))
        elif isinstance(manifest, DaemonSet) and stored is not None:
            state, deletions = _daemon_set(policy, manifest, stored, there)
            states.append(state)
            writes += deletions
            continue
        if isinstance(manifest, DaemonSet):
            operand = OperandName(manifest.metadata.labels[OPERAND_LABEL])
            states.append(OperandState(name, operand, against="is being deployed"))
    used = sorted(name for name, one in placements.items() if one.vgpus_used)
    gone, kept = _superfluous(rendered, there.stored, used)
    gone = [one for one in gone if not _is_needed(one, rendered, there)]
    faults = tuple(_faults(rendered, placements))
    return Deployment((*writes, *gone), (*states, *kept), faults)


def _target(manifest: Manifest) -> Target:
    return Target(resource_of(manifest), manifest.metadata.name)


def _stored(manifest: Manifest, there: There) -> StoredObject | None:
    key = ObjectKey(manifest.metadata.namespace, manifest.metadata.name)
    return there.stored.get(resource_of(manifest), {}).get(key)


def _needs(manifest: Manifest, other: Manifest) -> bool:
    """Return whether one object is to be there after another: pods find their files and their rights."""
    if manifest.metadata.labels[OPERAND_LABEL] != other.metadata.labels[OPERAND_LABEL]:
        return False
    if isinstance(manifest, DaemonSet):
        return not isinstance(other, DaemonSet)
    return isinstance(manifest, RoleBinding) and isinstance(other, Role)


def _faults(rendered: Rendered, placements: Mapping[str, Placement]) -> Iterator[str]:
    """Yield what can't be deployed; what only nodes for containers need, where there are such nodes."""
    containers = any(one.counts and one.workload is Workload.CONTAINER for one in placements.values())
    for fault in rendered.faults:
        if containers or fault.operand in FOR_VMS:
            yield f"{fault.because.path}: {fault.because.message}"


def _daemon_set(
    policy: ClusterPolicy, daemon_set: DaemonSet, stored: StoredObject, there: There
) -> tuple[OperandState, list[DeleteObject]]:
    """Return how far a DaemonSet has come, and which of its pods to replace: the agent's alone are the controller's."""
    status, name = stored.status, daemon_set.metadata.name
    operand = OperandName(daemon_set.metadata.labels[OPERAND_LABEL])
    desired, ready = status.desired_number_scheduled, status.number_available
    deletions, waits = list[DeleteObject](), None
    if status.observed_generation < stored.metadata.generation:
        return OperandState(name, operand, desired, ready, "Kubernetes has not seen its change yet"), deletions
    if operand is OperandName.AGENT:
        rolling = policy.spec.daemonsets.rolling_update
        most = (rolling.max_unavailable if rolling is not None else "") or 1
        mine = [pod for pod in there.pods.values() if pod.app == operand]
        plan = rollout(mine, template_of(daemon_set), desired=desired, most_unavailable=most)
        for pod in plan.delete:
            target = Target(pods(pod.metadata.namespace), pod.metadata.name)
            why = f"it is of an earlier version of {name}, on {pod.spec.node_name}"
            deletions.append(DeleteObject(target, pod.metadata.uid, why))
        waits = (
            f"{plan.old} of {desired} pods are of an earlier version; it {plan.waits_for or 'goes on'}"
            if plan.old
            else None
        )
    if ready < desired:
        late = ", ".join(_late(operand, daemon_set, there.pods)) or "none of its pods is there yet"
        return OperandState(
            name, operand, desired, ready, f"{ready} of {desired} pods are ready; not ready: {late}"
        ), deletions
    return OperandState(name, operand, desired, ready, waits), deletions


def _late(operand: OperandName, daemon_set: DaemonSet, found: Objects[Pod]) -> Iterator[str]:
    chosen = daemon_set.spec.selector.match_labels
    for pod in sorted(found.values(), key=lambda one: one.spec.node_name):
        if not pod.status.ready and chosen.items() <= pod.metadata.labels.items() and pod.app == operand:
            because = pod.status.held_up_by
            yield f"{pod.metadata.name} on {pod.spec.node_name}" + (f" ({because})" if because else "")


def _is_needed(deletion: DeleteObject, rendered: Rendered, there: There) -> bool:
    """Return whether an object of an operand that goes as a whole is to wait: its pods go before what they need."""
    resource, key = deletion.target.resource, ObjectKey(deletion.target.resource.namespace or "", deletion.target.name)
    operand = there.stored[resource][key].metadata.labels[OPERAND_LABEL]
    if resource.plural == DAEMON_SETS or operand in rendered.operands:
        return False
    sets = (one for at, objects in there.stored.items() if at.plural == DAEMON_SETS for one in objects.values())
    has_set = any(one.metadata.labels.get(OPERAND_LABEL) == operand for one in sets)
    return has_set or any(pod.app == operand for pod in there.pods.values())


def _superfluous(rendered: Rendered, stored: Stored, used: list[str]) -> tuple[list[DeleteObject], list[OperandState]]:
    """Return objects that are not wanted any more; the driver beneath machines stays until they have ended."""
    daemon_set = {(resource_of(one), one.metadata.name) for one in rendered.manifests}
    faulty = {fault.operand.value for fault in rendered.faults}
    gone, kept = list[DeleteObject](), list[OperandState]()
    for resource, objects in stored.items():
        for key, found in objects.items():
            operand = found.metadata.labels.get(OPERAND_LABEL)
            if operand is None or operand in faulty or (resource, key.name) in daemon_set:
                continue
            if operand in rendered.operands and found.status.desired_number_scheduled:
                continue  # a driver for a system of which some node is still: labels come and go
            if operand == OperandName.VGPU_MANAGER and used:
                against = f"is not wanted any more, and stays: machines have vGPUs on {', '.join(used)}"
                kept.append(OperandState(key.name, OperandName.VGPU_MANAGER, against=against))
            elif not found.metadata.deletion_timestamp:
                gone.append(DeleteObject(Target(resource, key.name), found.metadata.uid, "nothing wants it any more"))
    return gone, kept
