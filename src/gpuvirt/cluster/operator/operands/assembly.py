"""A DaemonSet put together: what an operand says of itself, and what the policy says of all.

Contract: NVIDIA's operator. Tolerations and the priority class of the policy replace an operand's own; labels and
annotations of the policy go on DaemonSet and pods, and change none of the labels by which either is found.
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
from gpuvirt.cluster.kinds.operandparts import EnvVar as DesiredMode
from gpuvirt.cluster.kinds.operandparts import ImageParts, Operand, Resources
from gpuvirt.cluster.kinds.podparts import EnvVar, PodSpec, PodTemplate, ProbeSpec, ResourceNeeds, TemplateMeta
from gpuvirt.cluster.kinds.workloads import DaemonSet, DaemonSetSpec, LabelSelector, RollingUpdate
from gpuvirt.cluster.labels import OPERAND_LABEL, TEMPLATE_LABEL
from gpuvirt.cluster.operator.operands.site import MANAGED_BY, PART_OF, OperandName, Site
from gpuvirt.cluster.operator.operands.specchecks import is_share

GPU_TOLERATION = Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule")
PRIORITY = "system-node-critical"
OURS = {"app", PART_OF[0], MANAGED_BY[0]}
"""Labels by which objects and pods are found."""
OUR_PREFIX = "gpuvirt.io/"


@dataclass(frozen=True, slots=True)
class Draft:
    """What an operand says of its DaemonSet."""

    operand: OperandName
    pod: PodSpec
    name: str = ""
    """The operand's own where it is empty."""
    tolerations: tuple[Toleration, ...] = (GPU_TOLERATION,)
    selected_by: Mapping[str, str] = field(default_factory=dict)
    """More labels by which its pods are its own, beside `app`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """More labels of its pods."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """More annotations of its pods."""
    on_delete: bool = False
    """Whether its pods are replaced only when somebody deletes them, whatever the policy says of all."""
    owned: bool = True
    """Whether it goes away with the policy."""


def daemon_set(policy: ClusterPolicy, site: Site, draft: Draft) -> DaemonSet:
    """Return a DaemonSet."""
    desired = policy.spec.daemonsets
    name = draft.name or draft.operand.value
    pod = replace(
        draft.pod,
        tolerations=desired.tolerations or draft.tolerations,
        priority_class_name=desired.priority_class_name or PRIORITY,
        dns_policy="ClusterFirstWithHostNet" if draft.pod.host_network else "",
    )
    chosen = {"app": draft.operand.value, **draft.selected_by}
    labels = {**free(desired.labels), **draft.labels, **chosen, **dict((PART_OF, MANAGED_BY))}
    annotations = {**desired.annotations, **draft.annotations}
    template = _stamped(PodTemplate(metadata=TemplateMeta(labels=labels, annotations=annotations), spec=pod))
    return DaemonSet(
        api_version=workloads.APPS,
        metadata=replace(
            metadata(policy, site, draft.operand, name),
            labels={**free(desired.labels), **_found_by(draft.operand), **draft.selected_by},
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
    """Return the metadata of an object of an operand; it goes away with the policy."""
    return ObjectMeta(
        name=name,
        namespace="" if clusterwide else site.namespace,
        labels=_found_by(operand),
        owner_references=_owners(policy),
    )


def _found_by(operand: OperandName) -> dict[str, str]:
    return {"app": operand.value, **dict((PART_OF, MANAGED_BY)), OPERAND_LABEL: operand.value}


def _owners(policy: ClusterPolicy) -> tuple[OwnerReference, ...]:
    about = policy.metadata
    return (OwnerReference(api_version=API_VERSION, kind=KIND, name=about.name, uid=about.uid, controller=True),)


def template_of(found: DaemonSet) -> str:
    """Return the digest that pods of a DaemonSet carry which are as it wants them now."""
    return found.spec.template.metadata.labels[TEMPLATE_LABEL]


def digest(content: bytes) -> str:
    """Return what tells contents apart, short enough for a label."""
    return sha256(content).hexdigest()[:16]


def environment(own: Iterable[EnvVar], desired: Iterable[DesiredMode]) -> tuple[EnvVar, ...]:
    """Return variables of an operand's own, those of the policy beside them and instead of them, each name once."""
    by_name = {one.name: one for one in own}
    for one in desired:
        by_name[one.name] = EnvVar(name=one.name, value=one.value)
    return tuple(by_name.values())


def needs(desired: Resources | None, own: ResourceNeeds | None = None) -> ResourceNeeds:
    """Return what a container asks for: what the policy says, else what the operand itself does."""
    if desired is None:
        return own or ResourceNeeds()
    return ResourceNeeds(limits=desired.limits, requests=desired.requests)


def probe(own: ProbeSpec, desired: Probe | None) -> ProbeSpec:
    """Return when a container is asked: the numbers of the policy instead of an operand's own, where they are set."""
    set_numbers = (
        {} if desired is None else {name: number for name, number in msgspec.structs.asdict(desired).items() if number}
    )
    return replace(own, **set_numbers)


def secrets(*desired: ImageParts | Iterable[str]) -> tuple[LocalReference, ...]:
    """Return the Secrets for pulling images, each once."""
    names: dict[str, None] = {}
    for one in desired:
        names |= dict.fromkeys(one.image_pull_secrets if isinstance(one, ImageParts) else one)
    return tuple(LocalReference(name=name) for name in names if name)


def on_host_network(operand: Operand) -> bool:
    """Return whether an operand's pods have the host's network."""
    return operand.host_network is True


def _stamped(template: PodTemplate) -> PodTemplate:
    labels = {**template.metadata.labels, TEMPLATE_LABEL: digest(msgspec.json.encode(template, order="deterministic"))}
    return replace(template, metadata=replace(template.metadata, labels=labels))


def free(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels of the policy without those by which objects and pods are found."""
    return {key: value for key, value in labels.items() if key not in OURS and not key.startswith(OUR_PREFIX)}


def _strategy(desired: Daemonsets, *, on_delete: bool) -> workloads.UpdateStrategy:
    if on_delete or desired.update_strategy is UpdateStrategy.ON_DELETE:
        return workloads.UpdateStrategy(type="OnDelete")
    text = desired.rolling_update.max_unavailable if desired.rolling_update is not None else ""
    most: int | str = 1
    if text and is_share(text):
        most = text if text.endswith("%") else int(text)
    return workloads.UpdateStrategy(type="RollingUpdate", rolling_update=RollingUpdate(max_unavailable=most))
