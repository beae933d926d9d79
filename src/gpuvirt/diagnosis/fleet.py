"""Reads the GpuNodes of a cluster, or of one of its nodes, as people ask for them."""

import asyncio
from contextlib import suppress

from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.collection import Collection
from gpuvirt.kube.failures import NotFoundError
from gpuvirt.kube.kinds.gpunode import GPU_NODES, GpuNode
from gpuvirt.model.inventory.nearness import nearest


def read_gpu_nodes(credentials: Credentials, node: NodeName | None = None) -> tuple[GpuNode, ...]:
    """Return the GpuNode of a node, or all by name; raise ConfigError if there is none, ApiError."""
    return asyncio.run(_read(Client(credentials), node))


async def _read(client: Client, node: NodeName | None) -> tuple[GpuNode, ...]:
    if node is not None:
        with suppress(NotFoundError):
            return (await client.get(GPU_NODES, node, GpuNode),)
    found = await _list(client)
    if node is None:
        return found
    named = tuple(gpu_node for gpu_node in found if gpu_node.metadata.name == node)
    if not named:
        near = nearest(node, [gpu_node.metadata.name for gpu_node in found])
        hint = f"did you mean {near}?" if near is not None else "expected a node with an agent (kubectl get gpunodes)"
        raise ConfigError(f"node {node} has no GpuNode; {hint}", where="--node")
    return named


async def _list(client: Client) -> tuple[GpuNode, ...]:
    try:
        found = (await client.list(Collection(GPU_NODES, GpuNode))).items
    except NotFoundError as error:
        message = "the cluster has no kind GpuNode, so gpuvirt is not installed there; expected another --context"
        raise ConfigError(message, where="--kubeconfig") from error
    return tuple(sorted(found, key=lambda gpu_node: gpu_node.metadata.name))
