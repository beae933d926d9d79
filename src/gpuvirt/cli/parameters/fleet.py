"""The options by which a command shows nodes of a cluster in place of this host."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from typer.models import OptionInfo

from gpuvirt.cli.parameters import apiserver, completion, options
from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import NotFoundError
from gpuvirt.kube.kinds.core import AnyObject
from gpuvirt.kube.kinds.gpunode import GPU_NODES, GpuNode
from gpuvirt.kube.resources import NODES, Collection
from gpuvirt.model.inventory.nearness import nearest

NO_GPU_NODE = (
    "expected a node with an agent (kubectl get gpunodes); gpuvirt install check shows by which label a node gets one"
)


def read_gpu_node(credentials: Credentials, node: NodeName) -> GpuNode:
    """Return the GpuNode of a node; raise ConfigError if there is none, ApiError."""
    (found,) = asyncio.run(_read(Client(credentials), node, ""))
    return found


async def selected_nodes(client: Client, selector: str) -> frozenset[str] | None:
    """Return the names of the nodes with the labels of a selector, None without one; raises ApiError.

    It says on stderr, as kubectl does, that no node has the labels: an empty list alone reads as nodes without GPUs.
    """
    if not selector:
        return None
    nodes = await client.list(Collection(NODES, AnyObject, labelled=selector))
    if not nodes.items:
        print(f"gpuvirt: no node has the labels {selector}", file=sys.stderr)
    return frozenset(node.metadata.name for node in nodes.items)


async def _read(client: Client, node: NodeName | None, selector: str) -> tuple[GpuNode, ...]:
    if node is not None:
        with suppress(NotFoundError):
            return (await client.get(GPU_NODES, node, GpuNode),)
    found = await _list(client)
    if node is None:
        chosen = await selected_nodes(client, selector)
        return tuple(gpu_node for gpu_node in found if chosen is None or gpu_node.metadata.name in chosen)
    named = tuple(gpu_node for gpu_node in found if gpu_node.metadata.name == node)
    if not named:
        near = nearest(node, [gpu_node.metadata.name for gpu_node in found])
        hint = f"did you mean {near}?" if near is not None else NO_GPU_NODE
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
AllNodesOption = Annotated[bool, typer.Option("--all-nodes", help="Show all nodes of the cluster, by their GpuNodes.")]


def _note_old_spelling(asked: bool) -> bool:
    if asked:
        print("gpuvirt: use --all-nodes; -A means all namespaces in kubectl, and nodes have none", file=sys.stderr)
    return asked


OldAllNodesOption = Annotated[bool, typer.Option("-A", hidden=True, callback=_note_old_spelling)]
"""The first spelling of --all-nodes, which scripts have."""


def selector_option(objects: str) -> OptionInfo:
    """Return the option of the labels that listed objects have."""
    text = f"Show only {objects} with these labels, as in kubectl: key=value,key."
    found: OptionInfo = typer.Option("--selector", "-l", metavar="LABELS", help=text)
    return found


SelectorOption = Annotated[str, selector_option("nodes")]
ClusterFile = Annotated[
    Path | None,
    options.cluster_file(
        "Kubeconfig for --node and --all-nodes. Default: KUBECONFIG, the pod's service account, or"
        f" ~/{apiserver.DEFAULT_KUBECONFIG}."
    ),
]


def asked_nodes(
    node: str | None, kubeconfig: Path | None, context: str, *, every: bool, selector: str, watch: bool
) -> Callable[[], Awaitable[tuple[GpuNode, ...]]] | None:
    """Return the reader of the GpuNodes that the options name, None for this host; raise ConfigError.

    The reader raises ConfigError, ApiError.
    """
    if selector and not every:
        raise ConfigError("is for --all-nodes", where="--selector")
    if node is not None and every:
        raise ConfigError("expected one of --node and --all-nodes", where="--node")
    if node is None and not every:
        given = {"--kubeconfig": kubeconfig, "--context": context, "--watch": watch}
        if useless := next((option for option, value in given.items() if value), None):
            raise ConfigError("is for --node and --all-nodes", where=useless)
        return None
    client, name = Client(apiserver.asked_credentials(kubeconfig, context)), apiserver.node_name_of(node, "--node")
    return lambda: _read(client, name, selector)
