"""Which API server an agent speaks to, and as whom: from options, or from what the kubelet gives a pod."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuvirt.errors import ConfigError, InvalidIdError
from gpuvirt.facts.ids import ConfigMapName, Namespace, NodeName, parse_namespace, parse_node_name

if TYPE_CHECKING:
    from gpuvirt.apps.node import ClusterTask
    from gpuvirt.cluster.access.credentials import Credentials

log = logging.getLogger(__name__)

KUBECTLS = ".kube/config"
"""Where kubectl looks, below a person's home."""

NodeNameOption = Annotated[
    str | None,
    typer.Option(
        "--node-name",
        envvar=["GPUVIRT_NODE_NAME", "NODE_NAME"],
        metavar="NAME",
        help="The node's name in the cluster; without it no API server is asked.",
    ),
]
KubeConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig",
        envvar="KUBECONFIG",
        metavar="FILE",
        help="How to reach the API server, in one file or several (a:b); else as the service account of the pod.",
    ),
]
DemandedKubeConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig",
        envvar="KUBECONFIG",
        metavar="FILE",
        help="How to reach the API server, in one file or several (a:b); else as the service account of the pod,"
        f" or by ~/{KUBECTLS}.",
    ),
]
"""For commands that can't do without: what `demanded_credentials` takes."""

ContextOption = Annotated[
    str, typer.Option("--context", metavar="NAME", help="The context of the kubeconfig; else its current one.")
]

HomeOption = Annotated[
    str,
    typer.Option(
        "--namespace",
        "-n",
        envvar=["GPUVIRT_NAMESPACE", "OPERATOR_NAMESPACE"],
        metavar="NAME",
        help="Where the controller and what it deploys run; else that of the pod, or of the kubeconfig's context.",
    ),
]


def node_name_of(text: str | None) -> NodeName | None:
    """Return the node's name, None where there is none; raise ConfigError."""
    try:
        return parse_node_name(text) if text else None
    except InvalidIdError as error:
        raise ConfigError(str(error), where="--node-name") from error


def credentials_of(kubeconfig: Path | None, context: str = "") -> "Credentials | None":
    """Return how to reach the API server, None for a process in no pod that was not told. Raises ConfigError."""
    if kubeconfig is not None:
        from gpuvirt.cluster.access.kubecontext import from_kubeconfig

        return from_kubeconfig(kubeconfig, context)
    if context:
        raise ConfigError("is one of a kubeconfig's; expected --kubeconfig, too", where="--context")
    from gpuvirt.cluster.access.credentials import in_cluster

    return in_cluster(os.environ)  # noqa: TID251  the kubelet says there where the API server is


def demanded_credentials(kubeconfig: Path | None, context: str = "") -> "Credentials":
    """Return how to reach the API server: as a pod, or as kubectl does; raise ConfigError where nobody says it."""
    own = Path.home() / KUBECTLS
    if kubeconfig is None and context and own.exists():
        kubeconfig = own
    found = credentials_of(kubeconfig, context)
    if found is None and own.exists():
        found = credentials_of(own)
    if found is None:
        raise ConfigError(
            f"no API server: this is no pod with a service account's token, and no {own}; expected a kubeconfig",
            where="--kubeconfig",
        )
    return found


def asked_credentials(kubeconfig: Path | None, context: str = "") -> "Credentials":
    """Return how to reach the API server for an option that KUBECONFIG does not set; raise ConfigError."""
    named = os.environ.get("KUBECONFIG", "")  # noqa: TID251  a host's command asks no cluster because of it
    return demanded_credentials(kubeconfig or (Path(named) if named else None), context)


def home_of(namespace: str, credentials: "Credentials") -> Namespace:
    """Return where the controller and what it deploys run; raise ConfigError."""
    try:
        return parse_namespace(namespace or credentials.namespace)
    except InvalidIdError as error:
        raise ConfigError(str(error), where="--namespace") from error


def cluster_side(
    node: NodeName | None,
    kubeconfig: Path | None,
    config_map: ConfigMapName | None,
    operands: Namespace | None = None,
    context: str = "",
) -> "ClusterTask | None":
    """Return the agent's cluster side, None where it has none: no node, or no credentials. Raises ConfigError."""
    if node is None:
        return None
    from gpuvirt.cluster.agent.clusterside import ClusterSide

    found = credentials_of(kubeconfig, context)
    if found is None:
        log.info("no API server is asked: the pod has no service account's token, and there is no --kubeconfig")
        return None
    return ClusterSide(found, node, config_map, gpu_nodes=operands is None, operands=operands).run
