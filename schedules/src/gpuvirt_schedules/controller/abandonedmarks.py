"""Removes marks from nodes whose schedule was deleted."""

import logging
from collections.abc import Mapping

from gpuvirt.clock import Clock
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.collection import Collection
from gpuvirt.kube.failures import ConflictError, NotFoundError
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.resources import NODES
from gpuvirt_schedules.controller.nodemarks import unmarking
from gpuvirt_schedules.controller.workerobjects import cordoned_by, is_announced

log = logging.getLogger(__name__)

SUSPENDED_WITHIN_S = 600.0
"""How long a node that is ready stays cordoned: the hypervisor may still be suspending its VM. As long as that step."""
AGAIN_S = 30.0
PAGE = 100
"""Nodes are large, and the memory of all at once would stay the process's."""


class AbandonedMarks:
    """The marks of schedules that do not exist, in one term as the leader."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._since_s: dict[str, float] = {}
        """When a cordoned node was first seen without its schedule."""

    async def remove(self, workers: Mapping[str, frozenset[str]]) -> float | None:
        """Remove marks; return the seconds until the next try, None if no mark is left. Raises ApiError.

        `workers` has each schedule that exists, with the nodes of its status.
        """
        nodes = list[Node]()
        async for page in self._client.pages(Collection(NODES, Node), page=PAGE):
            nodes += [node for node in page.items if cordoned_by(node) or is_announced(node)]
        announced = frozenset(name for names in workers.values() for name in names)
        left = {node.metadata.name for node in nodes if not await self._unmark(node, workers, announced)}
        self._since_s = {name: at_s for name, at_s in self._since_s.items() if name in left}
        return AGAIN_S if left else None

    async def _unmark(self, node: Node, schedules: Mapping[str, frozenset[str]], announced: frozenset[str]) -> bool:
        """Return whether a node has no abandoned marks any more."""
        name = node.metadata.name
        is_abandoned = bool(cordoned_by(node)) and cordoned_by(node) not in schedules
        uncordons = is_abandoned and (not node.is_ready or self._has_waited(name))
        patch = unmarking(node, uncordons=uncordons, untaints=name not in announced)
        if patch is None:
            return not is_abandoned
        try:
            await self._client.patch(NODES, name, patch, PatchType.MERGE, Node)
        except NotFoundError:
            return True
        except ConflictError:
            return False
        if uncordons:
            log.info(
                "schedule: uncordoned a node of a schedule that was deleted",
                extra={"node": name, "schedule": cordoned_by(node)},
            )
        return uncordons or not is_abandoned

    def _has_waited(self, name: str) -> bool:
        now_s = self._clock.monotonic_s()
        return now_s - self._since_s.setdefault(name, now_s) >= SUSPENDED_WITHIN_S
