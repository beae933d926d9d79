"""`gpuvirt status`: what of a cluster's GPU nodes is well, and what is not."""

import asyncio

import typer

from gpuvirt.cli import apiserver, options, render, statusrender
from gpuvirt.cli.options import Output
from gpuvirt.cluster.operator.clusterstatus import ask


def status(
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    namespace: apiserver.HomeOption = "",
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Show the components of all nodes with GPUs, as their agents and pods say; ends with 1 where one is not well.

    They have the names of NVIDIA's operator's, also where they are parts of one agent.
    """
    credentials = apiserver.demanded_credentials(kubeconfig, context)
    found = asyncio.run(ask(credentials, apiserver.home_of(namespace, credentials)))
    if output is Output.JSON:
        render.json_lines(found)
    else:
        statusrender.status(found)
    raise typer.Exit(0 if found.well else 1)
