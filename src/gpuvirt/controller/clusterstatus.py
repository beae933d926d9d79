"""The state of a cluster's GPU nodes, read once from the API server for `gpuvirt status`."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import msgspec

from gpuvirt.controller.deployment.drift import StoredObject
from gpuvirt.controller.nodes.placement import placement_of
from gpuvirt.controller.nodes.problems import Deployer
from gpuvirt.controller.policy import policies
from gpuvirt.controller.policy.invalidstates import InvalidValue, of_node
from gpuvirt.controller.policy.status import READY
from gpuvirt.controller.report import Row, rows
from gpuvirt.facts.ids import Namespace, parse_namespace
from gpuvirt.kube.client import Client
from gpuvirt.kube.collection import Collection
from gpuvirt.kube.failures import ApiError, ForbiddenError, NotFoundError
from gpuvirt.kube.kinds.clusterpolicy import CLUSTER_POLICIES, Choice, ClusterPolicy, StoredPolicy, choose
from gpuvirt.kube.kinds.core import Node, Pod
from gpuvirt.kube.kinds.gpunode import GPU_NODES, GpuNode
from gpuvirt.kube.labels import OPERAND_LABEL, OPERANDS_OFF_ANNOTATION
from gpuvirt.kube.resources import NODES, KubernetesObject, Resource, daemon_sets, pods
from gpuvirt.model.reasons import ReasonCode

T = TypeVar("T", bound=KubernetesObject)


class ClusterStatus(msgspec.Struct, frozen=True):
    """The ClusterPolicy's state, the components of each GPU node, and invalid values."""

    policy: str | None
    """The name of the active ClusterPolicy; None without a ClusterPolicy."""
    state: str | None
    """`status.state` of this ClusterPolicy: `ready`."""
    reason: str
    """Code and message of the policy's `Ready` condition."""
    components: tuple[Row, ...]
    invalid: tuple[InvalidValue, ...] = ()
    """Invalid values of nodes' desired state; `reason` has those of the policy."""
    namespace: str = ""
    """The namespace of the controller and its operands."""
    is_installed: bool = True
    """Whether the API server has the kind ClusterPolicy."""

    @property
    def verdict(self) -> str:
        """Whether all is well, in one line."""
        if not self.is_installed:
            return "Not installed: this cluster has no kind ClusterPolicy."
        if self.policy is None:
            return "Not ready: there is no ClusterPolicy, so the controller deploys nothing."
        nodes = {row.node for row in self.components}
        where = (
            f"gpuvirt in namespace {self.namespace}, {len(nodes)} {'node' if len(nodes) == 1 else 'nodes'} with GPUs"
        )
        if self.well:
            return f"Ready: {where}"
        late = {row.node for row in self.components if not row.ready}
        parts = [f"ClusterPolicy {self.policy} is {self.state or 'not seen by a controller yet'}"]
        parts += [f"{len(late)} of {len(nodes)} nodes not ready"] if late else []
        parts += (
            [f"{len(self.invalid)} invalid {'value' if len(self.invalid) == 1 else 'values'}"] if self.invalid else []
        )
        return f"Not ready: {', '.join(parts)}; {where}"

    @property
    def well(self) -> bool:
        """Whether the policy and all components are ready, and no value is invalid."""
        return self.state == "ready" and not self.invalid and all(row.ready for row in self.components)


async def ask(client: Client, namespace: Namespace) -> ClusterStatus:
    """Read the state from the API server; raises ApiError.

    The controller writes its namespace into the ClusterPolicy. Until it has, the operands are those in `namespace`.
    """

    async def listed(
        resource: Resource, shape: type[T], without: tuple[type[ApiError], ...] = (NotFoundError,)
    ) -> tuple[T, ...]:
        try:
            return (await client.list(Collection(resource, shape))).items
        except without:  # the kind is not installed
            return ()

    try:
        found = (await client.list(Collection(CLUSTER_POLICIES, StoredPolicy))).items
    except NotFoundError:
        return ClusterStatus(None, None, "", (), is_installed=False)
    choice = choose(found)
    status = choice.stored.status if choice is not None else None
    reported = status.namespace if status is not None else ""
    namespace = parse_namespace(reported) if reported else namespace
    nodes, gpu_nodes, operand_pods, sets = await asyncio.gather(
        listed(NODES, Node),
        listed(GPU_NODES, GpuNode),
        listed(pods(namespace), Pod),
        listed(daemon_sets(namespace), StoredObject, (NotFoundError, ForbiddenError)),
    )
    conditions = status.conditions if status is not None else ()
    ready = next((condition for condition in conditions if condition.type == READY), None)
    by_name = {gpu_node.metadata.name: gpu_node for gpu_node in gpu_nodes}
    deployer = None
    if choice is not None and isinstance(choice.policy, ClusterPolicy):
        beside = any(OPERANDS_OFF_ANNOTATION in node.metadata.annotations for node in nodes)
        deployer = Deployer(
            policies.beside(choice.policy) if beside else choice.policy,
            has_image=ready is None or ready.reason != ReasonCode.IMAGE_UNKNOWN,
            has_daemon_sets=any(OPERAND_LABEL in daemon_set.metadata.labels for daemon_set in sets),
            beside=beside,
        )
    return ClusterStatus(
        policy=choice.stored.metadata.name if choice is not None else None,
        state=str(status.state) if status is not None and status.state is not None else None,
        reason=ready.why if ready is not None else "",
        components=rows(nodes, by_name, operand_pods, deployer),
        invalid=tuple(_invalid(choice, nodes, by_name)),
        namespace=namespace,
    )


def _invalid(choice: Choice | None, nodes: Iterable[Node], gpu_nodes: Mapping[str, GpuNode]) -> Iterator[InvalidValue]:
    """Yield the invalid values of nodes; without a valid policy, only those that agents report."""
    policy = choice.policy if choice is not None and isinstance(choice.policy, ClusterPolicy) else None
    for node in sorted(nodes, key=lambda node: node.metadata.name):
        name, labels = node.metadata.name, node.metadata.labels
        gpu_node = gpu_nodes.get(name)
        placement = placement_of(labels, gpu_node, policies.defaults_of(policy)) if policy is not None else None
        if placement is None or placement.counts:
            yield from of_node(name, placement, gpu_node)
