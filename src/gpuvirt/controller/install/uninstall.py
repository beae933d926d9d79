"""Removes the controller's objects from a cluster: operands, labels, cordons, KubeVirt's entries, GpuNodes, CRDs.

No device changes: GPUs keep their drivers, and vGPUs and the devices of VMs stay. It can be repeated at any time, after
any failure: each step removes what still exists.

Pods whose containers have shares of GPUs keep gpuvirt from being uninstalled: a container with a share restarts only
while the agent of its node runs, since the kubelet asks the agent before each start.
"""

import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from random import Random
from typing import TypeVar

import msgspec

from gpuvirt.clock import Clock, RealClock
from gpuvirt.controller.definitions import DEFINITIONS, OURS, PART_OF, Definition, is_ours
from gpuvirt.controller.kubevirt.decisions import HISTORY
from gpuvirt.controller.kubevirt.undoer import KubeVirtUndoer
from gpuvirt.controller.nodes.labels import removed_labels
from gpuvirt.controller.operands.inputs import OperandName
from gpuvirt.controller.schedulespart import SchedulesPart, load_schedules
from gpuvirt.distributions import MissingPartError
from gpuvirt.errors import GpuvirtError
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.election import CONTROLLER_LEASE, RENEW_S, UNINSTALL, Candidacy, Election
from gpuvirt.kube.failures import ConflictError, NotFoundError, retried
from gpuvirt.kube.kinds.clusterpolicy import CLUSTER_POLICIES, StoredPolicy, choose
from gpuvirt.kube.kinds.core import AnyObject, Node, Pod
from gpuvirt.kube.kinds.gpunode import GPU_NODES, GpuNode
from gpuvirt.kube.kinds.workloads import made_in
from gpuvirt.kube.labels import (
    NODE_LABEL,
    OPERAND_LABEL,
    OS_LABEL,
    VGPU_DRIVER,
    VGPU_DRIVER_LABEL,
    DesiredLabels,
    deploy_label,
    patch_of,
)
from gpuvirt.kube.resources import NODES, Collection, KubernetesObject, Metadata, Resource, config_maps, pods
from gpuvirt.model.offers import discovery
from gpuvirt.model.shares.annotations import SHARES_ANNOTATION
from gpuvirt.model.workers.spec import CORDONED_BY
from gpuvirt.shares.nodekeys import keys_without_agent
from gpuvirt.shares.objects import SHARING_PODS, SharingPod

T = TypeVar("T", bound=KubernetesObject)
HELD_S = 600
"""How long no controller leads afterwards. A controller that still exists then creates everything again."""
GONE_WITHIN_S = 120.0
POLL_S = 1.0
GPU_NODE_KIND = "gpunodes.gpuvirt.io"
KINDS = (GPU_NODE_KIND, "vgpuschedules.gpuvirt.io", "clusterpolicies.nvidia.com")
DISCOVERER = {"app.kubernetes.io/name": "gpuvirt", "app.kubernetes.io/component": "discover"}
"""The labels of the discoverer's DaemonSet and of its pods, as an install brings them."""
DISCOVERED = (discovery.PRESENT_LABEL, discovery.OS_ID_LABEL, discovery.OS_VERSION_LABEL)

MOST_NAMED = 10
"""How many pods of a node a message names."""

PodsByNode = Mapping[str, tuple[str, ...]]
"""The pods with shares as `namespace/name`, by their nodes."""


class SharesInUseError(GpuvirtError):
    """Pods have shares of GPUs; nothing was removed."""

    def __init__(self, found: PodsByNode) -> None:
        super().__init__(
            f"pods have shares of GPUs, and their containers restart only while gpuvirt's agents run: {text_of(found)}."
            " Nothing was removed. Label these nodes nvidia.com/gpu.workload.config=container, and uninstall gpuvirt"
            " once the pods have ended; or use --force: then their containers run on, and do not start again"
        )


def by_node(pods: Iterable[SharingPod], nodes: Iterable[str]) -> PodsByNode:
    """Return the pods with shares on these nodes; extender or agent have written the annotation of each."""
    known, found = frozenset(nodes), dict[str, tuple[str, ...]]()
    for pod in sorted(pods, key=lambda pod: pod.where):
        if pod.metadata.annotations.get(SHARES_ANNOTATION) and pod.spec.node_name in known:
            found[pod.spec.node_name] = (*found.get(pod.spec.node_name, ()), pod.where)
    return found


def text_of(found: PodsByNode) -> str:
    """Return the pods in a line of text: `node01: default/a, default/b; node02: ...`."""
    return "; ".join(f"{node}: {_named(pods)}" for node, pods in sorted(found.items()))


def _named(pods: tuple[str, ...]) -> str:
    more = f" and {len(pods) - MOST_NAMED} more" if pods[MOST_NAMED:] else ""
    return f"{', '.join(pods[:MOST_NAMED])}{more}"


class NotDeletedError(GpuvirtError):
    """An object that was to be deleted still exists."""


class Goals(msgspec.Struct, frozen=True):
    """The options of an uninstallation."""

    namespace: str
    beside: bool = False
    """Whether NVIDIA's operator manages nodes of the cluster too: its labels stay."""
    crds: bool = False
    """Whether to delete the CRDs too, with all their objects; CRDs of other products stay."""
    force: bool = False
    """Whether to uninstall although pods have shares of GPUs, whose containers can't restart without agents."""


async def run(credentials: Credentials, goals: Goals, say: Callable[[str], None]) -> None:
    """Remove what `goals` names, and report each step by `say`; raises ApiError, NotDeletedError, SharesInUseError."""
    client, clock = Client(credentials), RealClock()
    candidacy = Candidacy(goals.namespace, CONTROLLER_LEASE, f"{UNINSTALL}{socket.gethostname()}")
    election = Election(client, candidacy, clock, Random())  # noqa: S311  no secrets
    async for line in Uninstaller(client, goals, clock, election).run():
        say(line)


async def namespace_of(client: Client) -> str:
    """Return the namespace of the controller by the ClusterPolicy's status, empty without one; raises ApiError."""
    try:
        choice = choose((await client.list(Collection(CLUSTER_POLICIES, StoredPolicy))).items)
    except NotFoundError:  # the kind is not installed
        return ""
    return choice.stored.status.namespace if choice is not None and choice.stored.status is not None else ""


def used_nodes(gpu_nodes: Iterable[GpuNode]) -> frozenset[str]:
    """Return the nodes on which VMs use vGPUs: the vGPU driver stays there."""
    return frozenset(
        node.metadata.name
        for node in gpu_nodes
        if node.status is not None and any(vgpu.users for gpu in node.status.gpus for vgpu in gpu.vgpus)
    )


def left_of(metadata: Metadata, *, used: bool, agents_gone: bool, beside: bool = False) -> DesiredLabels:
    """Return the labels and annotations to remove; those that pods write are removed once the pods are gone."""
    keys = removed_labels(metadata, beside=beside)
    # The driver's pod is scheduled by these labels.
    kept = {deploy_label(VGPU_DRIVER), VGPU_DRIVER_LABEL, OS_LABEL} if used else set[str]()
    labels = {label: value for label, value in keys.labels.items() if label not in kept}
    annotations = dict(keys.annotations)
    if agents_gone:
        labels |= dict.fromkeys(key for key in DISCOVERED if key in metadata.labels)
        written = keys_without_agent(metadata)
        labels, annotations = labels | written.labels, annotations | written.annotations
    return DesiredLabels(labels, annotations)


def _writes_again(pod: Pod) -> bool:
    return pod.app in {OperandName.AGENT, OperandName.LABELLER} or DISCOVERER.items() <= pod.metadata.labels.items()


class Uninstaller:
    """Removes everything, step by step."""

    def __init__(self, client: Client, goals: Goals, clock: Clock, election: Election) -> None:
        self._client = client
        self._goals = goals
        self._clock = clock
        self._election = election
        self._used: frozenset[str] = frozenset()
        self._gpu_nodes: tuple[GpuNode, ...] = ()

    async def run(self) -> AsyncIterator[str]:
        """Remove everything, and yield a line for each change.

        Raises ApiError, NotDeletedError, SharesInUseError and, where schedules have cordoned nodes, MissingPartError.
        """
        if sharing := await self._pods_with_shares():
            if not self._goals.force:
                raise SharesInUseError(sharing)
            yield f"pods keep their shares of GPUs, and their containers do not start again: {text_of(sharing)}"
        await self._schedules_part()
        await self._election.usurp(HELD_S)
        await self._clock.sleep(2 * RENEW_S)
        yield f"no controller leads for {HELD_S // 60} minutes"
        daemon_sets, *others = made_in(self._goals.namespace)
        self._gpu_nodes = await self._list(GPU_NODES, GpuNode)
        if await self._list(daemon_sets, AnyObject, labelled=f"{OPERAND_LABEL}={OperandName.VGPU_MANAGER}"):
            self._used = used_nodes(self._gpu_nodes)
        steps = (
            self._remove_labels(agents_gone=False),
            self._delete_operands(daemon_sets),
            self._delete_ours(daemon_sets, "DaemonSet", labelled=",".join(f"{k}={v}" for k, v in DISCOVERER.items())),
            self._wait_for_agents(),
            self._delete_operands(*others),
            self._remove_labels(agents_gone=True),
            self._unmark_workers(),
            self._revert_kubevirt(),
            self._delete_ours(CLUSTER_POLICIES, "ClusterPolicy", labelled=f"{PART_OF}={OURS}"),
            # By the GpuNodes of nodes on which the vGPU manager stays, another run decides the same.
            self._delete_ours(GPU_NODES, "GpuNode", used=self._used),
        )
        for step in steps:
            async for line in step:
                yield line
        for name in KINDS if self._goals.crds else ():
            if self._used and name == GPU_NODE_KIND:
                yield f"kept the CRD {name}: its objects say which vGPUs VMs use"
                continue
            if (deleted := await retried(partial(self._delete_kind, name), self._clock)) is not None:
                yield deleted

    async def _schedules_part(self) -> SchedulesPart | None:
        """Return what removes the marks of VgpuSchedules, None where it is not installed and no node has one.

        Raises MissingPartError.
        """
        try:
            return load_schedules()
        except MissingPartError:
            if any(CORDONED_BY in node.metadata.labels for node in await self._list(NODES, Node)):
                raise
            return None

    async def _unmark_workers(self) -> AsyncIterator[str]:
        if (part := await self._schedules_part()) is not None:
            async for line in part.unmark_workers(self._client, self._clock):
                yield line

    async def _pods_with_shares(self) -> PodsByNode:
        """Return the pods with shares on the nodes of agents that a controller has deployed."""
        nodes = await self._list(NODES, Node)
        deployed = [node.metadata.name for node in nodes if node.metadata.labels.get(NODE_LABEL) == "true"]
        return by_node((await self._client.list(SHARING_PODS)).items, deployed) if deployed else {}

    async def _remove_labels(self, *, agents_gone: bool) -> AsyncIterator[str]:
        goals = self._goals
        for node in await self._list(NODES, Node):
            name = node.metadata.name
            keys = left_of(node.metadata, used=name in self._used, agents_gone=agents_gone, beside=goals.beside)
            if (patch := patch_of([keys], node.metadata)) is not None:
                await retried(partial(self._client.patch, NODES, name, patch, PatchType.MERGE, Node), self._clock)
                gone = sorted({**patch.metadata.labels, **patch.metadata.annotations})
                yield f"node {name}: removed {', '.join(gone)}"

    async def _delete_operands(self, *collections: Resource) -> AsyncIterator[str]:
        for resource in collections:
            for found in await self._list(resource, AnyObject, labelled=OPERAND_LABEL):
                name = found.metadata.name
                if self._used and found.metadata.labels.get(OPERAND_LABEL) == OperandName.VGPU_MANAGER:
                    nodes = ", ".join(sorted(self._used))
                    yield f"kept {resource.plural} {name}: VMs use vGPUs on {nodes}; delete it after they end"
                    continue
                await self._delete(resource, found, labelled=OPERAND_LABEL)
                yield f"deleted {resource.plural} {name}"

    async def _wait_for_agents(self) -> AsyncIterator[str]:
        """Wait until no agent and no discoverer runs: both label their node again, and an agent creates its GpuNode."""
        deadline_s = self._clock.monotonic_s() + GONE_WITHIN_S
        while remaining := [pod for pod in await self._list(pods(self._goals.namespace), Pod) if _writes_again(pod)]:
            if self._clock.monotonic_s() > deadline_s:
                names = ", ".join(f"{pod.metadata.name} on {pod.spec.node_name}" for pod in remaining)
                raise NotDeletedError(
                    f"pods of agents still exist after {GONE_WITHIN_S:g} s: {names}; run gpuvirt uninstall again"
                )
            await self._clock.sleep(POLL_S)
        yield "no agent runs any more"

    async def _revert_kubevirt(self) -> AsyncIterator[str]:
        """Revert gpuvirt's entries in KubeVirt's configuration, and delete their history."""
        async for line in KubeVirtUndoer(self._client, self._clock, self._gpu_nodes).run():
            yield line
        kept = config_maps(self._goals.namespace)
        for found in await self._list(kept, AnyObject):
            if found.metadata.name == HISTORY:
                await self._delete(kept, found)
                yield f"deleted configmaps {HISTORY}"

    async def _delete_ours(
        self, resource: Resource, kind: str, *, labelled: str = "", used: frozenset[str] = frozenset()
    ) -> AsyncIterator[str]:
        for found in await self._list(resource, AnyObject, labelled=labelled):
            name = found.metadata.name
            if name in used:
                yield f"kept {kind} {name}: VMs use vGPUs there; delete it with the vGPU manager after they end"
                continue
            await self._delete(resource, found, labelled=labelled)
            yield f"deleted {kind} {name}"

    async def _delete_kind(self, name: str) -> str | None:
        with suppress(NotFoundError):
            found = await self._client.get(DEFINITIONS, name, Definition)
            if not is_ours(found):
                return f"kept the CRD {name}, which belongs to another product"
            await self._client.delete(DEFINITIONS, name, found.metadata.uid)
            return f"deleted the CRD {name}, and all its objects"
        return None

    async def _list(self, resource: Resource, shape: type[T], *, labelled: str = "") -> tuple[T, ...]:
        """Return the objects of a collection; none if the kind is not installed."""
        try:
            return (await self._client.list(Collection(resource, shape, labelled=labelled))).items
        except NotFoundError:
            return ()

    async def _delete(self, resource: Resource, found: KubernetesObject, *, labelled: str = "") -> None:
        """Delete an object, and one with the labels that was created in its place meanwhile."""
        name = found.metadata.name
        with suppress(NotFoundError):
            try:
                await self._client.delete(resource, name, found.metadata.uid)
            except ConflictError:
                await retried(
                    partial(self._delete_again, Collection(resource, AnyObject, name, labelled=labelled)), self._clock
                )

    async def _delete_again(self, collection: Collection[AnyObject]) -> None:
        for found in (await self._client.list(collection)).items:
            await self._client.delete(collection.resource, found.metadata.name, found.metadata.uid)
