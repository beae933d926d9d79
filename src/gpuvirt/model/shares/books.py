"""What GPUs of each node have left: kept by events, so that a question costs what its own nodes cost.

A pod whose GPUs are not known, since no extender has placed it and the agent has not chosen yet, may be on any GPU of
its node: its units count on each of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.shares.demand import WHOLE, Demand, Units
from gpuvirt.model.shares.placement import GpuId, Pieces, Placement, Policy, Shares, place

_NONE = Units(0)


@dataclass(slots=True)
class NodeBooks:
    """The shares of one node's GPUs; of the pods there, those that take units."""

    capacity: Shares = field(default_factory=dict)
    """The units of each GPU; a vGPU of a worker VM has as many as it is of its card."""
    _pods: dict[PodUid, Shares] = field(default_factory=dict)
    _floating: dict[PodUid, Units] = field(default_factory=dict)
    """Pods whose GPUs are not known, with the units that they take."""
    _priorities: dict[PodUid, int] = field(default_factory=dict)
    """Priorities other than 0."""
    _free: dict[GpuId, Units] = field(default_factory=dict)
    _pieces: Pieces = ()
    _capacity_pieces: Pieces = ()
    _lowest: int | None = None
    _evicted: dict[int, Pieces] = field(default_factory=dict)
    """The answers of `pieces_without` since the last event."""

    @property
    def free(self) -> Shares:
        """The units that each GPU has left; none of one whose pods take more than it has."""
        return self._free

    @property
    def largest(self) -> Units:
        """The largest piece that is free."""
        return self._pieces[-1] if self._pieces else _NONE

    @property
    def pieces(self) -> Pieces:
        """The units that each GPU has left, the least first."""
        return self._pieces

    @property
    def all_pods(self) -> Sequence[PodUid]:
        """The pods that take units here, of known and of unknown GPUs."""
        return (*self._pods, *self._floating)

    @property
    def lowest_priority(self) -> int | None:
        """The lowest priority of the pods here, None without pods."""
        if self._lowest is None and (self._pods or self._floating):
            self._lowest = min(self.priority(pod) for pod in self.all_pods)
        return self._lowest

    @property
    def capacity_pieces(self) -> Pieces:
        """The units that each GPU has on an empty node, the least first."""
        return self._capacity_pieces

    @property
    def pods(self) -> Mapping[PodUid, Shares]:
        """The pods whose GPUs are known, with the units that each takes of them."""
        return self._pods

    def set_capacity(self, capacity: Shares) -> None:
        """Take the GPUs that a node has now."""
        self.capacity = dict(capacity)
        self._settle()

    def put(self, pod: PodUid, used: Shares | None, total: Units, priority: int = 0) -> None:
        """Record a pod's units per GPU. `used` is None if its GPUs are unknown: `total` then counts on every GPU."""
        self._forget(pod)
        if priority:
            self._priorities[pod] = priority
        if used is None:
            self._floating[pod] = total
        else:
            self._pods[pod] = used
        self._settle()

    def drop(self, pod: PodUid) -> None:
        """Remove an ended pod, if it is recorded."""
        if self._forget(pod):
            self._settle()

    def without(self, pods: Iterable[PodUid]) -> "NodeBooks":
        """Return the books as they would be if pods were evicted."""
        gone = set(pods)
        books = NodeBooks(
            self.capacity,
            {pod: used for pod, used in self._pods.items() if pod not in gone},
            {pod: units for pod, units in self._floating.items() if pod not in gone},
            {pod: priority for pod, priority in self._priorities.items() if pod not in gone},
        )
        books._settle()
        return books

    def pieces_without(self, priority: int) -> Pieces:
        """Return the pieces that would be free if all pods of a lower priority were evicted."""
        if (pieces := self._evicted.get(priority)) is None:
            lower = [pod for pod in self.all_pods if self.priority(pod) < priority]
            pieces = self._evicted[priority] = self.without(lower).pieces if lower else self._pieces
        return pieces

    def priority(self, pod: PodUid) -> int:
        """Return the priority of a pod that takes units here."""
        return self._priorities.get(pod, 0)

    def used(self, pod: PodUid) -> Shares:
        """Return the units that a pod takes of each GPU; of all GPUs if its own are not known."""
        if (used := self._pods.get(pod)) is not None:
            return used
        units = self._floating.get(pod)
        return {} if units is None else dict.fromkeys(self.capacity, units)

    def place(self, demand: Demand, policy: Policy = Policy.BINPACK, whole: Units = WHOLE) -> Placement | None:
        """Return where a pod's containers go, None where they do not fit."""
        return place(demand, self._free, policy, whole)

    def has(self, pod: PodUid) -> bool:
        """Return whether a pod takes units here."""
        return pod in self._pods or pod in self._floating

    def _forget(self, pod: PodUid) -> bool:
        self._priorities.pop(pod, None)
        return self._pods.pop(pod, None) is not None or self._floating.pop(pod, None) is not None

    def _settle(self) -> None:
        floating = sum(self._floating.values())
        taken: dict[GpuId, int] = dict.fromkeys(self.capacity, floating)
        for used in self._pods.values():
            for gpu, units in used.items():
                if gpu in taken:
                    taken[gpu] += units
        self._free = {gpu: Units(max(units - taken[gpu], 0)) for gpu, units in self.capacity.items()}
        self._pieces = tuple(sorted(self._free.values()))
        self._capacity_pieces = tuple(sorted(self.capacity.values()))
        self._lowest = None
        self._evicted.clear()


class NodeRow(NamedTuple):
    """What decides in most cases whether a pod fits on a node: numbers that are at hand for thousands of nodes."""

    largest: Units
    """The largest piece that is free."""
    capacity: Units
    """The units of the largest GPU."""
    lowest_priority: int
    """The lowest priority of the pods there; `NO_PODS` without pods."""
    books: NodeBooks


NO_PODS = 1 << 31
"""More than the highest priority of a pod."""


class Books:
    """The shares of a cluster's nodes."""

    def __init__(self) -> None:
        self._nodes: dict[NodeName, NodeBooks] = {}
        self._rows: dict[NodeName, NodeRow] = {}

    @property
    def nodes(self) -> Mapping[NodeName, NodeBooks]:
        """The books of all nodes with units."""
        return self._nodes

    @property
    def rows(self) -> Mapping[NodeName, NodeRow]:
        """The rows of all nodes with units."""
        return self._rows

    def node(self, name: NodeName) -> NodeBooks | None:
        """Return a node's books, None for a node without units."""
        return self._nodes.get(name)

    def set_node(self, name: NodeName, capacity: Shares) -> None:
        """Take a node's GPUs; its pods stay in the books, whatever its GPUs are."""
        books = self._nodes.setdefault(name, NodeBooks())
        books.set_capacity(capacity)
        self._rows[name] = row_of(books)

    def drop_node(self, name: NodeName) -> None:
        """Remove a node and its pods, if it is recorded."""
        self._nodes.pop(name, None)
        self._rows.pop(name, None)

    def put(self, name: NodeName, pod: PodUid, used: Shares | None, total: Units, priority: int = 0) -> None:
        """Record a pod's units on a node, as `NodeBooks.put` does; a node that is not known yet is added."""
        books = self._nodes.setdefault(name, NodeBooks())
        books.put(pod, used, total, priority)
        self._rows[name] = row_of(books)

    def drop(self, name: NodeName, pod: PodUid) -> None:
        """Remove an ended pod of a node, if it is recorded."""
        if (books := self._nodes.get(name)) is not None:
            books.drop(pod)
            self._rows[name] = row_of(books)


def row_of(books: NodeBooks) -> NodeRow:
    """Return the row of a node's books."""
    capacity = books.capacity_pieces[-1] if books.capacity_pieces else _NONE
    lowest = books.lowest_priority
    return NodeRow(books.largest, capacity, NO_PODS if lowest is None else lowest, books)
