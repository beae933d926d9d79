"""Reads the shared GPUs of a cluster and their use by pods from the API server, once or as a stream of changes."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from gpuvirt.clock import Clock, Signal
from gpuvirt.diagnosis.findings import listed
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import NodeName, PodUid, ResourceName
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ApiError, ForbiddenError, NotFoundError
from gpuvirt.kube.kinds.core import ReadNode
from gpuvirt.kube.kinds.gpunode import GPU_NODES, PodMemory
from gpuvirt.kube.kinds.vgpuschedule import VgpuSchedule
from gpuvirt.kube.objects import key_of
from gpuvirt.kube.reflector import Reflector
from gpuvirt.kube.resources import NODES, Collection, KubernetesObject, Metadata
from gpuvirt.kube.watchevents import Listed
from gpuvirt.model.inventory.nearness import nearest
from gpuvirt.model.reasons import FindingCode
from gpuvirt.model.shares import overview
from gpuvirt.model.shares.annotations import SHARED_GPUS_ANNOTATION, SHARES_ANNOTATION, enforcement_of
from gpuvirt.model.shares.overview import PodShare, SharesOverview
from gpuvirt.model.workers.away import AwayWorker
from gpuvirt.shares.awayworkers import away, read_schedules
from gpuvirt.shares.index import Index
from gpuvirt.shares.objects import SHARING_NODES, SHARING_PODS, SharingNode, SharingPod
from gpuvirt.shares.sharing import Sharing

T = TypeVar("T", bound=KubernetesObject)
MIN_PAUSE_S = 0.5
"""Between two states of a stream, so that a burst of changes is one state."""
SCHEDULES_S = 10.0
"""How often a stream reads the memory of pods, and the schedules, which few clusters have. Cordons are watched."""


class _Shares(msgspec.Struct, frozen=True):
    memory: tuple[PodMemory, ...] = ()


class _Status(msgspec.Struct, frozen=True):
    shares: _Shares | None = None


class GpuNodeWithMemory(msgspec.Struct, frozen=True):
    """The fields of a GpuNode that have the memory of pods."""

    metadata: Metadata
    status: _Status | None = None


async def read_memory(client: Client) -> Mapping[str, PodMemory]:
    """Return the memory of pods by their names: `research/train-0`; raises ApiError.

    There is none for a user who may not list GpuNodes, and in a cluster without the kind.
    """
    try:
        nodes = (await client.list(Collection(GPU_NODES, GpuNodeWithMemory))).items
    except (ForbiddenError, NotFoundError):
        return {}
    reported = (node.status.shares for node in nodes if node.status is not None and node.status.shares is not None)
    return {f"{pod.namespace}/{pod.pod}": pod for shares in reported for pod in shares.memory}


async def read_index(client: Client, sharing: Sharing) -> Index:
    """Return the index of a cluster's shares now; raises ApiError."""
    nodes, pods = await asyncio.gather(client.list(SHARING_NODES), client.list(SHARING_PODS))
    index = Index(sharing)
    index.observe_nodes(_all_of(nodes))
    index.observe_pods(_all_of(pods))
    return index


def shares_of_pods(index: Index) -> Mapping[PodUid, PodShare]:
    """Return the names and the units of the pods that take units on a node."""
    return {
        pod.uid: PodShare(pod.where, units, enforcement_of(pod.metadata.annotations.get(SHARES_ANNOTATION)))
        for pod, units in index.bound_pods()
    }


def shares_for_pod(index: Index, pod: SharingPod) -> Mapping[PodUid, PodShare]:
    """Return the pods that take units or, as nominated pods do, keep them from a pod."""
    nominated = [nomination for nominations in index.nominated_for(pod).values() for nomination in nominations]
    return {
        **shares_of_pods(index),
        **{
            nomination.pod: PodShare(f"{nomination.name} (nominated)", nomination.demand.total)
            for nomination in nominated
        },
    }


class NoSuchResourceError(GpuvirtError):
    """No node with shared GPUs has the resource whose units were asked for."""


async def verify_resource(client: Client, resource: ResourceName) -> None:
    """Raise NoSuchResourceError for a resource that nodes with shared GPUs lack: no pod would count; raises ApiError.

    Nodes whose kubelets count no resource of a plugin yet do not tell its name.
    """
    nodes = (await client.list(Collection(NODES, ReadNode))).items
    sharing = (node.status for node in nodes if node.metadata.annotations.get(SHARED_GPUS_ANNOTATION))
    known = sorted({name for status in sharing for name in (*status.capacity, *status.allocatable) if "/" in name})
    if known and resource not in known:
        near = nearest(resource, known)
        hint = f"; did you mean {near}?" if near is not None else "."
        message = f"{resource} is no resource of the nodes with shared GPUs{hint} They have: {listed(known)}"
        raise NoSuchResourceError(f"{FindingCode.NO_SUCH_RESOURCE}: {message}")


async def read_overview(client: Client, sharing: Sharing) -> SharesOverview:
    """Return the overview of a cluster's shares now; raises ApiError."""
    nodes, pods, schedules, memory = await asyncio.gather(
        client.list(SHARING_NODES), client.list(SHARING_PODS), listed_schedules(client), read_memory(client)
    )
    index = Index(sharing)
    index.observe_nodes(_all_of(nodes))
    index.observe_pods(_all_of(pods))
    return _overview_of(index, away(schedules, cordoned_by(nodes.items)), memory)


def cordoned_by(nodes: Iterable[SharingNode]) -> Mapping[NodeName, str]:
    """Return the schedules that have cordoned nodes."""
    return {node.name: node.metadata.labels.cordoned_by for node in nodes if node.metadata.labels.cordoned_by}


async def listed_schedules(client: Client) -> tuple[VgpuSchedule, ...]:
    """Return the schedules; none for a user who may not list them, for whom the labels of nodes count alone."""
    try:
        return await read_schedules(client)
    except ForbiddenError:
        return ()


def _overview_of(index: Index, away: Mapping[NodeName, AwayWorker], memory: Mapping[str, PodMemory]) -> SharesOverview:
    pods = dict(shares_of_pods(index))
    for uid, share in pods.items():
        if (used := memory.get(share.pod)) is not None:
            pods[uid] = replace(share, limit_mib=used.limit_mib, used_mib=used.used_mib)
    return overview.overview(index.nodes, pods, away, index.limiting)


class SharesFollower:
    """Follows the shares of a cluster by watches of its nodes and pods."""

    def __init__(self, client: Client, sharing: Sharing, clock: Clock, random: Random) -> None:
        self._index = Index(sharing)
        self._clock = clock
        self._nodes = Reflector(client, SHARING_NODES, clock, random)
        self._pods = Reflector(client, SHARING_PODS, clock, random)
        self._changed = Signal()
        self._client = client
        self._cordoned_by: Mapping[NodeName, str] = {}
        self._schedules: tuple[VgpuSchedule, ...] = ()
        self._memory: Mapping[str, PodMemory] = {}

    async def run(self, show: Callable[[SharesOverview], None], report: Callable[[ApiError | None], None]) -> None:
        """Show each state that differs from the one before, until cancelled; `report` gets each error."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._nodes.run(self._observe_nodes, report))
            group.create_task(self._pods.run(self._observe_pods, report))
            group.create_task(self._read_others(report))
            group.create_task(self._show(show))

    def _observe_nodes(self, delta: Delta[SharingNode]) -> None:
        self._index.observe_nodes(delta)
        self._cordoned_by = cordoned_by(delta.objects.values())
        self._changed.set()

    def _observe_pods(self, delta: Delta[SharingPod]) -> None:
        self._index.observe_pods(delta)
        self._changed.set()

    async def _read_others(self, report: Callable[[ApiError | None], None]) -> None:
        """Read again and again the schedules, for the times at which workers come back, and the memory of pods."""
        while True:
            try:
                self._schedules = await listed_schedules(self._client)
                self._memory = await read_memory(self._client)
            except ApiError as error:
                report(error)
            self._changed.set()
            await self._clock.sleep(SCHEDULES_S)

    async def _show(self, show: Callable[[SharesOverview], None]) -> None:
        shown: SharesOverview | None = None
        while True:
            await self._changed.wait()
            if self._index.is_ready:
                overview = _overview_of(self._index, away(self._schedules, self._cordoned_by), self._memory)
                if overview != shown:
                    show(overview)
                    shown = overview
            await self._clock.sleep(MIN_PAUSE_S)


def _all_of(listed: Listed[T]) -> Delta[T]:
    objects = {key_of(item): item for item in listed.items}
    return Delta(objects, frozenset(objects))
