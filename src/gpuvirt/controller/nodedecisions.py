"""Decisions for each node: its placement, the writes to its labels and its GpuNode, and whether it is ready.

A summary has those of one node, of some, or of all.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from gpuvirt.controller.announcer import Announcement, node_announcements
from gpuvirt.controller.nodes import resolve
from gpuvirt.controller.nodes.labels import LabelInputs, desired_labels, desired_labels_beside, without_left_keys
from gpuvirt.controller.nodes.placement import Defaults, NodePlacement, leaving, placement_of
from gpuvirt.controller.nodes.problems import Deployer, NodeProblem, NodeVerdict, ObservedNode, problems_of
from gpuvirt.controller.nodes.resolve import OwnedGpuNode, ScheduledConfig, VgpuSwitch, config_of
from gpuvirt.controller.operands.inputs import OperandName
from gpuvirt.controller.picture import NO_PODS, OperandPods, read_of, read_of_gpu_node
from gpuvirt.controller.policy.policies import InvalidValue, of_node
from gpuvirt.controller.writes import ApplyGpuNode, DeleteObject, PatchNode, WriteTarget
from gpuvirt.kube.kinds.core import ReadNode
from gpuvirt.kube.kinds.gpunode import GPU_NODES, READY
from gpuvirt.kube.labels import (
    CLIENT,
    DRIVER,
    ENFORCEMENT_LABEL,
    OS_LABEL,
    PAUSED_FOR_DRIVER,
    PAUSED_FOR_VGPUS,
    TOOLKIT,
    VGPU_DRIVER,
    VGPU_DRIVER_LABEL,
    WITH_TOOLKIT,
    WITH_VGPU_DRIVER,
    deploy_label,
    patch_of,
)
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import NODES
from gpuvirt.model.desired.workload import Workload

CONTAINERD = "containerd"
NodeWrite = PatchNode | ApplyGpuNode | DeleteObject


class RuntimeCount(msgspec.Struct, frozen=True):
    """How many nodes for containers have one container runtime."""

    nodes: int
    first: str
    """The first of these nodes by name."""

    def __add__(self, other: "RuntimeCount") -> "RuntimeCount":
        """Return the count of both."""
        return RuntimeCount(self.nodes + other.nodes, min(self.first, other.first))


class NodesSummary(msgspec.Struct, frozen=True):
    """The decisions for some nodes, by name of the node, and what operands and the policy's status need of them."""

    writes: tuple[NodeWrite, ...] = ()
    verdicts: tuple[NodeVerdict, ...] = ()
    invalid: tuple[InvalidValue, ...] = ()
    announcements: tuple[Announcement, ...] = ()
    switched_off: tuple[str, ...] = ()
    """Nodes with GPUs whose operands an admin has switched off."""
    with_used_vgpus: tuple[str, ...] = ()
    drains: bool = False
    """Whether GPUs of a node still serve its previous workload."""
    workloads: frozenset[Workload | None] = frozenset()
    """The workloads of nodes with operands."""
    vgpu_systems: frozenset[str] = frozenset()
    """The operating systems of the nodes for vGPUs, and of those that still run their driver."""
    container_systems: frozenset[str] = frozenset()
    has_container_nodes: bool = False
    """Whether nodes have containers with GPUs, or still run the driver or toolkit for them."""
    lacks_client_label: bool = False
    """Whether a node that limits shares has no label of GPU clients: NVIDIA's operator before 26.7 sets none."""
    runtimes: Mapping[str, RuntimeCount] = msgspec.field(default_factory=dict)

    @property
    def runtime(self) -> str:
        """The container runtime of most nodes for containers; containerd if no node has reported its own."""
        found = sorted(self.runtimes.items(), key=lambda runtime: (-runtime[1].nodes, runtime[1].first))
        return found[0][0] if found else CONTAINERD


def running_on(node: ReadNode, placement: NodePlacement, *, beside: bool) -> NodesSummary:
    """Return what one node runs; `beside`: NVIDIA's operator labels the nodes for vGPUs."""
    name, labels = node.metadata.name, node.metadata.labels
    runtime = node.status.node_info.container_runtime_version.partition("://")[0]
    has_toolkit = placement.counts and placement.workload in WITH_TOOLKIT
    system = frozenset({labels[OS_LABEL]}) if OS_LABEL in labels else frozenset[str]()

    def runs(workloads: Collection[Workload], label: str) -> bool:
        return label in labels or (placement.counts and placement.workload in workloads)

    of_vgpus = runs(WITH_VGPU_DRIVER, VGPU_DRIVER_LABEL if beside else deploy_label(VGPU_DRIVER))
    of_containers = runs({Workload.CONTAINER}, deploy_label(DRIVER))
    return NodesSummary(
        switched_off=(name,) if placement.present and placement.operands_off else (),
        with_used_vgpus=(name,) if placement.vgpus_used else (),
        drains=bool(placement.leaving) and placement.counts,
        workloads=frozenset({placement.workload}) if placement.counts else frozenset(),
        vgpu_systems=system if of_vgpus else frozenset(),
        container_systems=system if of_containers else frozenset(),
        has_container_nodes=of_containers or runs({Workload.SHARED}, deploy_label(TOOLKIT)),
        lacks_client_label=ENFORCEMENT_LABEL in labels and not labels.get(deploy_label(CLIENT)),
        runtimes={runtime: RuntimeCount(1, name)} if has_toolkit and runtime else {},
    )


def together(parts: Sequence[NodesSummary]) -> NodesSummary:
    """Return the summary of the nodes of several parts, in the order of their names."""
    return NodesSummary(
        writes=tuple(sorted(chain.from_iterable(part.writes for part in parts), key=attrgetter("target.name"))),
        verdicts=tuple(sorted(chain.from_iterable(part.verdicts for part in parts), key=attrgetter("name"))),
        invalid=tuple(sorted(chain.from_iterable(part.invalid for part in parts), key=attrgetter("node"))),
        announcements=tuple(
            sorted(chain.from_iterable(part.announcements for part in parts), key=attrgetter("about.name"))
        ),
        switched_off=tuple(sorted(chain.from_iterable(part.switched_off for part in parts))),
        with_used_vgpus=tuple(sorted(chain.from_iterable(part.with_used_vgpus for part in parts))),
        drains=any(part.drains for part in parts),
        workloads=frozenset().union(*(part.workloads for part in parts)),
        vgpu_systems=frozenset().union(*(part.vgpu_systems for part in parts)),
        container_systems=frozenset().union(*(part.container_systems for part in parts)),
        has_container_nodes=any(part.has_container_nodes for part in parts),
        lacks_client_label=any(part.lacks_client_label for part in parts),
        runtimes=_counted(chain.from_iterable(part.runtimes.items() for part in parts)),
    )


def _counted(found: Iterable[tuple[str, RuntimeCount]]) -> Mapping[str, RuntimeCount]:
    counts: dict[str, RuntimeCount] = {}
    for runtime, count in found:
        counts[runtime] = counts[runtime] + count if runtime in counts else count
    return counts


AGENTS = frozenset[str]({OperandName.AGENT, OperandName.LABELLER})


class ClusterInputs(msgspec.Struct, frozen=True):
    """The inputs of the decisions for every node, besides the node itself."""

    defaults: Defaults
    label_inputs: LabelInputs
    vgpu_switch: VgpuSwitch
    deployer: Deployer
    scheduled: tuple[ScheduledConfig, ...] = ()
    """The vGPU configs that VgpuSchedules have for nodes."""


class NodeInputs(msgspec.Struct, frozen=True):
    """One node's part of the picture."""

    node: ReadNode
    gpu_node: OwnedGpuNode | None = None
    pods: OperandPods = NO_PODS

    def same_as(self, other: "NodeInputs") -> bool:
        """Return whether the same decisions follow from both."""
        return (
            (self.node is other.node or read_of(self.node) == read_of(other.node))
            and (self.gpu_node is other.gpu_node or _read(self.gpu_node) == _read(other.gpu_node))
            and self.pods == other.pods
        )


def decide_node(inputs: NodeInputs, cluster: ClusterInputs) -> NodesSummary:
    """Return the decisions for one node."""
    node, gpu_node, deployer = inputs.node, inputs.gpu_node, cluster.deployer
    name, writes = node.metadata.name, list[NodeWrite]()
    resources = frozenset[str]() if deployer.beside else node.resources
    placement = placement_of(node.metadata.labels, gpu_node, cluster.defaults, resources)
    desired = _desired(node, placement, cluster, gpu_node)
    placement = leaving(placement, node.metadata.labels, gpu_node, spec_is_due=desired is not None)
    label_inputs = replace(
        cluster.label_inputs,
        vgpus_change=PAUSED_FOR_VGPUS in inputs.pods.pauses,
        driver_changes=PAUSED_FOR_DRIVER in inputs.pods.pauses,
    )
    keys = (desired_labels_beside if deployer.beside else desired_labels)(node.metadata, placement, label_inputs)
    keys = without_left_keys(keys, node.metadata, agent_exists=not AGENTS.isdisjoint(inputs.pods.apps))
    if (patch := patch_of([keys], node.metadata)) is not None:
        writes.append(PatchNode(WriteTarget(NODES, name), patch))
    serves = not deployer.beside or gpu_node is not None or placement.workload is not Workload.CONTAINER
    if desired is not None and serves:
        writes.append(desired)
    verdicts = tuple[NodeVerdict, ...]()
    if placement.counts:
        observed = ObservedNode(node.metadata.labels, placement, gpu_node, inputs.pods.apps, node.resources)
        problems = problems_of(observed, deployer)
        codes = frozenset(problem.reason.code for problem in problems)
        verdicts = (NodeVerdict(name, placement.workload, _against(placement, problems, gpu_node), codes),)
    return replace(
        running_on(node, placement, beside=deployer.beside),
        writes=tuple(writes),
        verdicts=verdicts,
        invalid=tuple(of_node(name, placement, gpu_node)) if placement.counts else (),
        announcements=tuple(node_announcements(name, placement)),
    )


def _read(gpu_node: OwnedGpuNode | None) -> tuple[object, ...] | None:
    return read_of_gpu_node(gpu_node) if gpu_node is not None else None


def orphans(nodes: Container[ObjectKey], gpu_nodes: Mapping[ObjectKey, OwnedGpuNode]) -> Iterator[DeleteObject]:
    """Yield deletions of GpuNodes without a node; one whose spec another writer has set stays.

    An owner reference would have the garbage collector delete that one, too, and some clusters permit one only to those
    who may delete the node (OwnerReferencesPermissionEnforcement).
    """
    for key, gpu_node in gpu_nodes.items():
        if key not in nodes and gpu_node.is_ours_alone:
            yield DeleteObject(WriteTarget(GPU_NODES, key.name), gpu_node.metadata.uid, "its node no longer exists")


def _desired(
    node: ReadNode, placement: NodePlacement, cluster: ClusterInputs, observed: OwnedGpuNode | None
) -> ApplyGpuNode | None:
    """Return the write of a node's GpuNode; None if it is up to date, or if a node without GPUs has none."""
    if placement.workload is None or (not placement.present and observed is None):
        return None
    labels = node.metadata.labels
    spec = resolve.spec_of(labels, placement, cluster.vgpu_switch, observed, config_of(cluster.scheduled, labels))
    if not resolve.lacks(observed, spec):
        return None
    return ApplyGpuNode(WriteTarget(GPU_NODES, node.metadata.name), resolve.applied(node.metadata.name, spec))


def _against(placement: NodePlacement, problems: Sequence[NodeProblem], gpu_node: OwnedGpuNode | None) -> str | None:
    """Return why a node is not ready; a node for containers is ready as soon as its operands are."""
    if placement.problem is not None:
        return placement.problem.text
    found = [problem.reason.text for problem in problems]
    if (waits := placement.waits) is not None:
        reported = _agent_problem(gpu_node) if gpu_node is not None and gpu_node.status is not None else None
        found.insert(0, f"{waits}; {reported}" if reported is not None else waits)
    if found:
        return " | ".join(found)
    return _agent_problem(gpu_node) if placement.workload is not Workload.CONTAINER else None


def _agent_problem(gpu_node: OwnedGpuNode | None) -> str | None:
    """Return why a node is not ready by its agent's report, or by the lack of a report."""
    if gpu_node is None or gpu_node.status is None:
        return "the node agent has not reported yet; see the log of its pod if this lasts"
    if gpu_node.status.observed_generation < gpu_node.metadata.generation:
        return "the node agent has not read the newest spec of its GpuNode yet"
    ready = next((condition for condition in gpu_node.status.conditions if condition.type == READY), None)
    if ready is None:
        return "the node agent has not written the Ready condition of its GpuNode yet"
    return None if ready.status == "True" else ready.message or ready.reason
