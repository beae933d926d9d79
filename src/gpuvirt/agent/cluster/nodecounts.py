"""Writes the agent's resource counts to the node's status before the kubelet writes them itself.

The scheduler uses `status.allocatable`, which the kubelet writes every ten seconds (nodeStatusUpdateFrequency). Other
clients may write it too (Kubernetes: "Advertise Extended Resources for a Node"). The kubelet writes the same counts
later.
"""

from collections.abc import Callable, Mapping

import msgspec

from gpuvirt.agent.cluster.keeping import KeeperDependencies, ObservedObject, ReportOutcome
from gpuvirt.clock import Signal
from gpuvirt.facts.ids import ResourceName
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import PatchType
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.resources import NODES
from gpuvirt.loops.cell import Cell
from gpuvirt.model.offers.schedulable import Count
from gpuvirt.model.shares.quantities import whole_amounts


class Counts(msgspec.Struct, frozen=True):
    """The written part of a node's status."""

    allocatable: dict[str, str]


class Patch(msgspec.Struct, frozen=True):
    """A merge patch of a node's status."""

    status: Counts


def integer_counts(allocatable: Mapping[str, str]) -> Mapping[ResourceName, int]:
    """Return the integer counts of a node's status; other quantities do not come from a device plugin."""
    return {ResourceName(name): count for name, count in whole_amounts(allocatable).items()}


def patch_of(counts: Mapping[ResourceName, Count], observed: Mapping[ResourceName, int]) -> Patch | None:
    """Return the patch that corrects the counts of a node's status; None if they are right."""
    corrected = {name: count.corrected(observed.get(name, 0)) for name, count in counts.items()}
    wrong: dict[str, str] = {name: str(count) for name, count in corrected.items() if count != observed.get(name, 0)}
    return Patch(Counts(wrong)) if wrong else None


class NodeCountsKeeper:
    """Keeps the resource counts in the status of one node."""

    def __init__(
        self,
        dependencies: KeeperDependencies,
        counts: Cell[Mapping[ResourceName, Count]],
        observe: Callable[[Mapping[ResourceName, int]], None],
    ) -> None:
        """`counts` are those that the status should have; `observe` gets those that it has."""
        self._dependencies = dependencies
        self._counts, self._observe = counts, observe
        self._known: ObservedObject[Node] = ObservedObject()
        self._due = Signal()

    def observe(self, delta: Delta[Node]) -> None:
        """Store the observed node. While it does not exist, nothing is written."""
        self._known.observe(delta.objects.get(self._dependencies.key))
        self._report_counts()
        self._due.set()

    def _report_counts(self) -> None:
        if self._known.item is not None:
            self._observe(integer_counts(self._known.item.status.allocatable))

    async def run(self, report: ReportOutcome) -> None:
        """Write the counts whenever they differ; `report` gets each error, and None after a success."""
        with self._counts.notifying(self._due):
            await self._dependencies.keep(self._lacking, self._write, report, self._due)

    def _lacking(self) -> Patch | None:
        node = self._known.item
        return patch_of(self._counts.get(), integer_counts(node.status.allocatable)) if node is not None else None

    async def _write(self, patch: Patch) -> None:
        client, name, before = self._dependencies.client, self._dependencies.node, self._known.latest
        self._known.answer(before, await client.patch(NODES, name, patch, PatchType.MERGE, Node, part="status"))
        self._report_counts()
