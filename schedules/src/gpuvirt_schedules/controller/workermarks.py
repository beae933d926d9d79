"""Removes the marks of VgpuSchedules from worker nodes, whose schedules no controller runs any more."""

from collections.abc import AsyncIterator, Iterable

from gpuvirt.clock import Clock
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.collection import Collection
from gpuvirt.kube.election import Terms
from gpuvirt.kube.failures import ConflictError, NotFoundError
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.resources import NODES
from gpuvirt.model.workers.connection import DEAD_AFTER_S
from gpuvirt_schedules.controller.nodemarks import unmarking
from gpuvirt_schedules.controller.workerobjects import cordoned_by


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
