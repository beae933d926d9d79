"""Decisions for each node: its placement, the writes to its labels and its GpuNode, and whether it is ready."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gpuvirt.cluster.kinds.clusterpolicy import ClusterPolicy
from gpuvirt.cluster.kinds.core import Node
from gpuvirt.cluster.kinds.gpunode import GPU_NODES, READY
from gpuvirt.cluster.labelpatch import patch_of
from gpuvirt.cluster.labels import PAUSED_FOR_DRIVER, PAUSED_FOR_VGPUS
from gpuvirt.cluster.operator.kubevirt.decisions import KubeVirtDecisions
from gpuvirt.cluster.operator.nodes import resolve
from gpuvirt.cluster.operator.nodes.labels import desired_labels, desired_labels_beside, without_left_keys
from gpuvirt.cluster.operator.nodes.placement import Placement, leaving, placement_of
from gpuvirt.cluster.operator.nodes.problems import Deployer, NodeVerdict, ObservedNode, Problem, problems_of
from gpuvirt.cluster.operator.nodes.resolve import OwnedGpuNode, VgpuSwitch
from gpuvirt.cluster.operator.operands.site import OperandName
from gpuvirt.cluster.operator.picture import Picture, apps_by_node, pausers_by_node
from gpuvirt.cluster.operator.policy import policies
from gpuvirt.cluster.operator.writes import ApplyGpuNode, DeleteObject, PatchNode, Target
from gpuvirt.cluster.resources import NODES
from gpuvirt.model.desired.workload import Workload

NodeWrite = PatchNode | ApplyGpuNode | DeleteObject
AGENTS = frozenset[str]({OperandName.AGENT, OperandName.LABELLER})


@dataclass(frozen=True, slots=True)
class NodeDecisions:
    """The writes to nodes and GpuNodes, and the verdict and placement of each node."""

    writes: tuple[NodeWrite, ...]
    verdicts: tuple[NodeVerdict, ...]
    placements: dict[str, Placement]


def decide(
    picture: Picture,
    policy: ClusterPolicy,
    kubevirt: KubeVirtDecisions,
    *,
    beside: bool,
    has_image: bool,
    labels_vgpu_types: bool,
) -> NodeDecisions:
    """Return the decisions for all nodes.

    `beside`: NVIDIA's operator manages the nodes that are not for VMs. `labels_vgpu_types`: agents run on the nodes for
    containers, too.
    """
    writes, verdicts, placements = list[NodeWrite](), list[NodeVerdict](), dict[str, Placement]()
    defaults = policies.defaults_of(policy)
    around = replace(policies.around_of(policy), labels_vgpu_types=labels_vgpu_types)
    vgpu_switch = policies.vgpu_switch_of(policy, kubevirt)
    pausers = pausers_by_node(picture.existing.pods.values())
    apps = apps_by_node(picture.existing.pods.values())
    deployer = Deployer(policy, has_image, has_daemon_sets=has_image, beside=beside)
    for key, node in sorted(picture.nodes.items()):
        gpu_node = picture.gpu_nodes.get(key)
        placement = placement_of(node.metadata.labels, gpu_node, defaults)
        desired = _desired(node, placement, vgpu_switch, gpu_node)
        placement = leaving(placement, node.metadata.labels, gpu_node, spec_is_due=desired is not None)
        placements[key.name] = placement
        pausing = pausers.get(key.name, frozenset())
        here = replace(around, vgpus_change=PAUSED_FOR_VGPUS in pausing, driver_changes=PAUSED_FOR_DRIVER in pausing)
        pods = apps.get(key.name, frozenset())
        keys = (desired_labels_beside if beside else desired_labels)(node.metadata, placement, here)
        keys = without_left_keys(keys, node.metadata, agent_exists=not AGENTS.isdisjoint(pods))
        if (patch := patch_of([keys], node.metadata)) is not None:
            writes.append(PatchNode(Target(NODES, key.name), patch))
        if desired is not None and (not beside or gpu_node is not None or placement.workload is not Workload.CONTAINER):
            writes.append(desired)
        if placement.counts:
            observed = ObservedNode(node.metadata.labels, placement, gpu_node, pods, node.resources)
            problems = problems_of(observed, deployer)
            against = _against(placement, problems, gpu_node)
            codes = frozenset(problem.reason.code for problem in problems)
            verdicts.append(NodeVerdict(key.name, placement.workload, against, codes))
    writes += _orphans(picture)
    return NodeDecisions(tuple(writes), tuple(verdicts), placements)


def _orphans(picture: Picture) -> Iterator[DeleteObject]:
    """Yield deletions of GpuNodes without a node; one whose spec another writer has set stays."""
    for key, gpu_node in sorted(picture.gpu_nodes.items()):
        if key not in picture.nodes and gpu_node.is_ours_alone:
            yield DeleteObject(Target(GPU_NODES, key.name), gpu_node.metadata.uid, "its node no longer exists")


def _desired(
    node: Node, placement: Placement, vgpu_switch: VgpuSwitch, observed: OwnedGpuNode | None
) -> ApplyGpuNode | None:
    """Return the write of a node's GpuNode; None if it is up to date, or if a node without GPUs has none."""
    if placement.workload is None or (not placement.present and observed is None):
        return None
    spec = resolve.spec_of(node.metadata.labels, placement, vgpu_switch, observed)
    if not resolve.lacks(observed, spec):
        return None
    return ApplyGpuNode(Target(GPU_NODES, node.metadata.name), resolve.applied(node.metadata.name, spec))


def _against(placement: Placement, problems: Sequence[Problem], gpu_node: OwnedGpuNode | None) -> str | None:
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
