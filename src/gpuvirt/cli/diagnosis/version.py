"""`gpuvirt version`: the version of this program, and as a document those of the API server and of the agents."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gpuvirt import __version__
from gpuvirt.cli.formats import Output
from gpuvirt.cli.output.render import print_document
from gpuvirt.cli.parameters import apiserver, options
from gpuvirt.errors import GpuvirtError
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ForbiddenError, NotFoundError
from gpuvirt.kube.kinds.gpunode import GPU_NODES, GpuNode
from gpuvirt.kube.resources import Collection

MOST_S = 5.0
"""The longest time for which the API server is asked."""


class ServerVersions(msgspec.Struct, frozen=True):
    """The versions in a cluster."""

    kubernetes: str
    """`v1.33.1`"""
    agents: Mapping[str, int] | None
    """The number of nodes by the version of their agent; None if the GpuNodes can't be listed."""


class Versions(msgspec.Struct, frozen=True):
    """The versions of this program and of a cluster."""

    client: str
    server: ServerVersions | None
    unread: str | None = None
    """Why the versions in the cluster are unknown."""


def version(
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Print the version.

    With -o json or yaml, the command also asks the API server, for at most 5 seconds, for its version and for those of
    the agents, as GpuNodes have them. If the API server can't be asked, the document has the reason.
    """
    if output is Output.TABLE:
        print(f"gpuvirt {__version__}")
        return
    try:
        found = Versions(__version__, asyncio.run(_read(kubeconfig, context)))
    except (GpuvirtError, OSError, ExceptionGroup) as error:
        found = Versions(__version__, None, str(error) or f"the API server has not answered in {MOST_S:g} s")
    print_document(found, output)


async def _read(kubeconfig: Path | None, context: str) -> ServerVersions:
    client = Client(apiserver.demanded_credentials(kubeconfig, context))
    async with asyncio.timeout(MOST_S):
        kubernetes = await client.server_version()
        try:
            gpu_nodes = (await client.list(Collection(GPU_NODES, GpuNode))).items
        except (ForbiddenError, NotFoundError):
            return ServerVersions(kubernetes, None)
    agents = (gpu_node.status.agent for gpu_node in gpu_nodes if gpu_node.status is not None)
    return ServerVersions(kubernetes, Counter(agent for agent in agents if agent is not None))
