"""The common parts of all operands: the policy's settings for all DaemonSets, and the objects' labels and owner.

Contract: NVIDIA's operator. The policy's tolerations and priority class replace an operand's own. The policy's labels
and annotations are added to DaemonSets and pods, but replace none of the labels that select them.
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256

import msgspec
from msgspec.structs import replace

from gpuvirt.controller.operands.inputs import MANAGED_BY, PART_OF, OperandName, RenderInputs, is_share
from gpuvirt.kube.kinds import workloads
from gpuvirt.kube.kinds.clusterpolicy import API_VERSION, KIND, ClusterPolicy, Daemonsets, UpdateStrategy
from gpuvirt.kube.kinds.containeroperands import ProbeTiming
from gpuvirt.kube.kinds.operandparts import EnvVar as PolicyVariable
from gpuvirt.kube.kinds.operandparts import ImageParts, Operand, Resources
from gpuvirt.kube.kinds.parts import LocalReference, ObjectMeta, OwnerReference
from gpuvirt.kube.kinds.podparts import EnvVar, PodTemplate, ProbeSpec, ResourceNeeds, TemplateMeta
from gpuvirt.kube.kinds.workloads import DaemonSet, RollingUpdate, Service
from gpuvirt.kube.labels import OPERAND_LABEL, TEMPLATE_LABEL

ON_DELETE = "OnDelete"
OURS = {"app", PART_OF[0], MANAGED_BY[0]}
"""Labels that select operands' objects and pods."""
OUR_PREFIX = "gpuvirt.io/"


def daemon_set(policy: ClusterPolicy, inputs: RenderInputs, manifest: DaemonSet, *, owned: bool = True) -> DaemonSet:
    """Return an operand's DaemonSet with the policy's settings for all DaemonSets.

    Without `owned` it stays when the policy is deleted.
    """
    desired, spec = policy.spec.daemonsets, manifest.spec
    pod, template, chosen = spec.template.spec, spec.template.metadata, spec.selector.match_labels
    labels = {**unreserved(desired.labels), **template.labels, **chosen, **dict((PART_OF, MANAGED_BY))}
    annotations = {**desired.annotations, **template.annotations}
    pod = replace(
        pod,
        tolerations=desired.tolerations or pod.tolerations,
        priority_class_name=desired.priority_class_name or pod.priority_class_name,
        dns_policy="ClusterFirstWithHostNet" if pod.host_network else "",
    )
    pods = PodTemplate(metadata=TemplateMeta(labels=labels, annotations=annotations), spec=pod)
    pods_digest = digest(msgspec.json.encode(pods, order="deterministic"))
    about = metadata(policy, inputs, OperandName(chosen["app"]), manifest.metadata.name)
    return replace(
        manifest,
        metadata=replace(
            about,
            labels={**unreserved(desired.labels), **about.labels, **chosen},
            annotations=desired.annotations,
            owner_references=about.owner_references if owned else (),
        ),
        spec=replace(
            spec,
            template=replace(pods, metadata=replace(pods.metadata, labels={**labels, TEMPLATE_LABEL: pods_digest})),
            update_strategy=_strategy(desired, on_delete=spec.update_strategy.type == ON_DELETE),
        ),
    )


def service(policy: ClusterPolicy, inputs: RenderInputs, manifest: Service) -> Service:
    """Return a manifest's Service as an object of the operand whose name it has."""
    about = metadata(policy, inputs, OperandName(manifest.metadata.name), manifest.metadata.name)
    return replace(manifest, metadata=replace(about, annotations=manifest.metadata.annotations))


def metadata(
    policy: ClusterPolicy, inputs: RenderInputs, operand: OperandName, name: str, *, clusterwide: bool = False
) -> ObjectMeta:
    """Return the metadata of an operand's object, which Kubernetes deletes together with the policy."""
    owner = policy.metadata
    return ObjectMeta(
        name=name,
        namespace="" if clusterwide else inputs.settings.namespace,
        labels={"app": operand.value, **dict((PART_OF, MANAGED_BY)), OPERAND_LABEL: operand.value},
        owner_references=(
            OwnerReference(api_version=API_VERSION, kind=KIND, name=owner.name, uid=owner.uid, controller=True),
        ),
    )


def template_of(manifest: DaemonSet) -> str:
    """Return the digest label of pods that match a DaemonSet's current template."""
    return manifest.spec.template.metadata.labels[TEMPLATE_LABEL]


def digest(content: bytes) -> str:
    """Return a digest that is short enough for a label."""
    return sha256(content).hexdigest()[:16]


def environment(own: Iterable[EnvVar], desired: Iterable[PolicyVariable]) -> tuple[EnvVar, ...]:
    """Return an operand's own variables, replaced and extended by those of the policy."""
    by_name = {variable.name: variable for variable in own}
    for variable in desired:
        by_name[variable.name] = EnvVar(name=variable.name, value=variable.value)
    return tuple(by_name.values())


def resources_of(desired: Resources | None, own: ResourceNeeds) -> ResourceNeeds:
    """Return a container's resource requests and limits: those of the policy, or else the operand's own."""
    return own if desired is None else ResourceNeeds(limits=desired.limits, requests=desired.requests)


def probe(own: ProbeSpec, desired: ProbeTiming | None) -> ProbeSpec:
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


def unreserved(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the policy's labels without those that select objects and pods."""
    return {key: value for key, value in labels.items() if key not in OURS and not key.startswith(OUR_PREFIX)}


def _strategy(desired: Daemonsets, *, on_delete: bool) -> workloads.UpdateStrategy:
    if on_delete or desired.update_strategy is UpdateStrategy.ON_DELETE:
        return workloads.UpdateStrategy(type=ON_DELETE)
    text = desired.rolling_update.max_unavailable if desired.rolling_update is not None else ""
    most: int | str = 1
    if text and is_share(text):
        most = text if text.endswith("%") else int(text)
    return workloads.UpdateStrategy(type="RollingUpdate", rolling_update=RollingUpdate(max_unavailable=most))
