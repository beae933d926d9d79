"""Keeps labels and annotations of the agent's own node as its parts claim them.

They are written by a merge patch of the claimed keys alone: it names no version, so others who write to the node at the
same time are no conflict. Where patching is not permitted (NVIDIA's roles permit updates alone), the node is read and
written back whole with its version, and again after a conflict. What is not written yet is tried for ever; only the
latest counts.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from gpuvirt.clock import Signal
from gpuvirt.cluster.agent.keeping import KeeperDependencies, Tell
from gpuvirt.cluster.cache import Delta
from gpuvirt.cluster.client import PatchType
from gpuvirt.cluster.failures import ForbiddenError, retried
from gpuvirt.cluster.keys import Fields, Keys, Patch, patch_of, patched
from gpuvirt.cluster.kinds.core import Node
from gpuvirt.cluster.known import Known
from gpuvirt.cluster.resources import NODES, Metadata

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Claim:
    """What one part of the agent wants of the node's keys."""

    keys: Callable[[Metadata], Keys]
    """What it wants now of a node that is as it was last heard; keys that are as they should be may be among them."""
    telling: Callable[[Signal], AbstractContextManager[None]]
    """Has a signal set whenever that may be otherwise."""


class NodeKeys:
    """Keeps one node's keys."""

    def __init__(self, dependencies: KeeperDependencies) -> None:
        self._dependencies = dependencies
        self._known: Known[Node] = Known()
        self._due = Signal()

    def observe(self, delta: Delta[Node]) -> None:
        """Take what the node says now; nothing is written to a node that is not there."""
        self._known.observe(delta.objects.get(self._dependencies.key))
        self._due.set()

    async def run(self, claims: Sequence[Claim], tell: Tell) -> None:
        """Write for ever what differs; `tell` takes what is wrong, and None when nothing is any more."""
        with ExitStack() as stack:
            for claim in claims:
                stack.enter_context(claim.telling(self._due))
            await self._dependencies.keep(lambda: self._lacking(claims), self._write, tell, self._due)

    def _lacking(self, claims: Sequence[Claim]) -> Patch | None:
        node = self._known.item
        return patch_of([claim.keys(node.metadata) for claim in claims], node.metadata) if node is not None else None

    async def _write(self, patch: Patch) -> None:
        before = self._known.word
        self._known.answer(before, await self._written(patch))

    async def _written(self, patch: Patch) -> Node:
        try:
            return await self._dependencies.client.patch(NODES, self._dependencies.node, patch, PatchType.MERGE, Node)
        except ForbiddenError as forbidden:
            log.debug("patching nodes is not permitted; the node is updated")
            try:
                return await retried(lambda: self._update(patch), self._dependencies.clock)
            except ForbiddenError:
                raise forbidden from None  # the lesser of the two to be permitted

    async def _update(self, patch: Patch) -> Node:
        client, node = self._dependencies.client, self._dependencies.node
        return await client.update(NODES, node, patched(await client.get(NODES, node, Fields), patch), Node)
