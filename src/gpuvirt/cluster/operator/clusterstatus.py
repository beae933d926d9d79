"""The state of a cluster's GPU nodes, asked once: what `gpuvirt status` prints."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from gpuvirt.cluster.access.credentials import Credentials
from gpuvirt.cluster.client import Client, Collection
from gpuvirt.cluster.failures import ApiError, ForbiddenError, NotFoundError
from gpuvirt.cluster.kinds.clusterpolicy import CLUSTER_POLICIES, ClusterPolicy, StoredPolicy
from gpuvirt.cluster.kinds.core import Node, Pod
from gpuvirt.cluster.kinds.gpunode import GPU_NODES, GpuNode
from gpuvirt.cluster.labels import OPERAND_LABEL, OPERANDS_OFF_ANNOTATION
from gpuvirt.cluster.operator.deployment.drift import StoredObject
from gpuvirt.cluster.operator.nodes.placement import placement_of
from gpuvirt.cluster.operator.nodes.problems import Deployer
from gpuvirt.cluster.operator.policy import policies
from gpuvirt.cluster.operator.policy.invalidstates import InvalidValue, of_node
from gpuvirt.cluster.operator.policy.policies import Choice
from gpuvirt.cluster.operator.policy.status import READY
from gpuvirt.cluster.operator.report import Row, rows
from gpuvirt.cluster.resources import NODES, KubernetesObject, Resource, daemon_sets, pods
from gpuvirt.model.reasons import ReasonCode

T = TypeVar("T", bound=KubernetesObject)


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """What there is to say."""

    policy: str | None
    """The ClusterPolicy that counts; None where there is none."""
    state: str | None
    """What it says of itself: `ready`."""
    reason: str
    """Why: a code, and what it is about."""
    components: tuple[Row, ...]
    invalid: tuple[InvalidValue, ...] = ()
    """What is invalid of nodes' desired state; of the policy's, `reason` says it."""

    @property
    def well(self) -> bool:
        """Whether nothing is amiss."""
        return self.state == "ready" and not self.invalid and all(one.ready for one in self.components)


async def ask(credentials: Credentials, namespace: str) -> ClusterStatus:
    """Return the state; raises ApiError."""
    client = Client(credentials)

    async def listed(
        resource: Resource, shape: type[T], without: tuple[type[ApiError], ...] = (NotFoundError,)
    ) -> tuple[T, ...]:
        try:
            return (await client.list(Collection(resource, shape))).items
        except without:  # a kind that is not installed
            return ()

    found, nodes, gpu_nodes, there, sets = await asyncio.gather(
        listed(CLUSTER_POLICIES, StoredPolicy),
        listed(NODES, Node),
        listed(GPU_NODES, GpuNode),
        listed(pods(namespace), Pod),
        listed(daemon_sets(namespace), StoredObject, (NotFoundError, ForbiddenError)),
    )
    choice = policies.choose(found)
    said = choice.stored.status if choice is not None else None
    ready = next((one for one in said.conditions if one.type == READY), None) if said is not None else None
    by_name = {one.metadata.name: one for one in gpu_nodes}
    deployer = None
    if choice is not None and isinstance(choice.policy, ClusterPolicy):
        beside = any(OPERANDS_OFF_ANNOTATION in one.metadata.annotations for one in nodes)
        deployer = Deployer(
            policies.beside(choice.policy) if beside else choice.policy,
            has_image=ready is None or ready.reason != ReasonCode.IMAGE_UNKNOWN,
            has_daemon_sets=any(OPERAND_LABEL in one.metadata.labels for one in sets),
            beside=beside,
        )
    return ClusterStatus(
        policy=choice.stored.metadata.name if choice is not None else None,
        state=str(said.state) if said is not None and said.state is not None else None,
        reason=ready.why if ready is not None else "",
        components=rows(nodes, by_name, there, deployer),
        invalid=tuple(_invalid(choice, nodes, by_name)),
    )


def _invalid(choice: Choice | None, nodes: Iterable[Node], gpu_nodes: Mapping[str, GpuNode]) -> Iterator[InvalidValue]:
    """Yield what is invalid of nodes; without a policy that can be read, agents alone know."""
    policy = choice.policy if choice is not None and isinstance(choice.policy, ClusterPolicy) else None
    for node in sorted(nodes, key=lambda one: one.metadata.name):
        name, labels = node.metadata.name, node.metadata.labels
        gpu_node = gpu_nodes.get(name)
        placement = placement_of(labels, gpu_node, policies.defaults_of(policy)) if policy is not None else None
        if placement is None or placement.counts:
            yield from of_node(name, placement, gpu_node)
