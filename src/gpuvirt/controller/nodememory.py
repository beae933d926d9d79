"""The last decisions for nodes, by the parts of the picture from which they follow.

Nodes and GpuNodes come in parts that two pictures share where nothing has changed, so a part is looked at only if it
has. Within such a part, only the nodes whose own inputs have changed are decided.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import msgspec
from msgspec.structs import replace

from gpuvirt.controller.kubevirt.decisions import NodesObserved, observed_of, observed_together
from gpuvirt.controller.nodedecisions import ClusterInputs, NodeInputs, NodesSummary, decide_node, orphans, together
from gpuvirt.controller.nodes.resolve import OwnedGpuNode
from gpuvirt.controller.picture import NO_PODS, OperandPods, Picture, pods_by_node
from gpuvirt.kube.kinds.core import ReadNode
from gpuvirt.kube.objects import PARTS, ObjectKey, ObjectMap
from gpuvirt.model.node.memo import CacheKey, Memoized, memoized

SLICE_NODES = 500
"""How many nodes are decided before others have their turn: some 30 ms of decisions."""


class NodePart(msgspec.Struct, frozen=True):
    """A part of the nodes, with the GpuNodes of the same names."""

    nodes: Mapping[ObjectKey, ReadNode]
    gpu_nodes: Mapping[ObjectKey, OwnedGpuNode]

    @property
    def key(self) -> CacheKey:
        """The same objects; equal objects would take longer to compare than to decide."""
        return CacheKey((self.nodes, self.gpu_nodes))


def parts_of(picture: Picture) -> Iterator[NodePart]:
    """Yield all parts of a picture; a node is always in the part of the same number."""
    nodes, gpu_nodes = ObjectMap.of(picture.nodes).parts, ObjectMap.of(picture.gpu_nodes).parts
    yield from (NodePart(*both) for both in zip(nodes, gpu_nodes, strict=True))


class _Decided(msgspec.Struct, frozen=True):
    """The decisions for one part, with all inputs."""

    part: NodePart
    pods: Mapping[str, OperandPods]
    """All pods of the cluster, by node."""
    of_node: Mapping[str, tuple[NodeInputs, NodesSummary]]
    orphaned: NodesSummary
    summary: NodesSummary

    def follows_from(self, part: NodePart, pods: Mapping[str, OperandPods]) -> bool:
        """Return whether the same decisions follow from another picture."""
        return self.part.key.same_as(part.key) and (
            self.pods is pods or all(node.pods == pods.get(name, NO_PODS) for name, (node, _) in self.of_node.items())
        )


NOTHING = _Decided(NodePart({}, {}), {}, {}, NodesSummary(), NodesSummary())


class DecidedNodes:
    """The last decisions for nodes. Empty, all nodes are decided."""

    def __init__(self, slice_nodes: int = SLICE_NODES) -> None:
        """`slice_nodes`: after so many decided nodes others have their turn."""
        self.decided = 0
        """How many nodes have been decided."""
        self._slice_nodes = slice_nodes
        self._cluster: ClusterInputs | None = None
        self._parts: dict[int, _Decided] = {}
        self._observed: dict[int, Memoized[NodesObserved]] = {}
        self._pods: Memoized[Mapping[str, OperandPods]] | None = None

    def observed(self, picture: Picture) -> NodesObserved:
        """Return what all nodes have."""
        for number, part in enumerate(parts_of(picture)):
            observed = partial(observed_of, part.nodes, part.gpu_nodes)
            self._observed[number] = memoized(self._observed.get(number), part.key, observed)
        return observed_together([self._observed[number].value for number in sorted(self._observed)])

    def decide(self, picture: Picture, cluster: ClusterInputs) -> NodesSummary:
        """Return the decisions for all nodes."""
        for _ in self.slices(picture, cluster):
            pass
        decided = [self._parts[number] for number in sorted(self._parts)]
        orphaned = together([part.orphaned for part in decided])
        summary = together([part.summary for part in decided])
        return replace(summary, writes=(*summary.writes, *orphaned.writes))

    def slices(self, picture: Picture, cluster: ClusterInputs) -> Iterator[None]:
        """Decide the nodes that have changed; yield whenever some are decided, so that others have their turn."""
        if cluster != self._cluster:
            self._cluster, self._parts = cluster, {}
        existing, due = picture.existing.pods, self.decided + self._slice_nodes
        self._pods = memoized(self._pods, CacheKey((existing,)), lambda: pods_by_node(existing.values()))
        pods = self._pods.value
        for number, part in enumerate(parts_of(picture)):
            before = self._parts.get(number, NOTHING)
            if before is NOTHING or not before.follows_from(part, pods):
                self._parts[number] = self._decide_part(part, pods, before.of_node, cluster)
            elif before.pods is not pods:
                self._parts[number] = replace(before, pods=pods)
            if self.decided >= due:
                due = self.decided + self._slice_nodes
                yield

    def forget(self, number: int) -> None:
        """Forget one part of the nodes, so that it is decided again. All numbers up to `PARTS` are a whole round."""
        self._parts.pop(number % PARTS, None)
        self._observed.pop(number % PARTS, None)

    def _decide_part(
        self,
        part: NodePart,
        pods: Mapping[str, OperandPods],
        before: Mapping[str, tuple[NodeInputs, NodesSummary]],
        cluster: ClusterInputs,
    ) -> _Decided:
        of_node: dict[str, tuple[NodeInputs, NodesSummary]] = {}
        for key, node in part.nodes.items():
            name = node.metadata.name
            inputs = NodeInputs(node, part.gpu_nodes.get(key), pods.get(name, NO_PODS))
            known = before.get(name)
            if known is not None and known[0].same_as(inputs):
                of_node[name] = known
            else:
                self.decided += 1
                of_node[name] = inputs, decide_node(inputs, cluster)
        orphaned = NodesSummary(writes=tuple(orphans(part.nodes, part.gpu_nodes)))
        return _Decided(part, pods, of_node, orphaned, together([summary for _, summary in of_node.values()]))
