"""The options by which a command shows nodes of a cluster in place of this host."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from gpuvirt.cli.parameters import apiserver, completion, options
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


NodeOption = Annotated[
    str | None,
    typer.Option(
        "--node",
        metavar="NAME",
        autocompletion=completion.nodes,
        help="Show a node of the cluster, by its GpuNode, in place of this host.",
    ),
]
AllNodesOption = Annotated[
    bool, typer.Option("--all-nodes", "-A", help="Show all nodes of the cluster, by their GpuNodes.")
]
ClusterFile = Annotated[
    Path | None,
    options.cluster_file(
        "Kubeconfig for --node and -A. Default: KUBECONFIG, the pod's service account, or"
        f" ~/{apiserver.DEFAULT_KUBECONFIG}."
    ),
]


def asked_nodes(node: str | None, kubeconfig: Path | None, context: str, *, every: bool) -> tuple[GpuNode, ...] | None:
    """Return the GpuNodes that the options name, None for this host; raise ConfigError, ApiError."""
    if node is not None and every:
        raise ConfigError("expected one of --node and --all-nodes", where="--node")
    if node is None and not every:
        if kubeconfig is not None or context:
            raise ConfigError("is for --node and --all-nodes", where="--kubeconfig" if kubeconfig else "--context")
        return None
    return read_gpu_nodes(apiserver.asked_credentials(kubeconfig, context), apiserver.node_name_of(node, "--node"))
