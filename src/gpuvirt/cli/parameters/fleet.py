"""The options by which a command shows nodes of a cluster in place of this host."""

from pathlib import Path
from typing import Annotated

import typer

from gpuvirt.cli.parameters import apiserver, completion, options
from gpuvirt.diagnosis.fleet import read_gpu_nodes
from gpuvirt.errors import ConfigError
from gpuvirt.kube.kinds.gpunode import GpuNode

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
