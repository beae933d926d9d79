"""The free units of a node's GPUs: a value, from which each event makes the next one.

A pod whose GPUs are not known, since no extender has placed it and the agent has not chosen yet, may be on any GPU of
its node: its units count on each of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from gpuvirt.facts.ids import PodUid
from gpuvirt.model.shares.demand import WHOLE, Demand, Units
from gpuvirt.model.shares.placement import MOST_STEPS, GpuId, Pieces, Placement, Policy, Shares, Steps, place

_NONE = Units(0)


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """The shares of one node's GPUs; of the pods there, those that take units."""

    capacity: Shares = field(default_factory=dict)
    """The units of each GPU; a vGPU of a worker VM has as many as it is of its card."""
    pods: Mapping[PodUid, Shares] = field(default_factory=dict)
    """The pods whose GPUs are known, with the units that each takes of them."""
    unassigned: Mapping[PodUid, Units] = field(default_factory=dict)
    """Pods whose GPUs are not known, with the units that they take."""
    priorities: Mapping[PodUid, int] = field(default_factory=dict)
    """Priorities other than 0."""
    free: Shares = field(default_factory=dict)
    """The units that each GPU has left; none of one whose pods take more than it has."""
    pieces: Pieces = ()
    """The units that each GPU has left, the least first."""
    capacity_pieces: Pieces = ()
    """The units that each GPU has on an empty node, the least first."""
    _evicted: dict[int, Pieces] = field(default_factory=dict, compare=False)
    """The answers of `pieces_without`."""

    @property
    def largest(self) -> Units:
        """The largest piece that is free."""
        return self.pieces[-1] if self.pieces else _NONE

    @property
    def all_pods(self) -> Sequence[PodUid]:
        """The pods that take units here, of known and of unknown GPUs."""
        return (*self.pods, *self.unassigned)

    @property
    def lowest_priority(self) -> int | None:
        """The lowest priority of the pods here, None without pods."""
        if not self.priorities:
            return 0 if self.pods or self.unassigned else None
        return min(self.priority(pod) for pod in self.all_pods)

    def with_capacity(self, capacity: Shares) -> "NodeUsage":
        """Return the usage with the GPUs that the node has now; its pods stay, whatever its GPUs are."""
        return _settled(dict(capacity), self.pods, self.unassigned, self.priorities)

    def with_pod(self, pod: PodUid, used: Shares | None, total: Units, priority: int = 0) -> "NodeUsage":
        """Return the usage with a pod's units per GPU. `used` is None if its GPUs are unknown: `total` then counts on
        every GPU."""
        pods, unassigned, priorities = dict(self.pods), dict(self.unassigned), dict(self.priorities)
        for former in (pods, unassigned, priorities):
            former.pop(pod, None)
        if priority:
            priorities[pod] = priority
        if used is None:
            unassigned[pod] = total
        else:
            pods[pod] = used
        return _settled(self.capacity, pods, unassigned, priorities)

    def without(self, pods: Iterable[PodUid]) -> "NodeUsage":
        """Return the usage without pods that have ended, or as it would be if pods were evicted."""
        gone = {pod for pod in pods if self.has(pod)}
        if not gone:
            return self
        return _settled(
            self.capacity,
            {pod: used for pod, used in self.pods.items() if pod not in gone},
            {pod: units for pod, units in self.unassigned.items() if pod not in gone},
            {pod: priority for pod, priority in self.priorities.items() if pod not in gone},
        )

    def pieces_without(self, priority: int) -> Pieces:
        """Return the pieces that would be free if all pods of a lower priority were evicted."""
        if (pieces := self._evicted.get(priority)) is None:
            lower = [pod for pod in self.all_pods if self.priority(pod) < priority]
            pieces = self._evicted[priority] = self.without(lower).pieces
        return pieces

    def priority(self, pod: PodUid) -> int:
        """Return the priority of a pod that takes units here."""
        return self.priorities.get(pod, 0)

    def used(self, pod: PodUid) -> Shares:
        """Return the units that a pod takes of each GPU; of all GPUs if its own are not known."""
        if (used := self.pods.get(pod)) is not None:
            return used
        units = self.unassigned.get(pod)
        return {} if units is None else dict.fromkeys(self.capacity, units)

    def place(
        self, demand: Demand, policy: Policy = Policy.BINPACK, whole: Units = WHOLE, steps: Steps | None = None
    ) -> Placement | None:
        """Return where a pod's containers go, None where they do not fit or that is undecided, as `placement.place`."""
        return place(demand, self.free, policy, whole, steps)

    def has(self, pod: PodUid) -> bool:
        """Return whether a pod takes units here."""
        return pod in self.pods or pod in self.unassigned


def _settled(
    capacity: Shares,
    pods: Mapping[PodUid, Shares],
    unassigned: Mapping[PodUid, Units],
    priorities: Mapping[PodUid, int],
) -> NodeUsage:
    """Return usage with the free units of the GPUs."""
    taken: dict[GpuId, int] = dict.fromkeys(capacity, sum(unassigned.values()))
    for used in pods.values():
        for gpu, units in used.items():
            if gpu in taken:
                taken[gpu] += units
    free = {gpu: Units(max(units - taken[gpu], 0)) for gpu, units in capacity.items()}
    pieces, capacity_pieces = tuple(sorted(free.values())), tuple(sorted(capacity.values()))
    return NodeUsage(capacity, pods, unassigned, priorities, free, pieces, capacity_pieces)


class FreeRow(NamedTuple):
    """The numbers that decide in most cases whether a pod fits on a node; they are cached for thousands of nodes."""

    largest: Units
    """The largest piece that is free."""
    capacity: Units
    """The units of the largest GPU."""
    lowest_priority: int
    """The lowest priority of the pods there; `NO_PODS` without pods."""
    usage: NodeUsage


NO_PODS = 1 << 31
"""More than the highest priority of a pod."""


def row_of(usage: NodeUsage) -> FreeRow:
    """Return the row of a node's usage."""
    capacity = usage.capacity_pieces[-1] if usage.capacity_pieces else _NONE
    lowest = usage.lowest_priority
    return FreeRow(usage.largest, capacity, NO_PODS if lowest is None else lowest, usage)


# kube-scheduler counts a nominated pod on its node for pods of no higher priority, by the sum of units. The sum lets a
# pod pass that takes the very GPU that was freed, so the nominated pod counts on a GPU, too.
class Nomination(msgspec.Struct, frozen=True):
    """A pod that is nominated for a node and not bound."""

    pod: PodUid
    demand: Demand
    priority: int = 0
    policy: Policy = Policy.BINPACK
    name: str = ""
    """The pod as users name it: `namespace/name`."""

    @property
    def rank(self) -> tuple[int, PodUid]:
        """The order among nominated pods: a pod counts for those after it, so that two never wait for each other."""
        return -self.priority, self.pod


def with_nominated(
    usage: NodeUsage, nominations: Iterable[Nomination], ending: Iterable[PodUid] = (), whole: Units = WHOLE
) -> NodeUsage:
    """Return the usage of a node in which nominated pods have their units.

    Their GPUs are those that they would get once the pods that are `ending` have ended. A pod that fits on none then
    counts for nothing, since the eviction of other pods must come first, and kube-scheduler may choose another node.
    """
    later, found, steps = usage.without(ending), usage, Steps(MOST_STEPS)
    for nomination in sorted(nominations, key=lambda nomination: nomination.rank):
        placed = later.place(nomination.demand, nomination.policy, whole, steps)
        if placed is not None:
            counted = nomination.pod, placed.used, nomination.demand.total, nomination.priority
            later, found = later.with_pod(*counted), found.with_pod(*counted)
    return found
