"""The controller's decisions from one picture of the cluster: the writes, the events and the policy's status."""

from collections.abc import Iterator, Sequence
from datetime import datetime

import msgspec
from msgspec.structs import replace

from gpuvirt.controller import deployment, scheduler
from gpuvirt.controller.announcer import Announcement, invalid_announcements, policy_announcements
from gpuvirt.controller.deployment import Deployment, OperandState
from gpuvirt.controller.kubevirt import decisions as kubevirts
from gpuvirt.controller.kubevirt.decisions import Histories, KubeVirtDecisions
from gpuvirt.controller.nodedecisions import ClusterInputs, NodesSummary
from gpuvirt.controller.nodememory import DecidedNodes
from gpuvirt.controller.nodes.problems import Deployer, NodeVerdict
from gpuvirt.controller.operands.inputs import RenderInputs, spec_faults
from gpuvirt.controller.operands.rendering import config_maps_of, render
from gpuvirt.controller.picture import Picture
from gpuvirt.controller.policy import policies, status
from gpuvirt.controller.policy.policies import unsupported
from gpuvirt.controller.policy.status import PolicyFacts, ReadyCondition
from gpuvirt.controller.settings import ControllerSettings
from gpuvirt.controller.writer import Write
from gpuvirt.controller.writes import PatchPolicyStatus, WriteTarget
from gpuvirt.kube.kinds.clusterpolicy import (
    CLUSTER_POLICIES,
    Choice,
    ClusterPolicy,
    SpecFault,
    Status,
    StoredPolicy,
    choose,
    plain_spec,
)
from gpuvirt.kube.kinds.vmoperands import SandboxMode
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.reasons import Reason, ReasonCode, Seen
from gpuvirt.model.reasons.nodeproblems import config_invalid

COEXIST_OPTION = "--coexist"


class Decisions(msgspec.Struct, frozen=True):
    """The writes and events that follow from a picture, and the state for status, metrics and probes."""

    writes: tuple[Write, ...] = ()
    announcements: tuple[Announcement, ...] = ()
    nodes: tuple[NodeVerdict, ...] = ()
    progress: PolicyFacts = msgspec.field(default_factory=PolicyFacts)
    policy: str | None = None
    """The name of the active ClusterPolicy."""
    operands: tuple[OperandState, ...] = ()
    histories: Histories | None = None
    """The history of patches of KubeVirt; None if it has not changed."""


class Serving(msgspec.Struct, frozen=True):
    """A valid policy that the controller carries out, and the inputs that the decisions for all nodes share."""

    policy: ClusterPolicy
    kubevirt: KubeVirtDecisions
    cluster: ClusterInputs


class Basis(msgspec.Struct, frozen=True):
    """The active policy, and what is decided before nodes are."""

    choice: Choice
    problems: tuple[Reason, ...]
    """The problems for which the controller carries out nothing of the policy."""
    serving: Serving | None
    """None with problems."""


def decide(
    picture: Picture,
    settings: ControllerSettings,
    failures: Sequence[str],
    at: datetime,
    memory: DecidedNodes | None = None,
) -> Decisions:
    """Return the decisions; `failures` are the errors of writes that failed last.

    With a memory, only the nodes are decided whose part of the picture has changed since; the result is the same.
    """
    memory = memory if memory is not None else DecidedNodes()
    return decide_from(basis_of(picture, settings, at, memory), picture, settings, failures, at, memory)


def basis_of(picture: Picture, settings: ControllerSettings, at: datetime, memory: DecidedNodes) -> Basis | None:
    """Return what is decided before nodes are; None without a ClusterPolicy."""
    choice = choose(picture.policies.values())
    if choice is None:
        return None
    problems = tuple(_problems(choice, picture, settings))
    if problems or not isinstance(choice.policy, ClusterPolicy):
        return Basis(choice, problems, None)
    policy = policies.beside(choice.policy) if settings.coexists else choice.policy
    return Basis(choice, problems, _serving(policy, picture, settings, at, memory))


def slices(basis: Basis | None, picture: Picture, memory: DecidedNodes) -> Iterator[None]:
    """Decide the nodes into the memory; yield whenever some are decided, so that others have their turn."""
    if basis is not None and basis.serving is not None:
        yield from memory.slices(picture, basis.serving.cluster)


def decide_from(
    basis: Basis | None,
    picture: Picture,
    settings: ControllerSettings,
    failures: Sequence[str],
    at: datetime,
    memory: DecidedNodes,
) -> Decisions:
    """Return the same as `decide`, from the basis of the picture."""
    scheduling = scheduler.decide(settings.shared, picture.services, picture.existing, settings.namespace)
    if basis is None:
        # Without a ClusterPolicy the controller changes no node, and deployed operands stay.
        return Decisions(scheduling.writes)
    choice, problems, serving = basis.choice, basis.problems, basis.serving
    if serving is None:
        nodes, deployed = NodesSummary(), Deployment()
        kubevirt = KubeVirtDecisions(histories=picture.kubevirt.histories)
        reported = {key.name: gpu_node for key, gpu_node in picture.gpu_nodes.items()}
        of_nodes = tuple(policies.of_reports(reported))
    else:
        nodes, kubevirt = memory.decide(picture, serving.cluster), serving.kubevirt
        deployed = _deployment(picture, serving.policy, settings, nodes)
        of_nodes = (*policies.of_config_map(serving.policy, picture), *nodes.invalid)
    invalid = (*policies.of_policy(choice.stored.metadata.name, problems, deployed.faults), *of_nodes)
    progress = PolicyFacts(
        nodes=nodes.verdicts,
        switched_off=nodes.switched_off,
        operands=(
            *deployed.faults,
            *(f"DaemonSet {state.name}: {state.against}" for state in deployed.states if state.against),
            *scheduling.faults,
        ),
        problems=problems,
        failures=failures,
        unsupported=unsupported(plain_spec(choice.stored)),
        invalid=invalid,
        kubevirt=_kubevirt_verdict(picture, kubevirt),
    )
    statuses = _statuses(choice, progress, settings, at)
    return Decisions(
        (*nodes.writes, *deployed.writes, *kubevirt.writes, *scheduling.writes, *statuses),
        (
            *nodes.announcements,
            *invalid_announcements(choice, invalid),
            *policy_announcements(choice, status.verdict_of(progress)),
        ),
        nodes.verdicts,
        progress,
        choice.stored.metadata.name,
        deployed.states,
        kubevirt.histories,
    )


def _serving(
    policy: ClusterPolicy, picture: Picture, settings: ControllerSettings, at: datetime, memory: DecidedNodes
) -> Serving:
    serves = policy.spec.sandbox_workloads.mode is not SandboxMode.KATA
    manage = settings.manages_kubevirt and serves
    kubevirt = kubevirts.decide(picture.kubevirt, memory.observed(picture), settings.namespace, at, manage=manage)
    kubevirt = kubevirt if serves else kubevirts.beside_kata(kubevirt, picture.kubevirt)
    has_image = settings.image is not None
    desired = replace(policy, metadata=Metadata(name=policy.metadata.name), status=None)
    label_inputs = replace(policies.label_inputs_of(policy), labels_vgpu_types=settings.labels_vgpu_types)
    deployer = Deployer(desired, has_image, has_daemon_sets=has_image, beside=settings.coexists)
    vgpu_switch = policies.vgpu_switch_of(policy, kubevirt)
    defaults, scheduled = policies.defaults_of(policy), picture.scheduled.configs
    return Serving(policy, kubevirt, ClusterInputs(defaults, label_inputs, vgpu_switch, deployer, scheduled))


def _kubevirt_verdict(picture: Picture, kubevirt: KubeVirtDecisions) -> ReadyCondition | None:
    if not ((picture.kubevirt.kubevirts and kubevirt.serves) or kubevirt.reasons):
        return None
    return status.kubevirt_verdict(kubevirt.reasons, kubevirt.drafts)


def _deployment(
    picture: Picture, policy: ClusterPolicy, settings: ControllerSettings, nodes: NodesSummary
) -> Deployment:
    if settings.image is None:
        return Deployment()
    policy = policies.while_leaving(policy) if nodes.drains else policy
    named = {name: picture.entries_of(name) for name in config_maps_of(policy)}
    inputs = RenderInputs(
        settings,
        settings.image,
        vgpu_os=nodes.vgpu_systems,
        container_os=nodes.container_systems,
        has_container_nodes=nodes.has_container_nodes,
        selects_clients=not nodes.lacks_client_label,
        runtime=nodes.runtime,
        config_maps={name: keys for name, keys in named.items() if keys is not None},
    )
    rendered = render(policy, inputs)
    return deployment.decide(policy, rendered, picture.existing, nodes.workloads, nodes.with_used_vgpus)


def _problems(choice: Choice, picture: Picture, settings: ControllerSettings) -> Iterator[Reason]:
    """Yield the problems for which the controller carries out nothing of the policy and changes no node."""
    name = policies.display_name(choice.stored.metadata.name)
    if picture.other_operator is not None and not settings.coexists:
        yield Reason(
            ReasonCode.OTHER_OPERATOR,
            "NVIDIA's GPU operator",
            "runs in this cluster, and both would deploy to the same nodes; the controller changes nothing",
            (Seen("", picture.other_operator),),
            f"remove the other operator, or run the controller with {COEXIST_OPTION} to give it the nodes for VMs",
        )
    faults = (choice.policy,) if isinstance(choice.policy, SpecFault) else tuple(spec_faults(choice.policy.spec))
    for fault in faults:
        yield config_invalid(
            f"{name} {fault.path}", fault.message, "correct the field; the controller changes nothing until then"
        )


def _statuses(
    choice: Choice, progress: PolicyFacts, settings: ControllerSettings, at: datetime
) -> Iterator[PatchPolicyStatus]:
    """Yield the policy statuses that have to change; beside NVIDIA's operator these belong to that operator."""
    if settings.coexists:
        return
    stored = choice.stored
    yield from _status(stored, status.status_of(progress, stored.metadata, stored.status, settings.namespace, at))
    for other in choice.ignored:
        desired = status.ignored(stored.metadata.name, other.metadata, other.status, settings.namespace, at)
        yield from _status(other, desired)


def _status(stored: StoredPolicy, desired: Status) -> Iterator[PatchPolicyStatus]:
    if stored.status != desired:
        yield PatchPolicyStatus(WriteTarget(CLUSTER_POLICIES, stored.metadata.name, "status"), desired)
