"""The controller's decisions from one picture of the cluster: the writes, the events and the policy's status."""

from collections.abc import Generator, Iterator, Sequence
from datetime import datetime

import msgspec
from msgspec.structs import replace

from gpuvirt.controller.announcer import Announcement, invalid_announcements, policy_announcements
from gpuvirt.controller.deployment import decisions as deployment
from gpuvirt.controller.deployment.decisions import Deployment, OperandState
from gpuvirt.controller.kubevirt import decisions as kubevirts
from gpuvirt.controller.kubevirt.decisions import Histories, KubeVirtDecisions
from gpuvirt.controller.nodedecisions import ClusterInputs
from gpuvirt.controller.nodememory import DecidedNodes
from gpuvirt.controller.nodes.problems import Deployer, NodeVerdict
from gpuvirt.controller.nodesummary import NodesSummary
from gpuvirt.controller.operands.inputs import RenderInputs
from gpuvirt.controller.operands.rendering import config_maps_of, render
from gpuvirt.controller.operands.specchecks import spec_faults
from gpuvirt.controller.picture import Picture
from gpuvirt.controller.policy import invalidstates, policies, status
from gpuvirt.controller.policy.status import PolicyFacts, ReadyCondition
from gpuvirt.controller.policy.unsupported import unsupported
from gpuvirt.controller.scheduler import decisions as scheduler
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


class PolicyBasis(msgspec.Struct, frozen=True):
    """A valid policy, the decisions for KubeVirt, and the inputs that the decisions for all nodes share."""

    policy: ClusterPolicy
    kubevirt: KubeVirtDecisions
    cluster: ClusterInputs


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
    running = deciding(picture, settings, failures, at, memory if memory is not None else DecidedNodes())
    while True:
        try:
            next(running)
        except StopIteration as ended:
            found: Decisions = ended.value
            return found


def deciding(
    picture: Picture, settings: ControllerSettings, failures: Sequence[str], at: datetime, memory: DecidedNodes
) -> Generator[None, None, Decisions]:
    """Return the same as `decide`; yield after each slice of the nodes, so that others have their turn."""
    choice = choose(picture.policies.values())
    scheduling = scheduler.decide(settings.shared, picture.services, picture.existing, settings.namespace)
    if choice is None:
        # Without a ClusterPolicy the controller changes no node, and deployed operands stay.
        return Decisions(scheduling.writes)
    problems = tuple(_problems(choice, picture, settings))
    basis = _basis(choice, picture, settings, at, memory) if not problems else None
    if basis is None:
        found, deployed, kubevirt = (
            NodesSummary(),
            Deployment(),
            KubeVirtDecisions(histories=picture.kubevirt.histories),
        )
        reported = {key.name: gpu_node for key, gpu_node in picture.gpu_nodes.items()}
        of_nodes = tuple(invalidstates.of_reports(reported))
    else:
        found, kubevirt = (yield from memory.deciding(picture, basis.cluster)), basis.kubevirt
        deployed = _deployment(picture, basis.policy, settings, found)
        of_nodes = (*invalidstates.of_config_map(basis.policy, picture), *found.invalid)
    invalid = (*invalidstates.of_policy(choice.stored.metadata.name, problems, deployed.faults), *of_nodes)
    progress = PolicyFacts(
        nodes=found.verdicts,
        switched_off=found.switched_off,
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
        (*found.writes, *deployed.writes, *kubevirt.writes, *scheduling.writes, *statuses),
        (
            *found.announcements,
            *invalid_announcements(choice, invalid),
            *policy_announcements(choice, status.verdict_of(progress)),
        ),
        found.verdicts,
        progress,
        choice.stored.metadata.name,
        deployed.states,
        kubevirt.histories,
    )


def _basis(
    choice: Choice, picture: Picture, settings: ControllerSettings, at: datetime, memory: DecidedNodes
) -> PolicyBasis | None:
    """Return what all nodes depend on; None for a policy that is not valid."""
    if not isinstance(choice.policy, ClusterPolicy):
        return None
    policy = policies.beside(choice.policy) if settings.coexists else choice.policy
    serves = policy.spec.sandbox_workloads.mode is not SandboxMode.KATA
    manage = settings.manages_kubevirt and serves
    kubevirt = kubevirts.decide(picture.kubevirt, memory.observed(picture), settings.namespace, at, manage=manage)
    kubevirt = kubevirt if serves else kubevirts.beside_kata(kubevirt, picture.kubevirt)
    has_image = settings.image is not None
    desired = msgspec.structs.replace(policy, metadata=Metadata(name=policy.metadata.name), status=None)
    around = replace(policies.around_of(policy), labels_vgpu_types=settings.labels_vgpu_types)
    deployer = Deployer(desired, has_image, has_daemon_sets=has_image, beside=settings.coexists)
    vgpu_switch = policies.vgpu_switch_of(policy, kubevirt)
    defaults, scheduled = policies.defaults_of(policy), picture.scheduled.configs
    return PolicyBasis(policy, kubevirt, ClusterInputs(defaults, around, vgpu_switch, deployer, scheduled))


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
    rendered = render(policy, site_of(picture, policy, settings, settings.image, nodes))
    return deployment.decide(policy, rendered, picture.existing, nodes.workloads, nodes.with_used_vgpus)


def site_of(
    picture: Picture, policy: ClusterPolicy, settings: ControllerSettings, image: str, nodes: NodesSummary
) -> RenderInputs:
    """Return the facts of the cluster and the controller that operands depend on."""
    existing = {name: tuple(keys) for name in config_maps_of(policy) if (keys := picture.entries_of(name)) is not None}
    return RenderInputs(
        settings,
        image,
        vgpu_os=nodes.vgpu_systems,
        container_os=nodes.container_systems,
        has_container_nodes=nodes.has_container_nodes,
        runtime=nodes.runtime,
        config_maps=existing,
    )


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
