"""The state of a cluster's GPU nodes, asked once: what `gpuvirt status` prints."""

import asyncio
from dataclasses import dataclass
from typing import TypeVar

from gpuvirt.cluster.client import Client, Collection
from gpuvirt.cluster.credentials import Credentials
from gpuvirt.cluster.failures import NotFoundError
from gpuvirt.cluster.kinds.clusterpolicy import CLUSTER_POLICIES, StoredPolicy
from gpuvirt.cluster.kinds.gpunode import GPU_NODES, GpuNode
from gpuvirt.cluster.operator import policies
from gpuvirt.cluster.operator.report import Row, rows
from gpuvirt.cluster.operator.shapes import NodeObject, OperandPod
from gpuvirt.cluster.operator.status import READY
from gpuvirt.cluster.resources import NODES, KubernetesObject, Resource, pods

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

    @property
    def well(self) -> bool:
        """Whether nothing is amiss."""
        return self.state == "ready" and all(one.ready for one in self.components)


async def ask(credentials: Credentials, namespace: str) -> ClusterStatus:
    """Return the state; raises ApiError."""
    client = Client(credentials)

    async def listed(resource: Resource, shape: type[T]) -> tuple[T, ...]:
        try:
            return (await client.list(Collection(resource, shape))).items
        except NotFoundError:  # a kind that is not installed
            return ()

    found, nodes, gpu_nodes, there = await asyncio.gather(
        listed(CLUSTER_POLICIES, StoredPolicy),
        listed(NODES, NodeObject),
        listed(GPU_NODES, GpuNode),
        listed(pods(namespace), OperandPod),
    )
    choice = policies.choose(found)
    said = choice.stored.status if choice is not None else None
    ready = next((one for one in said.conditions if one.type == READY), None) if said is not None else None
    return ClusterStatus(
        policy=choice.stored.metadata.name if choice is not None else None,
        state=str(said.state) if said is not None and said.state is not None else None,
        reason=ready.why if ready is not None else "",
        components=rows(nodes, {one.metadata.name: one for one in gpu_nodes}, there),
    )
