"""Taking back from KubeVirt what the controller has written there, with everything asked of the API server anew."""

from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

import msgspec

from gpuvirt.cluster.client import Client, Collection, PatchType
from gpuvirt.cluster.failures import NotFoundError
from gpuvirt.cluster.kinds import kubevirt as kinds
from gpuvirt.cluster.kinds.gpunode import GpuNode
from gpuvirt.cluster.operator.kubevirt.names import Machines, names_of
from gpuvirt.cluster.operator.kubevirt.offered import offered_of, wants_mdevs
from gpuvirt.cluster.operator.kubevirt.scene import Scene
from gpuvirt.cluster.operator.kubevirt.undoing import undo
from gpuvirt.cluster.resources import KubernetesObject, Metadata
from gpuvirt.model.heard import Heard

T = TypeVar("T", bound=KubernetesObject)


class Patched(msgspec.Struct, frozen=True):
    """What is read of an object that was patched."""

    metadata: Metadata


async def undo_kubevirt(client: Client, gpu_nodes: Sequence[GpuNode]) -> AsyncIterator[str]:
    """Take back what was written, and yield a line for each thing; raises ApiError.

    `gpu_nodes` say what was offered. What machines still need stays, and is named.
    """

    async def heard(collection: Collection[T]) -> Heard[tuple[T, ...]]:
        try:
            return Heard((await client.list(collection)).items)
        except NotFoundError:
            return Heard(None)

    hcos = await heard(Collection(kinds.HYPER_CONVERGEDS, kinds.HyperConverged))
    machines = Machines(
        machines=await heard(kinds.MACHINES),
        instances=await heard(kinds.INSTANCES),
        replica_sets=await heard(kinds.REPLICA_SETS),
        pools=await heard(kinds.POOLS),
        instancetypes=await heard(kinds.INSTANCETYPES),
        cluster_instancetypes=await heard(kinds.CLUSTER_INSTANCETYPES),
        instancetype_revisions=await heard(kinds.INSTANCETYPE_REVISIONS),
    )
    for kubevirt in (await heard(Collection(kinds.KUBEVIRTS, kinds.KubeVirt))).value or ():
        scene = Scene(kubevirt, offered_of(gpu_nodes), names_of(machines), hcos, wants_mdevs(gpu_nodes))
        found = undo(scene)
        if found.patch and found.resource is not None:
            await client.patch(found.resource, found.name, found.patch, PatchType.JSON, Patched)
            yield f"took back from {found.resource.plural} {found.name} what machines don't need"
        for reason in found.reasons:
            yield reason.text
