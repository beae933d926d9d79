"""Takes what we have written into KubeVirt out of it again, once; what machines still need stays, and that is said.

It is decided by what is there now, machines and nodes included, and tried again where somebody else has just written.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from gpuvirt.clock import Clock
from gpuvirt.cluster.client import Client, Collection, PatchType
from gpuvirt.cluster.failures import ConflictError, NotFoundError, RefusedError, retried
from gpuvirt.cluster.kinds.core import AnyObject, RequestingPod
from gpuvirt.cluster.kinds.gpunode import GpuNode
from gpuvirt.cluster.kinds.kubevirt import DEVICE_KINDS, HYPER_CONVERGEDS, KUBEVIRTS, HyperConverged, KubeVirt
from gpuvirt.cluster.operator.kubevirt.names import names_of
from gpuvirt.cluster.operator.kubevirt.offered import offered_of, wants_mdevs
from gpuvirt.cluster.operator.kubevirt.scene import KubeVirtPicture
from gpuvirt.cluster.operator.kubevirt.undoing import undo
from gpuvirt.cluster.resources import KubernetesObject, Resource
from gpuvirt.model.desired.observed import Observed

T = TypeVar("T", bound=KubernetesObject)

PODS = Collection(Resource("pods"), RequestingPod)
"""Of all namespaces: KubeVirt's machines are not all that has vGPUs, and a GpuNode may have gone before."""
CONFLICTS = (ConflictError, RefusedError)
"""A patch whose condition does not hold any more is refused as not valid (422)."""


def held_names(gpu_nodes: Iterable[GpuNode]) -> frozenset[str]:
    """Return the resources of which somebody has some, be it no virtual machine of KubeVirt's.

    Where anybody has a vGPU, these are all resources of mediated devices: KubeVirt would delete it under any name.
    """
    statuses = [one.status for one in gpu_nodes if one.status is not None]
    in_use = any(vgpu.users for status in statuses for gpu in status.gpus for vgpu in gpu.vgpus)
    resources = (one for status in statuses for one in status.resources)
    return frozenset(one.name for one in resources if one.allocated != 0 or (in_use and one.mdev_name_selectors))


class KubeVirtUndoer:
    """Undoes it in all KubeVirts of a cluster."""

    def __init__(self, client: Client, clock: Clock, gpu_nodes: Sequence[GpuNode]) -> None:
        """`gpu_nodes` say what nodes offer."""
        self._client = client
        self._clock = clock
        self._gpu_nodes = gpu_nodes

    async def run(self) -> AsyncIterator[str]:
        """Undo it, and yield a line for each thing that was done, or is left; raises ApiError."""
        for one in (await self._observed(Collection(KUBEVIRTS, KubeVirt))).value or ():
            uid = one.metadata.uid
            for line in await retried(partial(self._undo, uid), self._clock, CONFLICTS):
                yield line

    async def _undo(self, uid: str) -> Sequence[str]:
        """Undo it in one KubeVirt, and return what was done or is left; raises ApiError."""
        picture = await self._scene(uid)
        if picture is None:
            return ()
        found, where = undo(picture), f"{picture.kubevirt.metadata.namespace}/{picture.kubevirt.metadata.name}"
        if picture.is_opted_out:
            return (f"left KubeVirt {where} as it is, as its annotation says",)
        left = tuple(reason.text for reason in found.reasons)
        if found.resource is None or not found.patch:
            return left
        await self._client.patch(found.resource, found.name, found.patch, PatchType.JSON, AnyObject)
        return (f"{found.resource.plural} {found.name}: took out what was added for KubeVirt {where}", *left)

    async def _scene(self, uid: str) -> KubeVirtPicture | None:
        """Return all that is to be known of a KubeVirt, None where it has gone."""
        kubevirts = (await self._observed(Collection(KUBEVIRTS, KubeVirt))).value or ()
        found = next((one for one in kubevirts if one.metadata.uid == uid), None)
        if found is None:
            return None
        requesting = {kind.name: await self._observed(kind.collection) for kind in DEVICE_KINDS}
        names, pods = names_of(requesting), (await self._observed(PODS)).value or ()
        held = held_names(self._gpu_nodes).union(*(one.requests for one in pods))
        return KubeVirtPicture(
            kubevirt=found,
            offered=offered_of(self._gpu_nodes),
            names=replace(names, by_others=held),
            hyper_convergeds=await self._observed(Collection(HYPER_CONVERGEDS, HyperConverged)),
            mdevs=wants_mdevs(self._gpu_nodes),
        )

    async def _observed(self, collection: Collection[T]) -> Observed[tuple[T, ...]]:
        """Return all of a collection, None of a kind that is not installed; raises ApiError."""
        try:
            return Observed((await self._client.list(collection)).items)
        except NotFoundError:
            return Observed(None)
