"""The agent's tasks at the API server: the objects it watches, the objects it writes, and problems with the server."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import TypeVar

import msgspec

from gpuvirt.agent.claims.publishing import Publishing
from gpuvirt.agent.cluster import nodelabels
from gpuvirt.agent.cluster.claimslices import SliceKeeper, read_claim
from gpuvirt.agent.cluster.gpunode import GpuNodeKeeper, SpecListener, observe_gpu_node, observe_no_spec
from gpuvirt.agent.cluster.keeping import SPREAD_S, KeeperDependencies, ObservedObject, ReportOutcome
from gpuvirt.agent.cluster.nodeagent import NodeAgent
from gpuvirt.agent.cluster.nodelabels import OF_VGPUS, OF_WORKLOAD, LabelClaim, NodeLabels, shared_claim, state_claim
from gpuvirt.agent.cluster.podshares import PodEvents, PodShareKeeper, RequestingPod, node_pods
from gpuvirt.agent.cluster.vgputypes import VgpuTypes
from gpuvirt.agent.known.kubeletrecord import PodInquiry
from gpuvirt.agent.shares.nodeshares import NodeShares
from gpuvirt.clock import Clock, Signal
from gpuvirt.facts.ids import ConfigMapName, Namespace, NodeName, PodUid, ResourceName
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.failures import ApiError, ForbiddenError, NotFoundError, UnauthorizedError
from gpuvirt.kube.kinds.core import ENDED, STATIC_POD, ConfigMap, Container, Node, Pod, WholePod
from gpuvirt.kube.kinds.gpunode import GPU_NODES, GpuNode
from gpuvirt.kube.kinds.resourceclaims import slices_on
from gpuvirt.kube.labels import AGENT, PAUSED_FOR_VGPUS, VALIDATOR, DesiredLabels, deploy_label, driver_upgrade_in
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.reflector import Reflector, Waits
from gpuvirt.kube.resources import NODES, Collection, KubernetesObject, Metadata, Resource, config_maps, pods
from gpuvirt.loops.cell import Cell
from gpuvirt.model.allocation.recordhistory import PodRequests
from gpuvirt.model.desired.observed import OperandsObserved
from gpuvirt.model.offers.notice import Count
from gpuvirt.model.offers.ondemand.offer import PodEnds
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, nodeproblems
from gpuvirt.model.shares.demand import whole_amounts
from gpuvirt.shares.confinement import RUNTIME_CLASSES
from gpuvirt.tasks import keep_going


class Counts(msgspec.Struct, frozen=True):
    """The written part of a node's status."""

    allocatable: dict[str, str]


class Patch(msgspec.Struct, frozen=True):
    """A merge patch of a node's status."""

    status: Counts


def integer_counts(allocatable: Mapping[str, str]) -> Mapping[ResourceName, int]:
    """Return the integer counts of a node's status; other quantities do not come from a device plugin."""
    return {ResourceName(name): count for name, count in whole_amounts(allocatable).items()}


def patch_of(counts: Mapping[ResourceName, Count], observed: Mapping[ResourceName, int]) -> Patch | None:
    """Return the patch that corrects the counts of a node's status; None if they are right."""
    corrected = {name: count.corrected(observed.get(name, 0)) for name, count in counts.items()}
    wrong: dict[str, str] = {name: str(count) for name, count in corrected.items() if count != observed.get(name, 0)}
    return Patch(Counts(wrong)) if wrong else None


class NodeCountsKeeper:
    """Writes the agent's resource counts to the node's status before the kubelet writes them itself.

    The scheduler uses `status.allocatable`, which the kubelet writes every ten seconds (nodeStatusUpdateFrequency).
    Other clients may write it too (Kubernetes: "Advertise Extended Resources for a Node"). The kubelet writes the same
    counts later.
    """

    def __init__(
        self,
        dependencies: KeeperDependencies,
        counts: Cell[Mapping[ResourceName, Count]],
        observe: Callable[[Mapping[ResourceName, int]], None],
    ) -> None:
        """`counts` are those that the status should have; `observe` gets those that it has."""
        self._dependencies = dependencies
        self._counts, self._observe = counts, observe
        self._known: ObservedObject[Node] = ObservedObject()
        self._due = Signal()

    def observe(self, delta: Delta[Node]) -> None:
        """Store the observed node. While it does not exist, nothing is written."""
        self._known.observe(delta.objects.get(self._dependencies.key))
        self._report_counts()
        self._due.set()

    def _report_counts(self) -> None:
        if self._known.item is not None:
            self._observe(integer_counts(self._known.item.status.allocatable))

    async def run(self, report: ReportOutcome) -> None:
        """Write the counts whenever they differ; `report` gets each error, and None after a success."""
        with self._counts.notifying(self._due):
            await self._dependencies.keep(self._lacking, self._write, report, self._due)

    def _lacking(self) -> Patch | None:
        node = self._known.item
        return patch_of(self._counts.get(), integer_counts(node.status.allocatable)) if node is not None else None

    async def _write(self, patch: Patch) -> None:
        client, name, before = self._dependencies.client, self._dependencies.node, self._known.latest
        self._known.answer(before, await client.patch(NODES, name, patch, PatchType.MERGE, Node, part="status"))
        self._report_counts()


RUNS = "true"
OPERAND_LABELS = deploy_label(AGENT), deploy_label(VALIDATOR)
"""The node selectors of NVIDIA's operands that must not run while vGPUs change."""
OPERAND_APPS = ("nvidia-sandbox-device-plugin-daemonset", "nvidia-sandbox-validator")
"""The value of `app` that the pods of the same operands have."""


def operand_labels(observed: Metadata, *, away: bool) -> DesiredLabels:
    """Return the labels that stop the operands, or that start them again."""
    before, then = (RUNS, PAUSED_FOR_VGPUS) if away else (PAUSED_FOR_VGPUS, RUNS)
    return DesiredLabels({label: then for label in OPERAND_LABELS if observed.labels.get(label) == before})


def operand_pods(namespace: str, node: str) -> Collection[Pod]:
    """Return the collection of the operands' pods on a node."""
    return Collection(pods(namespace), Pod, on_node=node, labelled=f"app in ({','.join(OPERAND_APPS)})")


def operand_claim(away: Cell[bool]) -> LabelClaim:
    """Return the claim of the labels that stop NVIDIA's operands while `away` is true, for a change of the vGPUs.

    Contract: NVIDIA's vgpu-device-manager. It sets the operands' labels to a value that their DaemonSets do not select,
    waits until the pods are gone, and restores the labels. A label other than `true` (`false`, absent, paused by
    another program) stays as it is. Here the labels follow the desired state at any moment, so that they are restored
    after a crash of the agent too, and if the pods did not go.
    """
    return LabelClaim(lambda observed: operand_labels(observed, away=away.get()), away.notifying)


def observed_of(labels: Mapping[str, str] | None, found: Iterable[Pod] | None) -> OperandsObserved | None:
    """Return the selected labels and the pods of the operands; None while labels or pods are unknown."""
    if labels is None or found is None:
        return None
    desired = tuple(label for label in OPERAND_LABELS if labels.get(label) == RUNS)
    return OperandsObserved(desired, tuple(sorted(f"{pod.metadata.namespace}/{pod.metadata.name}" for pod in found)))


PAUSE_S = 15.0
"""The shortest time between two lists."""


def requests_of(pod: WholePod) -> PodRequests:
    """Return the resources that a pod requests."""
    spec, status = pod.spec, pod.status
    return PodRequests(
        PodUid(pod.metadata.annotations.get(STATIC_POD, pod.metadata.uid)),
        pod.where,
        status.phase in ENDED,
        frozenset(_extended(*spec.containers, *spec.init_containers)),
        bool(spec.resource_claims) or bool(status.extended_resource_claim_status),
    )


def _extended(*containers: Container) -> Iterator[tuple[str, ResourceName]]:
    """Yield the extended resources of containers (IsExtendedResourceName in pkg/apis/core/v1/helper)."""
    for container in containers:
        quantities = {**container.resources.requests, **container.resources.limits}
        for name, quantity in quantities.items():
            if "/" in name and "kubernetes.io/" not in name and str(quantity) != "0":
                yield container.name, ResourceName(name)


async def answer_inquiry(inquiry: PodInquiry, dependencies: KeeperDependencies, report: ReportOutcome) -> None:
    """Answer each question for the node's pods, until cancelled; `report` gets each error, and None after a success."""
    pods = Collection(Resource("pods"), WholePod, on_node=dependencies.node)
    while True:
        await inquiry.asked.wait()
        number = inquiry.begin()
        try:
            listed = await dependencies.client.list(pods)
        except ApiError as error:
            report(error)
        else:
            report(None)
            inquiry.answer(number, [requests_of(pod) for pod in listed.items])
        await dependencies.clock.sleep(PAUSE_S)


T = TypeVar("T", bound=KubernetesObject)


class EndingPods:
    """Tells the agent which pods end, as the API server reports them.

    A pod that the API server lacks has ended only if the API server had it before, or if the ledger had it before the
    first list: the kubelet may start a pod before this watch reports it.
    """

    def __init__(self, on_demand_pods: Callable[[], frozenset[PodUid]], observe: Callable[[PodEnds], None]) -> None:
        """`on_demand_pods` returns the pods that have on-demand vGPUs."""
        self._on_demand_pods = on_demand_pods
        self._observe = observe
        self._seen = on_demand_pods()
        """The pods that exist, and those with on-demand vGPUs that are gone."""

    def observe(self, delta: Delta[RequestingPod]) -> None:
        """Record all pods of the node."""
        pods = {pod.kubelet_uid: pod for pod in delta.objects.values()}
        gone = self._seen - pods.keys()
        self._seen = (gone & self._on_demand_pods()) | pods.keys()
        ended = gone | {uid for uid, pod in pods.items() if pod.has_ended}
        self._observe(PodEnds(ended, frozenset(uid for uid, pod in pods.items() if pod.is_ending) - ended))


class ClusterSide(msgspec.Struct, frozen=True):
    """The agent's settings for the API server. Without it, the agent still observes, offers and allocates devices."""

    credentials: Credentials
    node: NodeName
    config_map: ConfigMapName | None
    """The ConfigMap with vGPU configs, in the credentials' namespace; None if the configs come from elsewhere."""
    gpu_nodes: bool = True
    """Whether the agent reads the spec and writes the status of its GpuNode, if that kind is installed."""
    labels_only: bool = False
    """Whether the agent keeps only the labels of vGPU types, and the annotations of shared GPUs."""
    operands: Namespace | None = None
    """The namespace of NVIDIA's operands that offer this agent's vGPUs; None if the agent offers devices itself."""

    async def run(self, agent: NodeAgent, clock: Clock) -> None:
        """Run all tasks until cancelled; a task that fails is started again."""
        async with asyncio.TaskGroup() as group:
            _Run(self, agent, clock, group).start()


class _Run:
    """The tasks of one run of a `ClusterSide`."""

    def __init__(self, side: ClusterSide, agent: NodeAgent, clock: Clock, group: asyncio.TaskGroup) -> None:
        self._side = side
        self._agent = agent
        self._group = group
        random = Random()  # noqa: S311  it spreads the requests of agents over time, and is no secret
        self._dependencies = KeeperDependencies(Client(side.credentials), side.node, clock, random)
        self._labels: Mapping[str, str] | None = None
        self._pods: tuple[Pod, ...] | None = None
        self._types = VgpuTypes(self._dependencies, agent.views)
        self._slices: SliceKeeper | None = None
        self._noted = Signal()
        """Set when the node was observed."""

    def start(self) -> None:
        """Start the tasks."""
        side, agent = self._side, self._agent
        claims = [shared_claim(agent.views), self._types.claim]
        if not side.labels_only:
            claims += [state_claim(agent.reports.vgpus, OF_VGPUS), state_claim(agent.reports.workload, OF_WORKLOAD)]
        if side.operands is not None:
            self._follow_operands(side.operands)
            claims.append(operand_claim(agent.observations.operands_away))
        self._keep_node(claims)
        if side.config_map is not None:
            self._follow_configs(side.config_map)
        if side.gpu_nodes:
            self._keep_gpu_node()
        self._follow_pods(agent.shares)
        if agent.preparing is not None and agent.publishing is not None and not side.labels_only:
            agent.preparing.read = partial(read_claim, self._dependencies.client)
            self._publish(agent.publishing)
        if not side.labels_only:
            report = self._reporter("pods of the node", "to list the pods of its node")
            self._start("pods of the node", lambda: answer_inquiry(agent.pod_inquiry, self._dependencies, report))

    def _keep_node(self, claims: Sequence[LabelClaim]) -> None:
        node_labels, key, agent = NodeLabels(self._dependencies), self._dependencies.key, self._agent
        take_request = nodelabels.observe_node(self._agent.observations.take_request, key)
        counts = None
        if agent.node_counts is not None:
            counts = NodeCountsKeeper(self._dependencies, agent.node_counts, agent.observations.observe_node_counts)

        def observe(delta: Delta[Node]) -> None:
            node = delta.objects.get(key)
            self._labels = node.metadata.labels if node is not None else None
            if node is not None and self._slices is not None:
                self._slices.observe_node(node.metadata.uid)
            if node is not None:
                self._types.observe_node(node.metadata)
                self._noted.set()
            if node is not None and self._agent.shares is not None:
                runtime = node.status.node_info.container_runtime_version
                self._agent.shares.observe_node(runtime, driver_upgrade_in(node.metadata.labels))
            self._report_operands()
            take_request(delta)
            node_labels.observe(delta)
            if counts is not None:
                counts.observe(delta)

        self._follow("node", Collection(NODES, Node, key.name), observe, self._reporter("node", "to read its node"))
        label = self._reporter("state", "to label its node")
        self._start("state", lambda: node_labels.run(claims, label))
        if counts is not None:
            report = self._reporter("counts", "to patch its node's status")
            self._start("counts", lambda: counts.run(report))

    def _keep_gpu_node(self) -> None:
        """Follow the node's GpuNode, and keep its status; a cluster without that kind has no desired state in it."""
        keeper, key = GpuNodeKeeper(self._dependencies), self._dependencies.key
        listener = SpecListener(lambda: self._agent.observations.desired, self._agent.observations.take_request)
        take_request, report = observe_gpu_node(listener, key), self._reporter("gpunode", "to read its GpuNode")

        def observe(delta: Delta[GpuNode]) -> None:
            self._agent.observations.observe_kind(exists=True)
            take_request(delta)
            keeper.observe(delta)
            self._types.observe_gpu_node(delta.objects.get(key))

        def observe_error(error: ApiError | None) -> None:
            if isinstance(error, NotFoundError | ForbiddenError):
                observe_no_spec(listener)
            if isinstance(error, NotFoundError):
                self._agent.observations.observe_kind(exists=False)
            report(None if isinstance(error, NotFoundError) else error)

        self._follow("gpunode", Collection(GPU_NODES, GpuNode, key.name), observe, observe_error)
        status = self._reporter("gpunode status", "to write its GpuNode's status")
        memory = self._agent.shares.shown if self._agent.shares is not None else None
        self._start("gpunode status", lambda: keeper.run(self._agent.views, status, memory))

    def _follow_pods(self, shares: NodeShares | None) -> None:
        """Follow the node's pods from the first time that GPUs are shared, or vGPUs are offered on demand."""
        followers: list[Callable[[Delta[RequestingPod]], None]] = [self._types.observe_pods]
        followers.append(
            EndingPods(
                lambda: self._agent.observations.on_demand_pods, self._agent.observations.observe_pod_ends
            ).observe
        )
        if shares is not None:
            followers.append(self._keep_shares(shares))
        reflector = self._reflector(node_pods(self._dependencies.node))
        report = self._reporter("pods", "to watch the pods of its node")

        def observe(delta: Delta[RequestingPod]) -> None:
            for follower in followers:
                follower(delta)

        async def follow() -> None:
            await self._until(lambda: self._types.in_use or (shares is not None and shares.in_use), self._noted, shares)
            await reflector.run(observe, report)

        self._start("pods", follow)
        types = self._reporter("vgpu types", "to write events about its GpuNode")
        self._start("vgpu types", lambda: self._types.run(types))

    async def _until(self, met: Callable[[], bool], changed: Signal, shares: NodeShares | None = None) -> None:
        """Wait until a condition holds: the agent's views and shares may change it, and what sets `changed`."""
        with ExitStack() as stack:
            stack.enter_context(self._agent.views.notifying(changed))
            if shares is not None:
                stack.enter_context(shares.notifying(changed))
            while not met():
                await changed.wait()

    def _publish(self, publishing: Publishing) -> None:
        """Publish GPUs for claims from the first time that the node has some."""
        self._slices = keeper = SliceKeeper(self._dependencies, publishing)
        reflector = self._reflector(slices_on(self._dependencies.node))
        report = self._reporter("claims", "to publish GPUs for claims (DRA)")
        problem = partial(self._agent.reports.problem, "claims published")

        async def keep(run: Callable[[], Awaitable[None]]) -> None:
            await self._until(lambda: publishing.in_use, Signal())
            await run()

        self._start("slices", lambda: keep(lambda: reflector.run(keeper.observe, report)))
        self._start("claims", lambda: keep(lambda: keeper.run(report, problem)))

    def _keep_shares(self, shares: NodeShares) -> Callable[[Delta[RequestingPod]], None]:
        """Keep the annotations of pods with shares, and write events; return what takes the node's pods."""
        keeper = PodShareKeeper(self._dependencies, shares)
        written = self._reporter("shares", "to write the GPUs of a pod")
        self._start("shares", lambda: keeper.run(written))
        classes, changed = self._reflector(RUNTIME_CLASSES), Signal()
        unlisted = self._reporter("RuntimeClasses", "to list RuntimeClasses")

        async def follow_classes() -> None:
            with shares.state.notifying(changed):
                while not shares.state.get().published.enforcement.is_limit:
                    await changed.wait()
            await classes.run(keeper.observe_classes, unlisted)

        self._start("RuntimeClasses", follow_classes)
        events = PodEvents(self._dependencies, shares.refusals, shares.pods)
        unwritten = self._reporter("events", "to write events about pods")
        self._start("pod events", lambda: events.run(unwritten))
        return keeper.observe

    def _follow_configs(self, name: ConfigMapName) -> None:
        namespace = self._side.credentials.namespace
        observe = nodelabels.observe_config_map(self._agent.observations.take_request, ObjectKey(namespace, name))
        report = self._reporter("config map", f"to read the ConfigMap {namespace}/{name}")
        self._follow("config map", Collection(config_maps(namespace), ConfigMap, name), observe, report)

    def _follow_operands(self, namespace: Namespace) -> None:
        def observe(delta: Delta[Pod]) -> None:
            self._pods = tuple(delta.objects.values())
            self._report_operands()

        report = self._reporter("operands", f"to list the operands' pods in namespace {namespace}")
        self._follow("operands", operand_pods(namespace, self._dependencies.node), observe, report)

    def _report_operands(self) -> None:
        if self._side.operands is not None:
            self._agent.observations.observe_operands(observed_of(self._labels, self._pods))

    def _follow(
        self, who: str, collection: Collection[T], observe: Callable[[Delta[T]], None], report: ReportOutcome
    ) -> None:
        reflector = self._reflector(collection)
        self._start(who, lambda: reflector.run(observe, report))

    def _reflector(self, collection: Collection[T]) -> Reflector[T]:
        parts = self._dependencies
        return Reflector(parts.client, collection, parts.clock, parts.random, waits=Waits(spread_s=SPREAD_S))

    def _start(self, who: str, run: Callable[[], Awaitable[None]]) -> None:
        self._group.create_task(keep_going(f"cluster: {who}", run, self._dependencies.clock))

    def _reporter(self, who: str, what: str) -> ReportOutcome:
        return lambda error: self._agent.reports.problem(f"cluster: {who}", problem_of(error, what))


def problem_of(error: ApiError | None, what: str) -> Reason | None:
    """Return the problem that an error makes, None without an error; `what` is the agent's use of the API server."""
    if error is None:
        return None
    if isinstance(error, ForbiddenError | UnauthorizedError):
        return Reason(
            ReasonCode.API_FORBIDDEN,
            "the API server",
            f"does not permit the agent {what}; the agent tries again and changes nothing until then",
            (Seen("", str(error)),),
            "give the agent's service account the roles of deploy/node.yaml, and for claims (DRA) those of"
            " deploy/claims.yaml (chart: dra.enabled)",
        )
    return nodeproblems.not_answered(
        "the API server",
        f"does not answer the agent, which needs it for {what}; the agent tries again and changes nothing until then",
        Seen("", str(error)),
    )
