"""Decisions for operands: the objects to apply and to delete, the pods to replace, and each DaemonSet's progress.

A stored object matches its manifest by a digest in an annotation and by its fields. The digest alone, which NVIDIA's
operator uses, does not notice edits by hand. The comparison alone may always find a difference, since the API server
may write a value in another way (`1000m` and `1`). So a manifest whose digest matches is applied once for each version
of the object.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256

import msgspec
from msgspec.structs import replace

from gpuvirt import nulls
from gpuvirt.controller.operands.assembly import template_of
from gpuvirt.controller.operands.inputs import OperandName, Rendered
from gpuvirt.controller.store import Objects
from gpuvirt.controller.writes import ApplyObject, DeleteObject, WriteTarget
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy
from gpuvirt.kube.kinds.core import DaemonSetStatus, Pod
from gpuvirt.kube.kinds.workloads import DaemonSet, Manifest, Role, RoleBinding, encoded, resource_of
from gpuvirt.kube.labels import OPERAND_LABEL, TEMPLATE_LABEL, WITH_TOOLKIT
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import Metadata, Resource, pods
from gpuvirt.model.desired.workload import Workload
from gpuvirt.plain import Plain

DIGEST_ANNOTATION = "gpuvirt.io/applied"
NULL = msgspec.Raw(b"null")


class StoredObject(msgspec.Struct, frozen=True, rename="camel"):
    """A stored object of any kind that operands consist of, with the parts that the controller applies."""

    metadata: Metadata
    spec: msgspec.Raw = NULL
    data: msgspec.Raw = NULL
    rules: msgspec.Raw = NULL
    role_ref: msgspec.Raw = NULL
    subjects: msgspec.Raw = NULL
    handler: msgspec.Raw = NULL
    status: DaemonSetStatus = DaemonSetStatus()

    @property
    def texts(self) -> dict[str, str] | None:
        """The data of a ConfigMap; None if it has none."""
        return None if nulls.is_null(self.data) else nulls.decode(self.data, dict[str, str])

    @property
    def version(self) -> str:
        """The generation, or else the resource version: it changes when any writer changes the applied fields."""
        return str(self.metadata.generation) if self.metadata.generation else self.metadata.resource_version


class Mark(msgspec.Struct, frozen=True):
    """The digest of the last applied manifest, and the version of the object that resulted."""

    digest: str
    version: str


def digest_of(manifest: Manifest) -> str:
    """Return a digest of a manifest's content."""
    return sha256(encoded(manifest)).hexdigest()[:16]


def signed(manifest: Manifest) -> Manifest:
    """Return a manifest with its digest as an annotation."""
    annotations = {**manifest.metadata.annotations, DIGEST_ANNOTATION: digest_of(manifest)}
    return replace(manifest, metadata=replace(manifest.metadata, annotations=annotations))


def is_due(manifest: Manifest, stored: StoredObject | None, mark: Mark | None) -> bool:
    """Return whether a manifest has to be applied; `mark` is the last apply of this controller."""
    digest = digest_of(manifest)
    if stored is None or stored.metadata.annotations.get(DIGEST_ANNOTATION) != digest:
        return True
    if mark == Mark(digest, stored.version):
        return False
    return not _matches(manifest, stored)


def _matches(manifest: Manifest, stored: StoredObject) -> bool:
    desired: dict[str, Plain] = msgspec.json.decode(encoded(manifest))
    observed: dict[str, Plain] = {
        "spec": msgspec.json.decode(stored.spec),
        "data": msgspec.json.decode(stored.data),
        "rules": msgspec.json.decode(stored.rules),
        "roleRef": msgspec.json.decode(stored.role_ref),
        "subjects": msgspec.json.decode(stored.subjects),
        "handler": msgspec.json.decode(stored.handler),
    }
    labels = stored.metadata.labels
    return all(labels.get(key) == value for key, value in manifest.metadata.labels.items()) and all(
        covers(value, observed[part]) for part, value in desired.items() if part in observed
    )


def covers(desired: Plain, observed: Plain) -> bool:
    """Return whether the observed value has all desired fields; the API server adds defaults."""
    if isinstance(desired, dict):
        return isinstance(observed, dict) and all(covers(value, observed.get(key)) for key, value in desired.items())
    if isinstance(desired, list):
        if not isinstance(observed, list) or len(desired) != len(observed):
            return False
        return all(covers(item, other) for item, other in zip(desired, observed, strict=True))
    return desired == observed


# The agent's pods to delete, so that the DaemonSet creates new ones: one node first, then several at a time.
#
# The DaemonSet's strategy is OnDelete. RollingUpdate would replace the next agent as soon as one passes its probe. Here
# all other nodes wait until the first node's new pod is ready, and later ones until fewer pods are unavailable.
class Rollout(msgspec.Struct, frozen=True):
    """The progress of replacing pods, and the pods to delete next."""

    delete: tuple[Pod, ...] = ()
    old: int = 0
    """How many pods still run an older version."""
    waits_for: str | None = None
    """The reason why the next deletion waits; None if it does not wait."""


def rollout(pods: Iterable[Pod], template: str, *, desired: int, most_unavailable: str | int) -> Rollout:
    """Return which pods to delete now.

    `template` is the label value of new pods, `desired` the desired number of pods, `most_unavailable` a number of
    nodes or a share of them (`10%`, rounded up, as for a DaemonSet). A pod that is not ready does not count as
    unavailable when it is replaced, since it serves no VM.
    """
    current = sorted((pod for pod in pods if not pod.metadata.deletion_timestamp), key=lambda pod: pod.spec.node_name)
    new = [pod for pod in current if pod.metadata.labels.get(TEMPLATE_LABEL) == template]
    old = [pod for pod in current if pod.metadata.labels.get(TEMPLATE_LABEL) != template]
    ready_new = [pod for pod in new if pod.status.ready]
    if not old:
        return Rollout()
    allowed = _number(most_unavailable, desired)
    late = [pod for pod in new if not pod.status.ready]
    if not ready_new:
        allowed = 1  # until one new pod is ready
        if late or len(current) < desired:
            return Rollout((), len(old), _waits(late, "the first node to be upgraded"))
    ready = len(ready_new) + sum(pod.status.ready for pod in old)
    room = allowed - (desired - ready)
    unready = [pod for pod in old if not pod.status.ready]
    ready_old = [pod for pod in old if pod.status.ready]
    chosen = (*unready[: max(1, allowed)], *ready_old[: max(0, room)]) if ready_new else (*unready, *ready_old)[:1]
    return Rollout(tuple(chosen), len(old), None if chosen else _waits(late, "nodes that are being upgraded"))


def _waits(late: Sequence[Pod], what: str) -> str:
    if not late:
        return f"waits for {what}: Kubernetes has not created all new pods yet"
    pods = ", ".join(f"{pod.metadata.name} on {pod.spec.node_name}" for pod in late)
    return f"waits for {what}; not ready: {pods}"


def _number(most: str | int, of: int) -> int:
    """Return how many pods may be unavailable at once; at least one, since no pod would be replaced otherwise."""
    text = str(most)
    if text.endswith("%") and text[:-1].isdecimal():
        return max(1, -(-int(text[:-1]) * of // 100))
    return max(1, int(text)) if text.isdecimal() else 1


DAEMON_SETS = "daemonsets"
FOR_VMS = frozenset({OperandName.AGENT, OperandName.VGPU_MANAGER})

Stored = Mapping[Resource, Objects[StoredObject]]
"""The stored objects by collection; ConfigMaps include those of other owners."""


class Existing(msgspec.Struct, frozen=True):
    """The operands' objects and pods in the cluster."""

    stored: Stored = msgspec.field(default_factory=dict)
    pods: Objects[Pod] = msgspec.field(default_factory=dict)
    marks: Mapping[WriteTarget, Mark] = msgspec.field(default_factory=dict)
    """The objects that this controller has applied while it leads."""


class OperandState(msgspec.Struct, frozen=True):
    """The progress of one DaemonSet."""

    name: str
    operand: OperandName
    desired: int = 0
    ready: int = 0
    against: str | None = None
    """Why the DaemonSet is not ready; None if it is."""


class Deployment(msgspec.Struct, frozen=True):
    """The writes for operands, and their progress."""

    writes: tuple[ApplyObject | DeleteObject, ...] = ()
    states: tuple[OperandState, ...] = ()
    faults: tuple[str, ...] = ()
    """The fields of the policy that cannot be deployed, each with the reason."""


def decide(
    policy: ClusterPolicy,
    rendered: Rendered,
    existing: Existing,
    workloads: frozenset[Workload | None],
    with_used_vgpus: Sequence[str],
) -> Deployment:
    """Compare the rendered objects with those in the cluster, and return the writes and the progress.

    `workloads` are those of nodes with operands; VMs use vGPUs on the nodes `with_used_vgpus`.
    """
    states, writes = list[OperandState](), list[ApplyObject | DeleteObject]()
    due = [
        manifest
        for manifest in rendered.manifests
        if is_due(manifest, _stored(manifest, existing), existing.marks.get(_target(manifest)))
    ]
    for manifest in rendered.manifests:
        name, stored = manifest.metadata.name, _stored(manifest, existing)
        if manifest in due:
            if not any(_needs(manifest, other) for other in due):
                writes.append(ApplyObject(_target(manifest), signed(manifest)))
        elif isinstance(manifest, DaemonSet) and stored is not None:
            state, deletions = _daemon_set(policy, manifest, stored, existing)
            states.append(state)
            writes += deletions
            continue
        if isinstance(manifest, DaemonSet):
            operand = OperandName(manifest.metadata.labels[OPERAND_LABEL])
            states.append(OperandState(name, operand, against="being created or updated"))
    gone, kept = _superfluous(rendered, existing.stored, with_used_vgpus)
    gone = [deletion for deletion in gone if not _is_needed(deletion, rendered, existing)]
    faults = (
        f"{fault.because.path}: {fault.because.message}"
        for fault in rendered.faults
        if workloads & WITH_TOOLKIT or fault.operand in FOR_VMS  # the others need nodes for containers
    )
    return Deployment((*writes, *gone), (*states, *kept), tuple(faults))


def _target(manifest: Manifest) -> WriteTarget:
    return WriteTarget(resource_of(manifest), manifest.metadata.name)


def _stored(manifest: Manifest, existing: Existing) -> StoredObject | None:
    key = ObjectKey(manifest.metadata.namespace, manifest.metadata.name)
    return existing.stored.get(resource_of(manifest), {}).get(key)


def _needs(manifest: Manifest, other: Manifest) -> bool:
    """Return whether one object is applied only after another, so that pods find their files and permissions."""
    if manifest.metadata.labels[OPERAND_LABEL] != other.metadata.labels[OPERAND_LABEL]:
        return False
    if isinstance(manifest, DaemonSet):
        return not isinstance(other, DaemonSet)
    return isinstance(manifest, RoleBinding) and isinstance(other, Role)


def _daemon_set(
    policy: ClusterPolicy, daemon_set: DaemonSet, stored: StoredObject, existing: Existing
) -> tuple[OperandState, list[DeleteObject]]:
    """Return a DaemonSet's progress and the pods to delete; the controller replaces only the agent's pods itself."""
    status, name = stored.status, daemon_set.metadata.name
    operand = OperandName(daemon_set.metadata.labels[OPERAND_LABEL])
    desired, ready = status.desired_number_scheduled, status.number_available
    deletions, waits = list[DeleteObject](), None
    if status.observed_generation < stored.metadata.generation:
        return OperandState(
            name, operand, desired, ready, "Kubernetes has not processed its latest change yet"
        ), deletions
    if operand is OperandName.AGENT:
        rolling = policy.spec.daemonsets.rolling_update
        most = (rolling.max_unavailable if rolling is not None else "") or 1
        agents = [pod for pod in existing.pods.values() if pod.app == operand]
        plan = rollout(agents, template_of(daemon_set), desired=desired, most_unavailable=most)
        for pod in plan.delete:
            target = WriteTarget(pods(pod.metadata.namespace), pod.metadata.name)
            why = f"it runs an older version of DaemonSet {name} on {pod.spec.node_name}"
            deletions.append(DeleteObject(target, pod.metadata.uid, why))
        waits = (
            f"{plan.old} of {desired} pods run an older version; the rollout {plan.waits_for or 'continues'}"
            if plan.old
            else None
        )
    if ready < desired:
        unready = ", ".join(_unready_pods(operand, daemon_set, existing.pods)) or "no pod has been created yet"
        return OperandState(
            name, operand, desired, ready, f"{ready} of {desired} pods are ready; not ready: {unready}"
        ), deletions
    return OperandState(name, operand, desired, ready, waits), deletions


def _unready_pods(operand: OperandName, daemon_set: DaemonSet, found: Objects[Pod]) -> Iterator[str]:
    chosen = daemon_set.spec.selector.match_labels
    for pod in sorted(found.values(), key=lambda pod: pod.spec.node_name):
        if not pod.status.ready and chosen.items() <= pod.metadata.labels.items() and pod.app == operand:
            because = pod.status.waiting_reason
            yield f"{pod.metadata.name} on {pod.spec.node_name}" + (f" ({because})" if because else "")


def _is_needed(deletion: DeleteObject, rendered: Rendered, existing: Existing) -> bool:
    """Return whether a deletion waits: an operand's other objects go after its DaemonSets and pods, which need them."""
    resource, key = deletion.target.resource, ObjectKey(deletion.target.resource.namespace or "", deletion.target.name)
    operand = existing.stored[resource][key].metadata.labels[OPERAND_LABEL]
    if resource.plural == DAEMON_SETS or operand in rendered.operands:
        return False
    sets = (
        stored for at, objects in existing.stored.items() if at.plural == DAEMON_SETS for stored in objects.values()
    )
    has_set = any(daemon_set.metadata.labels.get(OPERAND_LABEL) == operand for daemon_set in sets)
    return has_set or any(pod.app == operand for pod in existing.pods.values())


def _superfluous(
    rendered: Rendered, stored: Stored, used: Sequence[str]
) -> tuple[list[DeleteObject], list[OperandState]]:
    """Return the objects that are no longer rendered; a vGPU manager stays until no VM uses its vGPUs."""
    named = {(resource_of(manifest), manifest.metadata.name) for manifest in rendered.manifests}
    faulty = {fault.operand.value for fault in rendered.faults}
    gone, kept = list[DeleteObject](), list[OperandState]()
    for resource, objects in stored.items():
        for key, found in objects.items():
            operand = found.metadata.labels.get(OPERAND_LABEL)
            if operand is None or operand in faulty or (resource, key.name) in named:
                continue
            if operand in rendered.operands and found.status.desired_number_scheduled:
                continue  # nodes still run this driver: the label of their operating system may be missing for a while
            if operand == OperandName.VGPU_MANAGER and used:
                against = f"no longer needed; it stays as long as VMs have vGPUs on {', '.join(used)}"
                kept.append(OperandState(key.name, OperandName.VGPU_MANAGER, against=against))
            elif not found.metadata.deletion_timestamp:
                gone.append(
                    DeleteObject(
                        WriteTarget(resource, key.name),
                        found.metadata.uid,
                        "the ClusterPolicy and the nodes no longer need it",
                    )
                )
    return gone, kept
