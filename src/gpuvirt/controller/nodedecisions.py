"""Decisions for each node: its placement, the writes to its labels and its GpuNode, and whether it is ready."""

from collections.abc import Container, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from gpuvirt.controller.announcer import node_announcements
from gpuvirt.controller.nodes import resolve
from gpuvirt.controller.nodes.labels import Around, desired_labels, desired_labels_beside, without_left_keys
from gpuvirt.controller.nodes.placement import Defaults, NodePlacement, leaving, placement_of
from gpuvirt.controller.nodes.problems import Deployer, NodeProblem, NodeVerdict, ObservedNode, problems_of
from gpuvirt.controller.nodes.resolve import OwnedGpuNode, VgpuSwitch
from gpuvirt.controller.nodes.scheduled import ScheduledConfig, config_of
from gpuvirt.controller.nodesummary import NodesSummary, NodeWrite, running_on
from gpuvirt.controller.operands.inputs import OperandName
from gpuvirt.controller.picture import NO_PODS, OperandPods, read_of, read_of_gpu_node
from gpuvirt.controller.policy.invalidstates import of_node
from gpuvirt.controller.writes import ApplyGpuNode, DeleteObject, PatchNode, WriteTarget
from gpuvirt.kube.kinds.core import ReadNode
from gpuvirt.kube.kinds.gpunode import GPU_NODES, READY
from gpuvirt.kube.labelpatch import patch_of
from gpuvirt.kube.labels import PAUSED_FOR_DRIVER, PAUSED_FOR_VGPUS
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import NODES
from gpuvirt.model.desired.workload import Workload

AGENTS = frozenset[str]({OperandName.AGENT, OperandName.LABELLER})


class ClusterInputs(msgspec.Struct, frozen=True):
    """The inputs of the decisions for every node, besides the node itself."""

    defaults: Defaults
    around: Around
    vgpu_switch: VgpuSwitch
    deployer: Deployer
    scheduled: tuple[ScheduledConfig, ...] = ()
    """The vGPU configs that VgpuSchedules have for nodes."""


class NodeInputs(msgspec.Struct, frozen=True):
    """One node's part of the picture."""

    node: ReadNode
    gpu_node: OwnedGpuNode | None = None
    pods: OperandPods = NO_PODS

    def decides_as(self, other: "NodeInputs") -> bool:
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
    placement = placement_of(node.metadata.labels, gpu_node, cluster.defaults)
    desired = _desired(node, placement, cluster, gpu_node)
    placement = leaving(placement, node.metadata.labels, gpu_node, spec_is_due=desired is not None)
    around = replace(
        cluster.around,
        vgpus_change=PAUSED_FOR_VGPUS in inputs.pods.pauses,
        driver_changes=PAUSED_FOR_DRIVER in inputs.pods.pauses,
    )
    keys = (desired_labels_beside if deployer.beside else desired_labels)(node.metadata, placement, around)
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
    if placement.leaving:
        waits = f"the node becomes {placement.workload} once these GPUs are free: {', '.join(placement.leaving)}"
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
