"""Reads the objects from the API server that `gpuvirt why node/NAME` decides from."""

import asyncio

from gpuvirt.cluster.access.credentials import Credentials
from gpuvirt.cluster.client import Client, Collection
from gpuvirt.cluster.failures import ForbiddenError, NotFoundError
from gpuvirt.cluster.kinds import core
from gpuvirt.cluster.kinds.core import ENDED
from gpuvirt.cluster.kinds.gpunode import GPU_NODES, GpuNode
from gpuvirt.cluster.resources import NODES, Resource
from gpuvirt.cluster.vms import states
from gpuvirt.errors import ConfigError
from gpuvirt.model.doctor.vms.nodeexplanation import NodeEvidence
from gpuvirt.model.doctor.vms.vmevidence import PodSeen
from gpuvirt.model.inventory.nearness import nearest


def ask_node(credentials: Credentials, name: str, units: str) -> NodeEvidence:
    """Return the evidence about a node; raise ConfigError if it does not exist, ApiError."""
    return asyncio.run(_ask(Client(credentials), name, units))


async def _ask(client: Client, name: str, units: str) -> NodeEvidence:
    try:
        node = await client.get(NODES, name, core.Node)
    except NotFoundError as error:
        names = [found.metadata.name for found in (await client.list(Collection(NODES, core.AnyObject))).items]
        near = nearest(name, names)
        hint = f"did you mean node/{near}?" if near is not None else "expected a node (kubectl get nodes)"
        raise ConfigError(f"the cluster has no node {name}; {hint}", where="gpuvirt why") from error
    gpu_node, pods = await asyncio.gather(_gpu_node(client, name), _pods(client))
    return NodeEvidence(states.node_seen(node, gpu_node), pods, units)


async def _gpu_node(client: Client, name: str) -> GpuNode | None:
    try:
        return await client.get(GPU_NODES, name, GpuNode)
    except NotFoundError:
        return None


async def _pods(client: Client) -> tuple[PodSeen, ...] | None:
    try:
        found = (await client.list(Collection(Resource("pods"), core.RequestingPod))).items
    except ForbiddenError:
        return None
    return tuple(states.pod_seen(pod) for pod in found if pod.status.phase not in ENDED)
