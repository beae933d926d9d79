"""`gpuvirt shares`: the shared GPUs of a cluster, what each has left, and its pods."""

import asyncio
import sys
from random import Random
from typing import Annotated

import typer

from gpuvirt.cli.output import render
from gpuvirt.cli.output.sharesrender import print_shares
from gpuvirt.cli.output.tables import CLEAR, console
from gpuvirt.cli.parameters import apiserver, options
from gpuvirt.cli.parameters.options import Output
from gpuvirt.clock import RealClock
from gpuvirt.cluster.client import Client
from gpuvirt.cluster.failures import ApiError
from gpuvirt.cluster.shares.reading import SharesFollower, overview_of, read_index
from gpuvirt.cluster.shares.sharing import Sharing
from gpuvirt.model.shares.demand import WHOLE, Units
from gpuvirt.model.shares.overview import SharesOverview
from gpuvirt.model.shares.sharedgpus import UNITS_RESOURCE


def shares(
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show each change until interrupted.")] = False,
    resource: options.SharedResource = UNITS_RESOURCE,
    units: options.SharedUnits = WHOLE,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Show the shared GPUs of the cluster, and what is left.

    Each GPU has a bar and its pods. The command reads nodes and pods. A pod whose GPUs are not known yet counts on
    each shared GPU of its node.
    """
    sharing = Sharing(options.resource_of(resource), Units(units))
    client = Client(apiserver.demanded_credentials(kubeconfig, context))
    if not watch:
        _show(overview_of(asyncio.run(read_index(client, sharing))), output)
        return
    follower = SharesFollower(client, sharing, RealClock(), Random())  # noqa: S311  it spreads requests over time
    try:
        asyncio.run(follower.run(lambda found: _show_next(found, output), _report))
    except KeyboardInterrupt:
        raise typer.Exit from None


def _show(found: SharesOverview, output: Output) -> None:
    if output is Output.JSON:
        render.json_lines(found)
    else:
        print_shares(console(), found)


def _show_next(found: SharesOverview, output: Output) -> None:
    if output is not Output.JSON and sys.stdout.isatty():
        print(CLEAR, end="")
    _show(found, output)
    sys.stdout.flush()


def _report(error: ApiError | None) -> None:
    if error is not None:
        print(f"gpuvirt: {error}", file=sys.stderr)
