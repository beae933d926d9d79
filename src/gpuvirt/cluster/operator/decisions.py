"""The controller's decisions from one picture of the cluster: the writes, the events and the policy's status."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter

import msgspec

from gpuvirt.cluster.kinds.clusterpolicy import (
    CLUSTER_POLICIES,
    ClusterPolicy,
    SpecFault,
    Status,
    StoredPolicy,
    plain_spec,
)
from gpuvirt.cluster.kinds.core import ReadNode
from gpuvirt.cluster.labels import DRIVER, OS_LABEL, TOOLKIT, VGPU_DRIVER, VGPU_DRIVER_LABEL, WITH_TOOLKIT, deploy_label
from gpuvirt.cluster.operator import nodedecisions as nodes
from gpuvirt.cluster.operator.announcer import (
    Announcement,
    invalid_announcements,
    node_announcements,
    policy_announcements,
)
from gpuvirt.cluster.operator.deployment import decisions as deployment
from gpuvirt.cluster.operator.deployment.decisions import Deployment, OperandState
from gpuvirt.cluster.operator.kubevirt import decisions as kubevirts
from gpuvirt.cluster.operator.kubevirt.decisions import Histories, KubeVirtDecisions, NodesObserved
from gpuvirt.cluster.operator.kubevirt.names import on_nodes
from gpuvirt.cluster.operator.nodedecisions import NodeDecisions, NodeMemory
from gpuvirt.cluster.operator.nodes.placement import Placement
from gpuvirt.cluster.operator.nodes.problems import Deployer, NodeVerdict
from gpuvirt.cluster.operator.operands.rendering import config_maps_of, render
from gpuvirt.cluster.operator.operands.site import SharedResource, Site
from gpuvirt.cluster.operator.operands.specchecks import spec_faults
from gpuvirt.cluster.operator.picture import Picture
from gpuvirt.cluster.operator.policy import invalidstates, policies, status
from gpuvirt.cluster.operator.policy.invalidstates import InvalidValue
from gpuvirt.cluster.operator.policy.policies import Choice
from gpuvirt.cluster.operator.policy.status import Progress
from gpuvirt.cluster.operator.policy.unsupported import unsupported
from gpuvirt.cluster.operator.scheduler import decisions as scheduler
from gpuvirt.cluster.operator.writer import Write
from gpuvirt.cluster.operator.writes import PatchPolicyStatus, Target
from gpuvirt.cluster.resources import Metadata
from gpuvirt.model.desired.workload import Workload
from gpuvirt.model.reasons import Reason, clusterproblems

COEXIST_OPTION = "--coexist"
KATA_AT = "$.spec.sandboxWorkloads.mode"


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """The controller's settings: its command line and environment."""

    namespace: str
    """The namespace of the controller and of all operands."""
    coexists: bool = False
    """Whether NVIDIA's operator manages the ClusterPolicy's status and all nodes that are not for VMs."""
    image: str | None = None
    """gpuvirt's image, which agents run. Without it the controller deploys nothing and changes no operand."""
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    images: Mapping[str, str] = field(default_factory=dict)
    """Images of operands whose image the policy does not name, by environment variable: `VGPU_MANAGER_IMAGE`."""
    manages_kubevirt: bool = True
    """Whether the controller patches KubeVirt; otherwise it only reports what KubeVirt's configuration lacks."""
    shared: SharedResource | None = None
    """The resource whose pods gpuvirt's extender places. None: no extender runs."""
    labels_vgpu_types: bool = False
    """Whether agents run on nodes for containers, to label them with the types of their vGPUs."""
    namespace_sets_uid: bool = False
    """Whether the namespace sets the UID of unprivileged pods, as on OpenShift."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """The writes and events that follow from a picture, and the state for status, metrics and probes."""

    writes: tuple[Write, ...] = ()
    announcements: tuple[Announcement, ...] = ()
    nodes: tuple[NodeVerdict, ...] = ()
    progress: Progress = field(default_factory=Progress)
    policy: str | None = None
    """The name of the active ClusterPolicy."""
    operands: tuple[OperandState, ...] = ()
    histories: Histories | None = None
    """The history of patches of KubeVirt; None if it has not changed."""


def decide(
    picture: Picture,
    settings: ControllerSettings,
    failures: Sequence[str],
    at: datetime,
    memory: NodeMemory | None = None,
) -> Decisions:
    """Return the decisions; `failures` are the errors of writes that failed last.

    With a memory, only the nodes are decided whose part of the picture has changed since; the result is the same.
    """
    choice = policies.choose(picture.policies.values())
    scheduling = scheduler.decide(settings.shared, picture.services, picture.existing, settings.namespace)
    if choice is None:
        # Without a ClusterPolicy the controller changes no node, and deployed operands stay.
        return Decisions(scheduling.writes)
    problems, missing = tuple(_problems(choice, picture, settings)), tuple[InvalidValue, ...]()
    found, deployed, kubevirt = (
        NodeDecisions((), (), {}),
        Deployment(),
        KubeVirtDecisions(histories=picture.kubevirt.histories),
    )
    if not problems and isinstance(choice.policy, ClusterPolicy):
        policy = policies.beside(choice.policy) if settings.coexists else choice.policy
        gpu_nodes = tuple(gpu_node for _, gpu_node in sorted(picture.gpu_nodes.items(), key=itemgetter(0)))
        resources = on_nodes(node.status.capacity for node in picture.nodes.values())
        kubevirt = kubevirts.decide(
            picture.kubevirt,
            NodesObserved(
                gpu_nodes, resources, {key.name: node.metadata.labels for key, node in picture.nodes.items()}
            ),
            settings.namespace,
            at,
            manage=settings.manages_kubevirt,
        )
        has_image = settings.image is not None
        desired = msgspec.structs.replace(policy, metadata=Metadata(name=policy.metadata.name), status=None)
        deployer = Deployer(desired, has_image, has_daemon_sets=has_image, beside=settings.coexists)
        found = nodes.decide(
            picture,
            policy,
            kubevirt,
            deployer,
            labels_vgpu_types=settings.labels_vgpu_types,
            memory=memory if memory is not None else NodeMemory(),
        )
        drains = any(placement.leaving and placement.counts for placement in found.placements.values())
        missing = tuple(invalidstates.of_config_map(policy, picture))
        deployed = _deployment(
            picture, policies.while_leaving(policy) if drains else policy, settings, found.placements
        )
    reported = {key.name: gpu_node for key, gpu_node in picture.gpu_nodes.items()}
    invalid = (
        *invalidstates.of_policy(choice.stored.metadata.name, problems, deployed.faults),
        *missing,
        *invalidstates.of_nodes(found.placements, reported),
    )
    operands = (
        *deployed.faults,
        *(f"DaemonSet {state.name}: {state.against}" for state in deployed.states if state.against),
        *scheduling.faults,
    )
    progress = Progress(
        nodes=found.verdicts,
        switched_off=tuple(
            sorted(name for name, place in found.placements.items() if place.present and place.operands_off)
        ),
        operands=operands,
        problems=problems,
        failures=failures,
        unsupported=unsupported(plain_spec(choice.stored)),
        invalid=invalid,
        kubevirt=(
            status.kubevirt_verdict(kubevirt.reasons, kubevirt.drafts)
            if picture.kubevirt.kubevirts or kubevirt.reasons
            else None
        ),
    )
    writes = (
        *found.writes,
        *deployed.writes,
        *kubevirt.writes,
        *scheduling.writes,
        *_statuses(choice, progress, settings, at),
    )
    announcements = (
        *node_announcements(picture.nodes.values(), found.placements),
        *invalid_announcements(choice, invalid),
        *policy_announcements(choice, status.verdict_of(progress)),
    )
    return Decisions(
        writes,
        announcements,
        found.verdicts,
        progress,
        choice.stored.metadata.name,
        deployed.states,
        kubevirt.histories,
    )


def _deployment(
    picture: Picture, policy: ClusterPolicy, settings: ControllerSettings, placements: Mapping[str, Placement]
) -> Deployment:
    if settings.image is None:
        return Deployment()
    rendered = render(policy, site_of(picture, policy, settings, settings.image, placements))
    return deployment.decide(policy, rendered, picture.existing, placements)


def site_of(
    picture: Picture,
    policy: ClusterPolicy,
    settings: ControllerSettings,
    image: str,
    placements: Mapping[str, Placement],
) -> Site:
    """Return the facts of the cluster and the controller that operands depend on."""
    named = {key.name: node for key, node in picture.nodes.items()}
    return Site(
        namespace=settings.namespace,
        image=image,
        pull_policy=settings.pull_policy,
        pull_secrets=settings.pull_secrets,
        images=settings.images,
        vgpu_os=frozenset(
            _systems(
                named, placements, Workload.VGPU, VGPU_DRIVER_LABEL if settings.coexists else deploy_label(VGPU_DRIVER)
            )
        ),
        container_os=frozenset(_systems(named, placements, Workload.CONTAINER, deploy_label(DRIVER))),
        has_container_nodes=any(_nodes_of(named, placements, Workload.CONTAINER, deploy_label(DRIVER)))
        or any(_nodes_of(named, placements, Workload.SHARED, deploy_label(TOOLKIT))),
        runtime=_runtime(named, placements),
        config_maps={
            name: tuple(keys) for name in config_maps_of(policy) if (keys := picture.entries_of(name)) is not None
        },
        coexists=settings.coexists,
        shared=settings.shared,
        labels_vgpu_types=settings.labels_vgpu_types,
        namespace_sets_uid=settings.namespace_sets_uid,
    )


def _systems(
    named: Mapping[str, ReadNode], placements: Mapping[str, Placement], workload: Workload, label: str
) -> Iterator[str]:
    """Yield the known operating systems of the nodes for a workload."""
    for node in _nodes_of(named, placements, workload, label):
        if OS_LABEL in node.metadata.labels:
            yield node.metadata.labels[OS_LABEL]


def _nodes_of(
    named: Mapping[str, ReadNode], placements: Mapping[str, Placement], workload: Workload, label: str
) -> Iterator[ReadNode]:
    """Yield the nodes for a workload, and the nodes that still run its driver."""
    for name, placement in placements.items():
        if label in named[name].metadata.labels or (placement.counts and placement.workload is workload):
            yield named[name]


def _runtime(named: Mapping[str, ReadNode], placements: Mapping[str, Placement]) -> str:
    """Return the container runtime of most nodes for containers; containerd if no node has reported its own."""
    container_nodes = sorted(
        name for name, placement in placements.items() if placement.counts and placement.workload in WITH_TOOLKIT
    )
    versions = (named[name].status.node_info.container_runtime_version for name in container_nodes)
    found = Counter(version.partition("://")[0] for version in versions if version)
    return found.most_common(1)[0][0] if found else "containerd"


def _problems(choice: Choice, picture: Picture, settings: ControllerSettings) -> Iterator[Reason]:
    """Yield the problems for which the controller carries out nothing of the policy and changes no node."""
    name = policies.display_name(choice.stored.metadata.name)
    if picture.other_operator is not None and not settings.coexists:
        yield clusterproblems.other_operator(picture.other_operator, COEXIST_OPTION)
    faults = (choice.policy,) if isinstance(choice.policy, SpecFault) else tuple(spec_faults(choice.policy.spec))
    for fault in faults:
        yield clusterproblems.policy_invalid(f"{name} {fault.path}", fault.message, is_kata=fault.path == KATA_AT)


def _statuses(
    choice: Choice, progress: Progress, settings: ControllerSettings, at: datetime
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
        yield PatchPolicyStatus(Target(CLUSTER_POLICIES, stored.metadata.name, "status"), desired)
