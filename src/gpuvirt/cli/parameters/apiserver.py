"""The API server and the credentials of a command: from options, or from the pod's service account."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.models import OptionInfo

from gpuvirt.errors import ConfigError, InvalidIdError
from gpuvirt.facts.ids import ConfigMapName, Namespace, NodeName, parse_namespace, parse_node_name

if TYPE_CHECKING:
    from gpuvirt.agent.process import ClusterTask
    from gpuvirt.kube.access.credentials import Credentials

log = logging.getLogger(__name__)

DEFAULT_KUBECONFIG = ".kube/config"
"""kubectl's kubeconfig, below the user's home."""

NodeNameOption = Annotated[
    str | None,
    typer.Option(
        "--node-name",
        envvar=["GPUVIRT_NODE_NAME", "NODE_NAME"],
        metavar="NAME",
        help="The node's name in the cluster. Without it, the command uses no API server.",
    ),
]
KubeConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig",
        envvar="KUBECONFIG",
        metavar="FILE",
        help="One kubeconfig or several (a:b). Default: the pod's service account.",
    ),
]
DemandedKubeConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig",
        envvar="KUBECONFIG",
        metavar="FILE",
        help=f"One kubeconfig or several (a:b). Default: the pod's service account, else ~/{DEFAULT_KUBECONFIG}.",
    ),
]
"""The option of commands that need an API server; see `demanded_credentials`."""

ContextOption = Annotated[
    str, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig. Default: its current context.")
]


def own_namespace_option(default: str) -> OptionInfo:
    """Return the option of the controller's namespace; `default` says which one it is without the option."""
    found: OptionInfo = typer.Option(
        "--namespace",
        "-n",
        envvar=["GPUVIRT_NAMESPACE", "OPERATOR_NAMESPACE"],
        metavar="NAME",
        help=f"Namespace of the controller and its operands. Default: {default}.",
    )
    return found


OwnNamespaceOption = Annotated[str, own_namespace_option("the pod's, else that of the kubeconfig's context")]


def node_name_of(text: str | None, where: str = "--node-name") -> NodeName | None:
    """Return the node's name, None for an empty text; raise ConfigError for an invalid name."""
    try:
        return parse_node_name(text) if text else None
    except InvalidIdError as error:
        raise ConfigError(str(error), where=where) from error


def credentials_of(kubeconfig: Path | None, context: str = "") -> "Credentials | None":
    """Return the API server's credentials, None without a kubeconfig and outside a pod. Raises ConfigError."""
    if kubeconfig is not None:
        from gpuvirt.kube.access.kubecontext import from_kubeconfig

        return from_kubeconfig(kubeconfig, context)
    if context:
        raise ConfigError("names a context of a kubeconfig; expected --kubeconfig, too", where="--context")
    from gpuvirt.kube.access.credentials import in_cluster

    return in_cluster(os.environ)  # noqa: TID251  the kubelet puts the API server's address there


def needed_credentials(credentials: "Credentials | None") -> "Credentials":
    """Return credentials that were found; raise ConfigError for None."""
    if credentials is None:
        raise no_credentials()
    return credentials


def no_credentials(*more: str) -> ConfigError:
    """Return the error of a command that needs an API server; `more` has other places where it was looked for."""
    from gpuvirt.kube.access.credentials import SERVICE_ACCOUNT

    searched = ("--kubeconfig", "the variable KUBECONFIG", f"a pod's service account in {SERVICE_ACCOUNT}", *more)
    return ConfigError(
        f"no API server: found neither {' nor '.join(searched)}; expected a kubeconfig", where="--kubeconfig"
    )


def demanded_credentials(kubeconfig: Path | None, context: str = "") -> "Credentials":
    """Return the API server's credentials, of the pod or as kubectl finds them; raise ConfigError without any."""
    default = Path.home() / DEFAULT_KUBECONFIG
    if kubeconfig is None and context and default.exists():
        kubeconfig = default
    credentials = credentials_of(kubeconfig, context)
    if credentials is None and default.exists():
        credentials = credentials_of(default)
    if credentials is None:
        raise no_credentials(str(default))
    return credentials


def asked_credentials(kubeconfig: Path | None, context: str = "") -> "Credentials":
    """Return the API server's credentials for an option that KUBECONFIG does not set; raise ConfigError."""
    named = os.environ.get("KUBECONFIG", "")  # noqa: TID251  of `why`, KUBECONFIG counts for vm/, vmi/ and pod/ alone
    return demanded_credentials(kubeconfig or (Path(named) if named else None), context)


def own_namespace(namespace: str, credentials: "Credentials") -> Namespace:
    """Return the namespace of the controller and its operands; raise ConfigError."""
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
    """Return the agent's task for the API server, None without a node or credentials. Raises ConfigError."""
    if node is None:
        return None
    from gpuvirt.agent.cluster.clusterside import ClusterSide

    found = credentials_of(kubeconfig, context)
    if found is None:
        log.info("the agent uses no API server: no service account's token was found, and --kubeconfig is not given")
        return None
    return ClusterSide(found, node, config_map, gpu_nodes=operands is None, operands=operands).run


def labels_side(node: NodeName | None, kubeconfig: Path | None, context: str = "") -> "ClusterTask":
    """Return the task of an agent that only labels its node. Raises ConfigError without a node or credentials."""
    if node is None:
        raise ConfigError("is missing, but the agent labels this node", where="--node-name")
    from gpuvirt.agent.cluster.clusterside import ClusterSide

    found = credentials_of(kubeconfig, context)
    if found is None:
        raise no_credentials()
    return ClusterSide(found, node, None, gpu_nodes=False, labels_only=True).run
