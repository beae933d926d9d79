"""The marks of schedules on nodes: cordons with their owner, and the taint of workers that leave soon.

They are removed from nodes whose schedule was deleted, and at an uninstall.
"""

import logging
from collections.abc import AsyncIterator, Iterable, Mapping

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.election import Terms
from gpuvirt.kube.failures import ConflictError, NotFoundError
from gpuvirt.kube.kinds.core import Node, Taint
from gpuvirt.kube.resources import NODES, Collection
from gpuvirt.model.workers.connection import DEAD_AFTER_S
from gpuvirt_schedules.controller.workerobjects import ANNOUNCED, CORDONED_BY, cordoned_by, is_announced


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str
    labels: dict[str, str | None] = {}


class _Spec(msgspec.Struct, frozen=True, omit_defaults=True):
    unschedulable: bool | msgspec.UnsetType | None = msgspec.UNSET
    taints: tuple[Taint, ...] | msgspec.UnsetType = msgspec.UNSET


class MarksPatch(msgspec.Struct, frozen=True):
    """A merge patch of a node of the version that was read."""

    metadata: _Metadata
    spec: _Spec


def marks_patch(
    version: str,
    taints: tuple[Taint, ...],
    schedule: str,
    *,
    cordon: bool | None,
    taint: bool | None,
    labels: Iterable[tuple[str, str | None]] = (),
) -> MarksPatch:
    """Return the patch that sets or removes a schedule's marks; None leaves a mark as it is, and removes a label.

    `version` and `taints` are those of the node that was read: taints are written as a whole list.
    """
    after: tuple[Taint, ...] | msgspec.UnsetType = msgspec.UNSET
    if taint is not None:
        others = tuple(other for other in taints if other.key != ANNOUNCED)
        after = (*others, Taint(ANNOUNCED, "PreferNoSchedule")) if taint else others
    changed: dict[str, str | None] = dict(labels)
    unschedulable: bool | msgspec.UnsetType | None = msgspec.UNSET
    if cordon is not None:
        changed[CORDONED_BY] = schedule if cordon else None
        unschedulable = True if cordon else None
    return MarksPatch(_Metadata(version, changed), _Spec(unschedulable, after))


def unmarking(node: Node, *, uncordons: bool, untaints: bool = True) -> MarksPatch | None:
    """Return the patch that removes marks of schedules from a node; None if there are none to remove.

    An admin's cordon has no owner, and stays.
    """
    cordon = False if uncordons and cordoned_by(node) else None
    taint = False if untaints and is_announced(node) else None
    if cordon is None and taint is None:
        return None
    return marks_patch(node.metadata.resource_version, node.spec.taints, "", cordon=cordon, taint=taint)


async def unmark_workers(client: Client, clock: Clock) -> AsyncIterator[str]:
    """Remove the marks, and yield a line for each node; raises ApiError.

    A node that is ready stays cordoned: its VM may still be suspended by a call that the hypervisor has, and pods must
    not come to it before. No call is sent any more once the connections of the last leader are dead.
    """
    if not any(unmarking(node, uncordons=True) for node in await _nodes(client)):
        return
    await clock.sleep(Terms().give_up_s + DEAD_AFTER_S)
    for node in await _nodes(client):
        name = node.metadata.name
        patch = unmarking(node, uncordons=not node.is_ready)
        try:
            if patch is not None:
                await client.patch(NODES, name, patch, PatchType.MERGE, Node)
        except NotFoundError:
            continue
        except ConflictError:
            yield f"node {name}: kept the marks of a VgpuSchedule, since the node changes; run gpuvirt uninstall again"
            continue
        schedule = cordoned_by(node)
        if schedule and node.is_ready:
            yield (
                f"node {name}: stays cordoned, since VgpuSchedule {schedule} may be suspending its VM; once the"
                f" hypervisor shows the VM on, and no task of it: kubectl uncordon {name}"
            )
        elif schedule:
            yield f"node {name}: uncordoned; its VM may be suspended, and works once it is resumed"


async def _nodes(client: Client) -> Iterable[Node]:
    try:
        return (await client.list(Collection(NODES, Node))).items
    except NotFoundError:  # a proxy's answer: the other steps of an uninstall go on as well
        return ()


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
        now_s = self._clock.monotonic_s()
        uncordons = is_abandoned and (
            not node.is_ready or now_s - self._since_s.setdefault(name, now_s) >= SUSPENDED_WITHIN_S
        )
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
