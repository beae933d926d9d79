"""The agent's cluster side, put together: what it follows and reports, and why the API server does not serve it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol, TypeVar

from gpuvirt.clock import Clock
from gpuvirt.cluster.access.credentials import Credentials
from gpuvirt.cluster.agent import noderequests
from gpuvirt.cluster.agent.gpunode import SpecListener, observe_gpu_node, observe_no_spec
from gpuvirt.cluster.agent.gpunodekeeper import GpuNodeKeeper
from gpuvirt.cluster.agent.keeping import KeeperDependencies, Tell
from gpuvirt.cluster.agent.nodecounts import NodeCounts
from gpuvirt.cluster.agent.nodekeys import Claim, NodeKeys
from gpuvirt.cluster.agent.operands import observed_of, operand_claim, operand_pods
from gpuvirt.cluster.agent.statelabel import OF_VGPUS, OF_WORKLOAD, state_claim
from gpuvirt.cluster.cache import Delta
from gpuvirt.cluster.client import Client, Collection
from gpuvirt.cluster.failures import ApiError, ForbiddenError, NotFoundError, UnauthorizedError
from gpuvirt.cluster.kinds.core import ConfigMap, Node, Pod
from gpuvirt.cluster.kinds.gpunode import GPU_NODES, GpuNode
from gpuvirt.cluster.objects import ObjectKey
from gpuvirt.cluster.reflector import Reflector
from gpuvirt.cluster.resources import NODES, KubernetesObject, config_maps
from gpuvirt.facts.ids import ConfigMapName, Namespace, NodeName
from gpuvirt.model.desired.observed import NodeRequest, OperandsObserved, Progress
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import Reason, nodeproblems
from gpuvirt.node.loops.cell import Cell
from gpuvirt.node.published.notice import Notice
from gpuvirt.tasks import keep_going

T = TypeVar("T", bound=KubernetesObject)


class Follower(Protocol):
    """The agent, as far as it has to do with the cluster."""

    @property
    def desired(self) -> NodeRequest:
        """What it has heard, before a restart too."""
        ...

    @property
    def views(self) -> Cell[NodeView]:
        """The agent's picture of its node."""
        ...

    @property
    def vgpu_states(self) -> Cell[Progress | None]:
        """What its node is to say of its vGPUs; None: nothing."""
        ...

    @property
    def workload_states(self) -> Cell[Progress | None]:
        """What its node is to say of its GPUs."""
        ...

    @property
    def notice(self) -> Notice | None:
        """What the scheduler is to count; None where that is not this agent's to say."""
        ...

    @property
    def operands_away(self) -> Cell[bool]:
        """Whether programs that offer the same devices are to be away."""
        ...

    def take_request(self, delta: NodeRequest, /) -> None:
        """Take what is desired of the node; what `news` has not heard stays as it was."""
        ...

    def observe_kind(self, *, there: bool) -> None:
        """Take whether the cluster has the kind GpuNode; without it no controller can review names of resources."""
        ...

    def observe_operands(self, observed: OperandsObserved | None, /) -> None:
        """Take what is known of these programs, None where that is not enough."""
        ...

    def report_problem(self, who: str, problem: Reason | None, /) -> None:
        """Take what is wrong, None when nothing is any more."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterSide:
    """What the agent has to do with the API server; it does all else without."""

    credentials: Credentials
    node: NodeName
    config_map: ConfigMapName | None
    """Where vGPU configurations are, in the credentials' namespace; None where they come from elsewhere."""
    gpu_nodes: bool = True
    """Whether the agent obeys and reports in its GpuNode, where that kind is installed."""
    operands: Namespace | None = None
    """Where NVIDIA's operands run, beside which the agent carves; None for an agent that offers what it makes."""

    async def run(self, agent: Follower, clock: Clock) -> None:
        """Hear and tell for ever; what fails is started again by itself."""
        async with asyncio.TaskGroup() as group:
            _Run(self, agent, clock, group).start()


class _Run:
    """One run of a cluster side."""

    def __init__(self, side: ClusterSide, agent: Follower, clock: Clock, group: asyncio.TaskGroup) -> None:
        self._side = side
        self._agent = agent
        self._group = group
        random = Random()  # noqa: S311  it keeps agents apart, and no secrets
        self._dependencies = KeeperDependencies(Client(side.credentials), side.node, clock, random)
        self._labels: Mapping[str, str] | None = None
        self._pods: tuple[Pod, ...] | None = None

    def start(self) -> None:
        """Start its tasks."""
        side, agent = self._side, self._agent
        claims = [state_claim(agent.vgpu_states, OF_VGPUS), state_claim(agent.workload_states, OF_WORKLOAD)]
        if side.operands is not None:
            self._follow_operands(side.operands)
            claims.append(operand_claim(agent.operands_away))
        self._keep_node(claims)
        if side.config_map is not None:
            self._follow_configs(side.config_map)
        if side.gpu_nodes:
            self._keep_gpu_node()

    def _keep_node(self, claims: Sequence[Claim]) -> None:
        keys, key, notice = NodeKeys(self._dependencies), self._dependencies.key, self._agent.notice
        take_request = noderequests.observe_node(self._agent.take_request, key)
        counts = NodeCounts(self._dependencies, notice) if notice is not None else None

        def observe(delta: Delta[Node]) -> None:
            node = delta.objects.get(key)
            self._labels = node.metadata.labels if node is not None else None
            self._tell_operands()
            take_request(delta)
            keys.observe(delta)
            if counts is not None:
                counts.observe(delta)

        self._follow("node", Collection(NODES, Node, key.name), observe, self._told("node", "to read its node"))
        label = self._told("state", "to label its node")
        self._start("state", lambda: keys.run(claims, label))
        if counts is not None:
            told = self._told("counts", "to patch its node's status")
            self._start("counts", lambda: counts.run(told))

    def _keep_gpu_node(self) -> None:
        """Follow the node's GpuNode, and keep its status; a cluster without that kind wants nothing by it."""
        keeper, key = GpuNodeKeeper(self._dependencies), self._dependencies.key
        listener = SpecListener(lambda: self._agent.desired, self._agent.take_request)
        take_request, told = observe_gpu_node(listener, key), self._told("gpunode", "to read its GpuNode")

        def observe(delta: Delta[GpuNode]) -> None:
            self._agent.observe_kind(there=True)
            take_request(delta)
            keeper.observe(delta)

        def tell(error: ApiError | None) -> None:
            if isinstance(error, NotFoundError | ForbiddenError):
                observe_no_spec(listener)
            if isinstance(error, NotFoundError):
                self._agent.observe_kind(there=False)
            told(None if isinstance(error, NotFoundError) else error)

        self._follow("gpunode", Collection(GPU_NODES, GpuNode, key.name), observe, tell)
        status = self._told("gpunode status", "to write its GpuNode's status")
        self._start("gpunode status", lambda: keeper.run(self._agent.views, status))

    def _follow_configs(self, name: ConfigMapName) -> None:
        namespace = self._side.credentials.namespace
        observe = noderequests.observe_config_map(self._agent.take_request, ObjectKey(namespace, name))
        told = self._told("config map", f"to read the ConfigMap {namespace}/{name}")
        self._follow("config map", Collection(config_maps(namespace), ConfigMap, name), observe, told)

    def _follow_operands(self, namespace: Namespace) -> None:
        def observe(delta: Delta[Pod]) -> None:
            self._pods = tuple(delta.objects.values())
            self._tell_operands()

        told = self._told("operands", f"to list the operands' pods in namespace {namespace}")
        self._follow("operands", operand_pods(namespace, self._dependencies.node), observe, told)

    def _tell_operands(self) -> None:
        if self._side.operands is not None:
            self._agent.observe_operands(observed_of(self._labels, self._pods))

    def _follow(self, who: str, collection: Collection[T], observe: Callable[[Delta[T]], None], tell: Tell) -> None:
        reflector = Reflector(
            self._dependencies.client, collection, self._dependencies.clock, self._dependencies.random
        )
        self._start(who, lambda: reflector.run(observe, tell))

    def _start(self, who: str, run: Callable[[], Awaitable[None]]) -> None:
        self._group.create_task(keep_going(f"cluster: {who}", run, self._dependencies.clock))

    def _told(self, who: str, what: str) -> Tell:
        return lambda error: self._agent.report_problem(f"cluster: {who}", problem_of(error, what))


def problem_of(error: ApiError | None, what: str) -> Reason | None:
    """Return what is wrong, None where nothing is; `what` says what the API server is needed for."""
    if error is None:
        return None
    if isinstance(error, ForbiddenError | UnauthorizedError):
        return nodeproblems.api_forbidden(what, str(error))
    return nodeproblems.api_server_away(what, str(error))
