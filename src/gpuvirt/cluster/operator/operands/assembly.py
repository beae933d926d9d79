"""DaemonSets, assembled from an operand's draft and the policy's settings for all DaemonSets.

Contract: NVIDIA's operator. The policy's tolerations and priority class replace an operand's own. The policy's labels
and annotations are added to DaemonSets and pods, but replace none of the labels that select them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

import msgspec
from msgspec.structs import replace

from gpuvirt.cluster.kinds import workloads
from gpuvirt.cluster.kinds.clusterpolicy import API_VERSION, KIND, ClusterPolicy, Daemonsets, Toleration, UpdateStrategy
from gpuvirt.cluster.kinds.containeroperands import Probe
from gpuvirt.cluster.kinds.manifests import LocalReference, ObjectMeta, OwnerReference
from gpuvirt.cluster.kinds.operandparts import EnvVar as PolicyVariable
from gpuvirt.cluster.kinds.operandparts import ImageParts, Operand, Resources
from gpuvirt.cluster.kinds.podparts import EnvVar, PodSpec, PodTemplate, ProbeSpec, ResourceNeeds, TemplateMeta
from gpuvirt.cluster.kinds.workloads import DaemonSet, DaemonSetSpec, LabelSelector, RollingUpdate
from gpuvirt.cluster.labels import OPERAND_LABEL, TEMPLATE_LABEL
from gpuvirt.cluster.operator.operands.site import MANAGED_BY, PART_OF, OperandName, Site
from gpuvirt.cluster.operator.operands.specchecks import is_share

GPU_TOLERATION = Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule")
PRIORITY = "system-node-critical"
OURS = {"app", PART_OF[0], MANAGED_BY[0]}
"""Labels that select operands' objects and pods."""
OUR_PREFIX = "gpuvirt.io/"


@dataclass(frozen=True, slots=True)
class Draft:
    """An operand's own part of its DaemonSet."""

    operand: OperandName
    pod: PodSpec
    name: str = ""
    """The DaemonSet's name; the operand's name if empty."""
    tolerations: tuple[Toleration, ...] = (GPU_TOLERATION,)
    selected_by: Mapping[str, str] = field(default_factory=dict)
    """Labels that select the pods, in addition to `app`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Additional labels of the pods."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Additional annotations of the pods."""
    on_delete: bool = False
    """Whether the update strategy is OnDelete, whatever the policy sets for all DaemonSets."""
    owned: bool = True
    """Whether Kubernetes deletes the DaemonSet together with the policy."""


def daemon_set(policy: ClusterPolicy, site: Site, draft: Draft) -> DaemonSet:
    """Return the DaemonSet of a draft."""
    desired = policy.spec.daemonsets
    name = draft.name or draft.operand.value
    pod = replace(
        draft.pod,
        tolerations=desired.tolerations or draft.tolerations,
        priority_class_name=desired.priority_class_name or PRIORITY,
        dns_policy="ClusterFirstWithHostNet" if draft.pod.host_network else "",
    )
    chosen = {"app": draft.operand.value, **draft.selected_by}
    labels = {**unreserved(desired.labels), **draft.labels, **chosen, **dict((PART_OF, MANAGED_BY))}
    annotations = {**desired.annotations, **draft.annotations}
    template = _stamped(PodTemplate(metadata=TemplateMeta(labels=labels, annotations=annotations), spec=pod))
    return DaemonSet(
        api_version=workloads.APPS,
        metadata=replace(
            metadata(policy, site, draft.operand, name),
            labels={**unreserved(desired.labels), **_selecting_labels(draft.operand), **draft.selected_by},
            annotations=desired.annotations,
            owner_references=_owners(policy) if draft.owned else (),
        ),
        spec=DaemonSetSpec(
            selector=LabelSelector(match_labels=chosen),
            template=template,
            update_strategy=_strategy(desired, on_delete=draft.on_delete),
        ),
    )


def metadata(
    policy: ClusterPolicy, site: Site, operand: OperandName, name: str, *, clusterwide: bool = False
) -> ObjectMeta:
    """Return the metadata of an operand's object, which Kubernetes deletes together with the policy."""
    return ObjectMeta(
        name=name,
        namespace="" if clusterwide else site.settings.namespace,
        labels=_selecting_labels(operand),
        owner_references=_owners(policy),
    )


def _selecting_labels(operand: OperandName) -> dict[str, str]:
    return {"app": operand.value, **dict((PART_OF, MANAGED_BY)), OPERAND_LABEL: operand.value}


def _owners(policy: ClusterPolicy) -> tuple[OwnerReference, ...]:
    about = policy.metadata
    return (OwnerReference(api_version=API_VERSION, kind=KIND, name=about.name, uid=about.uid, controller=True),)


def template_of(found: DaemonSet) -> str:
    """Return the digest label of pods that match a DaemonSet's current template."""
    return found.spec.template.metadata.labels[TEMPLATE_LABEL]


def digest(content: bytes) -> str:
    """Return a digest that is short enough for a label."""
    return sha256(content).hexdigest()[:16]


def environment(own: Iterable[EnvVar], desired: Iterable[PolicyVariable]) -> tuple[EnvVar, ...]:
    """Return an operand's own variables, replaced and extended by those of the policy."""
    by_name = {variable.name: variable for variable in own}
    for variable in desired:
        by_name[variable.name] = EnvVar(name=variable.name, value=variable.value)
    return tuple(by_name.values())


def resources_of(desired: Resources | None, own: ResourceNeeds | None = None) -> ResourceNeeds:
    """Return a container's resource requests and limits: those of the policy, or else the operand's own."""
    if desired is None:
        return own or ResourceNeeds()
    return ResourceNeeds(limits=desired.limits, requests=desired.requests)


def probe(own: ProbeSpec, desired: Probe | None) -> ProbeSpec:
    """Return an operand's own probe with the numbers that the policy sets."""
    set_numbers = (
        {} if desired is None else {name: number for name, number in msgspec.structs.asdict(desired).items() if number}
    )
    return replace(own, **set_numbers)


def secrets(*desired: ImageParts | Iterable[str]) -> tuple[LocalReference, ...]:
    """Return the Secrets for pulling images, each once."""
    names: dict[str, None] = {}
    for source in desired:
        names |= dict.fromkeys(source.image_pull_secrets if isinstance(source, ImageParts) else source)
    return tuple(LocalReference(name=name) for name in names if name)


def on_host_network(operand: Operand) -> bool:
    """Return whether an operand's pods use the host's network."""
    return operand.host_network is True


def _stamped(template: PodTemplate) -> PodTemplate:
    labels = {**template.metadata.labels, TEMPLATE_LABEL: digest(msgspec.json.encode(template, order="deterministic"))}
    return replace(template, metadata=replace(template.metadata, labels=labels))


def unreserved(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the policy's labels without those that select objects and pods."""
    return {key: value for key, value in labels.items() if key not in OURS and not key.startswith(OUR_PREFIX)}


def _strategy(desired: Daemonsets, *, on_delete: bool) -> workloads.UpdateStrategy:
    if on_delete or desired.update_strategy is UpdateStrategy.ON_DELETE:
        return workloads.UpdateStrategy(type="OnDelete")
    text = desired.rolling_update.max_unavailable if desired.rolling_update is not None else ""
    most: int | str = 1
    if text and is_share(text):
        most = text if text.endswith("%") else int(text)
    return workloads.UpdateStrategy(type="RollingUpdate", rolling_update=RollingUpdate(max_unavailable=most))
