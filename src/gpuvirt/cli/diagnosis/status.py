"""`gpuvirt status`: the components of a cluster's GPU nodes."""

import asyncio

import typer

from gpuvirt.cli.output import render, statusrender
from gpuvirt.cli.parameters import apiserver, options
from gpuvirt.cli.parameters.options import Output
from gpuvirt.cluster.operator.clusterstatus import ask


def status(
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    namespace: apiserver.HomeOption = "",
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Show the state of each component on each GPU node.

    The components have the names of the operands of NVIDIA's operator, also those that are parts of gpuvirt's agent.
    The command reads GpuNodes and pods. It exits with 1 if a component is not ready.
    """
    credentials = apiserver.demanded_credentials(kubeconfig, context)
    found = asyncio.run(ask(credentials, apiserver.home_of(namespace, credentials)))
    if output is Output.JSON:
        render.json_lines(found)
    else:
        statusrender.status(found)
    raise typer.Exit(0 if found.well else 1)
