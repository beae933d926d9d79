"""Decisions for each node: its placement, the writes to its labels and its GpuNode, and whether it is ready."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from gpuvirt.cluster.kinds.clusterpolicy import ClusterPolicy
from gpuvirt.cluster.kinds.core import ReadNode
from gpuvirt.cluster.kinds.gpunode import GPU_NODES, READY
from gpuvirt.cluster.labelpatch import patch_of
from gpuvirt.cluster.labels import PAUSED_FOR_DRIVER, PAUSED_FOR_VGPUS
from gpuvirt.cluster.operator.kubevirt.decisions import KubeVirtDecisions
from gpuvirt.cluster.operator.nodes import resolve
from gpuvirt.cluster.operator.nodes.labels import Around, desired_labels, desired_labels_beside, without_left_keys
from gpuvirt.cluster.operator.nodes.placement import Defaults, Placement, leaving, placement_of
from gpuvirt.cluster.operator.nodes.problems import Deployer, NodeVerdict, ObservedNode, Problem, problems_of
from gpuvirt.cluster.operator.nodes.resolve import OwnedGpuNode, VgpuSwitch
from gpuvirt.cluster.operator.operands.site import OperandName
from gpuvirt.cluster.operator.picture import Picture, apps_by_node, pausers_by_node, read_of, read_of_gpu_node
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


@dataclass(frozen=True, slots=True)
class ClusterInputs:
    """What the decisions for every node depend on, beside the node itself."""

    defaults: Defaults
    around: Around
    vgpu_switch: VgpuSwitch
    deployer: Deployer


@dataclass(frozen=True, slots=True)
class NodeInputs:
    """One node's part of the picture."""

    node: ReadNode
    gpu_node: OwnedGpuNode | None = None
    pausing: frozenset[str] = frozenset()
    pods: frozenset[str] = frozenset()

    def decides_as(self, other: "NodeInputs") -> bool:
        """Return whether the same decisions follow from both."""
        return (
            (self.node is other.node or read_of(self.node) == read_of(other.node))
            and (self.gpu_node is other.gpu_node or _read(self.gpu_node) == _read(other.gpu_node))
            and self.pausing == other.pausing
            and self.pods == other.pods
        )


@dataclass(frozen=True, slots=True)
class OneNode:
    """The decisions for one node."""

    placement: Placement
    writes: tuple[NodeWrite, ...]
    verdict: NodeVerdict | None


class NodeMemory:
    """The last decisions for each node, with their inputs. Empty, all nodes are decided."""

    def __init__(self) -> None:
        self.decided = 0
        """How many nodes have been decided, for the tests."""
        self._cluster: ClusterInputs | None = None
        self._known: dict[str, tuple[NodeInputs, OneNode]] = {}

    def start(self, cluster: ClusterInputs, names: Container[str]) -> None:
        """Forget the nodes that are gone; all of them if what they all depend on has changed."""
        if cluster != self._cluster:
            self._cluster, self._known = cluster, {}
        for name in [name for name in self._known if name not in names]:
            del self._known[name]

    def decide(self, inputs: NodeInputs, cluster: ClusterInputs) -> OneNode:
        """Return the decisions for one node, made again only if its inputs have changed."""
        name = inputs.node.metadata.name
        before = self._known.get(name)
        if before is not None and before[0].decides_as(inputs):
            return before[1]
        self.decided += 1
        one = decide_node(inputs, cluster)
        self._known[name] = (inputs, one)
        return one


def decide(
    picture: Picture,
    policy: ClusterPolicy,
    kubevirt: KubeVirtDecisions,
    deployer: Deployer,
    *,
    labels_vgpu_types: bool,
    memory: NodeMemory,
) -> NodeDecisions:
    """Return the decisions for all nodes. `labels_vgpu_types`: agents run on the nodes for containers, too."""
    around = replace(policies.around_of(policy), labels_vgpu_types=labels_vgpu_types)
    vgpu_switch = policies.vgpu_switch_of(policy, kubevirt)
    cluster = ClusterInputs(policies.defaults_of(policy), around, vgpu_switch, deployer)
    pausers = pausers_by_node(picture.existing.pods.values())
    apps = apps_by_node(picture.existing.pods.values())
    names = {node.metadata.name: key for key, node in picture.nodes.items()}
    memory.start(cluster, names)
    nothing = frozenset[str]()
    decided = {
        name: memory.decide(
            NodeInputs(
                picture.nodes[key], picture.gpu_nodes.get(key), pausers.get(name, nothing), apps.get(name, nothing)
            ),
            cluster,
        )
        for name, key in sorted(names.items(), key=itemgetter(0))
    }
    return NodeDecisions(
        (*(write for one in decided.values() for write in one.writes), *_orphans(picture)),
        tuple(one.verdict for one in decided.values() if one.verdict is not None),
        {name: one.placement for name, one in decided.items()},
    )


def decide_node(inputs: NodeInputs, cluster: ClusterInputs) -> OneNode:
    """Return the decisions for one node."""
    node, gpu_node, deployer = inputs.node, inputs.gpu_node, cluster.deployer
    name, writes = node.metadata.name, list[NodeWrite]()
    placement = placement_of(node.metadata.labels, gpu_node, cluster.defaults)
    desired = _desired(node, placement, cluster.vgpu_switch, gpu_node)
    placement = leaving(placement, node.metadata.labels, gpu_node, spec_is_due=desired is not None)
    around = replace(
        cluster.around,
        vgpus_change=PAUSED_FOR_VGPUS in inputs.pausing,
        driver_changes=PAUSED_FOR_DRIVER in inputs.pausing,
    )
    keys = (desired_labels_beside if deployer.beside else desired_labels)(node.metadata, placement, around)
    keys = without_left_keys(keys, node.metadata, agent_exists=not AGENTS.isdisjoint(inputs.pods))
    if (patch := patch_of([keys], node.metadata)) is not None:
        writes.append(PatchNode(Target(NODES, name), patch))
    serves = not deployer.beside or gpu_node is not None or placement.workload is not Workload.CONTAINER
    if desired is not None and serves:
        writes.append(desired)
    verdict = None
    if placement.counts:
        observed = ObservedNode(node.metadata.labels, placement, gpu_node, inputs.pods, node.resources)
        problems = problems_of(observed, deployer)
        codes = frozenset(problem.reason.code for problem in problems)
        verdict = NodeVerdict(name, placement.workload, _against(placement, problems, gpu_node), codes)
    return OneNode(placement, tuple(writes), verdict)


def _read(gpu_node: OwnedGpuNode | None) -> tuple[object, ...] | None:
    return read_of_gpu_node(gpu_node) if gpu_node is not None else None


def _orphans(picture: Picture) -> Iterator[DeleteObject]:
    """Yield deletions of GpuNodes without a node; one whose spec another writer has set stays."""
    for key, gpu_node in sorted(picture.gpu_nodes.items()):
        if key not in picture.nodes and gpu_node.is_ours_alone:
            yield DeleteObject(Target(GPU_NODES, key.name), gpu_node.metadata.uid, "its node no longer exists")


def _desired(
    node: ReadNode, placement: Placement, vgpu_switch: VgpuSwitch, observed: OwnedGpuNode | None
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
