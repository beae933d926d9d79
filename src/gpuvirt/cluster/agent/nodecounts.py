"""Keeps the counts of resources in the node's status as the agent knows them, until the kubelet writes them itself.

The scheduler goes by `status.allocatable`, which the kubelet writes every ten seconds (nodeStatusUpdateFrequency).
Others may write it, too: so extended resources came about (Kubernetes: "Advertise Extended Resources for a Node"). What
the kubelet writes later is the same.
"""

from collections.abc import Mapping

import msgspec

from gpuvirt.clock import Signal
from gpuvirt.cluster.agent.keeping import KeeperDependencies, Tell
from gpuvirt.cluster.cache import Delta
from gpuvirt.cluster.client import PatchType
from gpuvirt.cluster.kinds.core import Node
from gpuvirt.cluster.known import Known
from gpuvirt.cluster.resources import NODES
from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.offers.schedulable import Count
from gpuvirt.node.published.notice import Notice


class Counts(msgspec.Struct, frozen=True):
    """The part of a node's status that is written."""

    allocatable: dict[str, str]


class Patch(msgspec.Struct, frozen=True):
    """What a node's status lacks."""

    status: Counts


def said_of(allocatable: Mapping[str, str]) -> Mapping[ResourceName, int]:
    """Return the whole numbers of a node's status; what else stands there is none of a device plugin's."""
    return {ResourceName(name): int(text) for name, text in allocatable.items() if text.isdecimal()}


def patch_of(counts: Mapping[ResourceName, Count], said: Mapping[ResourceName, int]) -> Patch | None:
    """Return what a node's status lacks to say the right counts; None where that is nothing."""
    found = {name: (said.get(name, 0), count.corrected(said.get(name, 0))) for name, count in counts.items()}
    lacks: dict[str, str] = {name: str(right) for name, (says, right) in found.items() if says != right}
    return Patch(Counts(lacks)) if lacks else None


class NodeCounts:
    """Keeps one node's."""

    def __init__(self, dependencies: KeeperDependencies, notice: Notice) -> None:
        self._dependencies = dependencies
        self._notice = notice
        self._known: Known[Node] = Known()
        self._due = Signal()

    def observe(self, delta: Delta[Node]) -> None:
        """Take what the node says now; nothing is written to a node that is not there."""
        self._known.observe(delta.objects.get(self._dependencies.key))
        self._tell()
        self._due.set()

    def _tell(self) -> None:
        if self._known.item is not None:
            self._notice.observe(said_of(self._known.item.status.allocatable))

    async def run(self, tell: Tell) -> None:
        """Write for ever what differs; `tell` takes what is wrong, and None when nothing is any more."""
        with self._notice.counts.telling(self._due):
            await self._dependencies.keep(self._lacking, self._write, tell, self._due)

    def _lacking(self) -> Patch | None:
        node = self._known.item
        return patch_of(self._notice.counts.get(), said_of(node.status.allocatable)) if node is not None else None

    async def _write(self, patch: Patch) -> None:
        client, name, before = self._dependencies.client, self._dependencies.node, self._known.word
        self._known.answer(before, await client.patch(NODES, name, patch, PatchType.MERGE, Node, part="status"))
        self._tell()
