"""Removes gpuvirt's changes from KubeVirt once, at uninstall. What VMs still need stays, and is reported.

It decides by the current objects, VMs and nodes included, and retries after a conflict with another writer.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from gpuvirt.clock import Clock
from gpuvirt.cluster.client import Client, PatchType
from gpuvirt.cluster.collection import Collection
from gpuvirt.cluster.failures import ConflictError, NotFoundError, RefusedError, retried
from gpuvirt.cluster.kinds.core import AnyObject, RequestingPod
from gpuvirt.cluster.kinds.gpunode import GpuNode
from gpuvirt.cluster.kinds.kubevirt import DEVICE_KINDS, HYPER_CONVERGEDS, KUBEVIRTS, HyperConverged, KubeVirt
from gpuvirt.cluster.operator.kubevirt.changes import MANAGE_ANNOTATION
from gpuvirt.cluster.operator.kubevirt.names import names_of
from gpuvirt.cluster.operator.kubevirt.offered import needs_mdevs, offered_of
from gpuvirt.cluster.operator.kubevirt.picture import KubeVirtPicture
from gpuvirt.cluster.operator.kubevirt.undoing import undo
from gpuvirt.cluster.resources import KubernetesObject, Resource
from gpuvirt.model.desired.observed import Observed

T = TypeVar("T", bound=KubernetesObject)

PODS = Collection(Resource("pods"), RequestingPod)
"""Pods of all namespaces: pods other than those of VMs may use vGPUs, and GpuNodes may be missing."""
CONFLICTS = (ConflictError, RefusedError)
"""The API server refuses a patch whose test fails as invalid (422)."""


def held_names(gpu_nodes: Iterable[GpuNode]) -> frozenset[str]:
    """Return the resources that are allocated on a node, also to pods that are no VMs.

    If any vGPU is in use, all resources of mediated devices count: KubeVirt would delete the vGPU under any name.
    """
    statuses = [gpu_node.status for gpu_node in gpu_nodes if gpu_node.status is not None]
    in_use = any(vgpu.users for status in statuses for gpu in status.gpus for vgpu in gpu.vgpus)
    return frozenset(
        resource.name
        for status in statuses
        for resource in status.resources
        if resource.allocated != 0 or (in_use and resource.mdev_name_selectors)
    )


class KubeVirtUndoer:
    """Removes gpuvirt's changes from all KubeVirts of a cluster."""

    def __init__(self, client: Client, clock: Clock, gpu_nodes: Sequence[GpuNode]) -> None:
        """Make an undoer; `gpu_nodes` report the resources that nodes offer."""
        self._client = client
        self._clock = clock
        self._gpu_nodes = gpu_nodes

    async def run(self) -> AsyncIterator[str]:
        """Remove the changes, and yield a line for each object that was patched or keeps changes; raises ApiError."""
        for kubevirt in (await self._observed(Collection(KUBEVIRTS, KubeVirt))).value or ():
            for line in await retried(partial(self._undo, kubevirt.metadata.uid), self._clock, CONFLICTS):
                yield line

    async def _undo(self, uid: str) -> Sequence[str]:
        """Remove the changes from one KubeVirt, and return the lines about it; raises ApiError."""
        picture = await self._picture(uid)
        if picture is None:
            return ()
        found, where = undo(picture), f"{picture.kubevirt.metadata.namespace}/{picture.kubevirt.metadata.name}"
        if picture.is_opted_out:
            return (f"KubeVirt {where} stays as it is: its annotation {MANAGE_ANNOTATION} is false",)
        left = tuple(reason.text for reason in found.reasons)
        if found.resource is None or not found.patch:
            return left
        await self._client.patch(found.resource, found.name, found.patch, PatchType.JSON, AnyObject)
        return (f"{found.resource.plural} {found.name}: removed what gpuvirt had added for KubeVirt {where}", *left)

    async def _picture(self, uid: str) -> KubeVirtPicture | None:
        """Read a KubeVirt and the state around it; None if it has been deleted. Raises ApiError."""
        kubevirts = (await self._observed(Collection(KUBEVIRTS, KubeVirt))).value or ()
        found = next((kubevirt for kubevirt in kubevirts if kubevirt.metadata.uid == uid), None)
        if found is None:
            return None
        requesting = {kind.name: await self._observed(kind.collection) for kind in DEVICE_KINDS}
        names, pods = names_of(requesting), (await self._observed(PODS)).value or ()
        held = held_names(self._gpu_nodes).union(*(pod.requests for pod in pods))
        return KubeVirtPicture(
            kubevirt=found,
            offered=offered_of(self._gpu_nodes),
            names=replace(names, by_others=held),
            hyper_convergeds=await self._observed(Collection(HYPER_CONVERGEDS, HyperConverged)),
            mdevs=needs_mdevs(self._gpu_nodes),
        )

    async def _observed(self, collection: Collection[T]) -> Observed[tuple[T, ...]]:
        """List a collection; `Observed(None)` if the kind is not installed. Raises ApiError."""
        try:
            return Observed((await self._client.list(collection)).items)
        except NotFoundError:
            return Observed(None)
