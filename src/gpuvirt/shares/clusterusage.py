"""The free units of each node's GPUs. Watch events update them, so that a lookup costs as much as its own nodes."""

from collections.abc import Mapping

from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.nodeusage import FreeRow, NodeUsage, row_of
from gpuvirt.model.shares.placement import Shares

_EMPTY = NodeUsage()


class ClusterUsage:
    """The shares of a cluster's nodes."""

    def __init__(self) -> None:
        self._nodes: dict[NodeName, NodeUsage] = {}
        self._rows: dict[NodeName, FreeRow] = {}

    @property
    def nodes(self) -> Mapping[NodeName, NodeUsage]:
        """The usage of all nodes with units."""
        return self._nodes

    @property
    def rows(self) -> Mapping[NodeName, FreeRow]:
        """The rows of all nodes with units."""
        return self._rows

    def node(self, name: NodeName) -> NodeUsage | None:
        """Return a node's usage, None for a node without units."""
        return self._nodes.get(name)

    def set_node(self, name: NodeName, capacity: Shares) -> None:
        """Take a node's GPUs; its pods stay in the usage, whatever its GPUs are."""
        self._keep(name, self._nodes.get(name, _EMPTY).with_capacity(capacity))

    def drop_node(self, name: NodeName) -> None:
        """Remove a node and its pods, if it is recorded."""
        self._nodes.pop(name, None)
        self._rows.pop(name, None)

    def put(self, name: NodeName, pod: PodUid, used: Shares | None, total: Units, priority: int = 0) -> None:
        """Record a pod's units on a node, as `NodeUsage.with_pod` does; a node that is not known yet is added."""
        self._keep(name, self._nodes.get(name, _EMPTY).with_pod(pod, used, total, priority))

    def drop(self, name: NodeName, pod: PodUid) -> None:
        """Remove an ended pod of a node, if it is recorded."""
        if (usage := self._nodes.get(name)) is not None and usage.has(pod):
            self._keep(name, usage.without((pod,)))

    def _keep(self, name: NodeName, usage: NodeUsage) -> None:
        self._nodes[name] = usage
        self._rows[name] = row_of(usage)
