"""`gpuvirt install`: what the chart's Jobs do before and after an install or upgrade."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from gpuvirt.cli import apiserver
from gpuvirt.clock import RealClock
from gpuvirt.cluster.client import Client
from gpuvirt.install import installing

app = typer.Typer(no_args_is_help=True, help="Write what helm can't; the chart's Jobs run it.")


@app.command("crds")
def crds(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where their manifests lie, one a file.")],
    *,
    only_missing: Annotated[
        bool, typer.Option("--only-missing", help="Make those that are missing, and leave the others as they are.")
    ] = False,
    namespace: apiserver.HomeOption = "",
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
) -> None:
    """Make our CustomResourceDefinitions, or bring them up to date; another product's are left as they are.

    Where an uninstall keeps controllers from leading, they may again.
    """
    manifests = installing.read_kinds(folder)
    credentials = apiserver.demanded_credentials(kubeconfig, context)
    client, home, clock = Client(credentials), apiserver.home_of(namespace, credentials), RealClock()

    async def run() -> None:
        for line in await installing.install_kinds(client, manifests, clock, only_missing=only_missing):
            print(line)
        if (lifted := await installing.lift_hold(client, home, clock)) is not None:
            print(lifted)

    asyncio.run(run())


@app.command("namespace")
def namespace(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Where agents run.")],
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
) -> None:
    """Label a namespace, so that pod security admission lets agents be privileged there."""
    client = Client(apiserver.demanded_credentials(kubeconfig, context))
    print(asyncio.run(installing.install_namespace(client, name, RealClock())))


@app.command("policy")
def policy(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The ClusterPolicy.")],
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
) -> None:
    """Make the cluster's ClusterPolicy, or bring it up to date; another installation's is refused."""
    manifest = installing.read_policy(file)
    client = Client(apiserver.demanded_credentials(kubeconfig, context))
    print(asyncio.run(installing.install_policy(client, manifest, RealClock())))
