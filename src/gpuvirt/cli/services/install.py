"""`gpuvirt install`: the commands of the chart's Jobs, which run before and after an install or upgrade."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from gpuvirt.cli.parameters import apiserver
from gpuvirt.clock import RealClock
from gpuvirt.cluster.client import Client
from gpuvirt.install import installing

app = typer.Typer(no_args_is_help=True, help="Install what helm cannot; the chart's Jobs run this.")


@app.command("crds")
def crds(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of their manifests, one in each file.")],
    *,
    only_missing: Annotated[
        bool, typer.Option("--only-missing", help="Create missing kinds, and leave existing kinds unchanged.")
    ] = False,
    namespace: apiserver.OwnNamespaceOption = "",
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
) -> None:
    """Create or update gpuvirt's CustomResourceDefinitions.

    Definitions of other products stay unchanged. The command also ends an uninstall's hold, which keeps controllers
    from acting.
    """
    manifests = installing.read_kinds(folder)
    credentials = apiserver.demanded_credentials(kubeconfig, context)
    client, own, clock = Client(credentials), apiserver.own_namespace(namespace, credentials), RealClock()

    async def run() -> None:
        for line in await installing.install_kinds(client, manifests, clock, only_missing=only_missing):
            print(line)
        if (lifted := await installing.lift_hold(client, own, clock)) is not None:
            print(lifted)

    asyncio.run(run())


@app.command("namespace")
def namespace(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Namespace of the agents.")],
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
) -> None:
    """Permit privileged agents in a namespace.

    The command sets the namespace's label for pod security admission.
    """
    client = Client(apiserver.demanded_credentials(kubeconfig, context))
    print(asyncio.run(installing.install_namespace(client, name, RealClock())))


@app.command("policy")
def policy(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Manifest of the ClusterPolicy.")],
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
) -> None:
    """Create or update the cluster's ClusterPolicy.

    The command refuses to change the ClusterPolicy of another installation.
    """
    manifest = installing.read_policy(file)
    client = Client(apiserver.demanded_credentials(kubeconfig, context))
    print(asyncio.run(installing.install_policy(client, manifest, RealClock())))
