"""`gpuvirt shares`: the shared GPUs of a cluster, what each has left, and its pods."""

import asyncio
import sys
from functools import partial
from random import Random

import typer

from gpuvirt.cli.formats import ListFormat, ListOutput
from gpuvirt.cli.output import render, watching
from gpuvirt.cli.output.fleetrender import print_shares
from gpuvirt.cli.output.tables import CLEAR, console
from gpuvirt.cli.parameters import apiserver, fleet, options
from gpuvirt.clock import RealClock
from gpuvirt.diagnosis.sharesreading import SharesFollower, read_overview, verify_resource
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ApiError
from gpuvirt.model.shares.demand import WHOLE, Units
from gpuvirt.model.shares.overview import SharesOverview
from gpuvirt.model.shares.sharedgpus import UNITS_RESOURCE
from gpuvirt.shares.sharing import Sharing


def shares(  # noqa: PLR0913  one parameter an option
    *,
    watch: watching.WatchOption = False,
    resource: options.SharedResource = UNITS_RESOURCE,
    units: options.SharedUnits = WHOLE,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    selector: fleet.SelectorOption = "",
    output: options.ListFormat = ListOutput.TABLE,
    no_headers: options.NoHeaders = False,
) -> None:
    """Show the shared GPUs of the cluster, and their free units.

    Each GPU has a bar and its pods. The command reads nodes, pods, VgpuSchedules and, for the memory that pods with
    limits use, GpuNodes. A pod whose GPUs are not known yet counts on each shared GPU of its node. While a VgpuSchedule
    has suspended a worker, none of its units is free.
    """
    listing = ListFormat(output, no_headers)
    sharing = Sharing(options.resource_of(resource), Units(units))
    client = Client(apiserver.demanded_credentials(kubeconfig, context))
    asyncio.run(verify_resource(client, sharing.resource))
    names = asyncio.run(fleet.selected_nodes(client, selector))
    if not watch:
        _show(_chosen(asyncio.run(read_overview(client, sharing)), names), listing)
        return
    follower = SharesFollower(client, sharing, RealClock(), Random())  # noqa: S311  it spreads requests over time
    try:
        asyncio.run(follower.run(lambda found: _show_next(_chosen(found, names), listing), _report))
    except KeyboardInterrupt:
        raise typer.Exit from None


def _chosen(found: SharesOverview, names: frozenset[str] | None) -> SharesOverview:
    return found if names is None else found.of_nodes(names)


def _show(found: SharesOverview, listing: ListFormat) -> None:
    names = (f"node/{node.node}" for node in found.nodes)
    render.print_list(found, names, partial(print_shares, console(), found), listing)


def _show_next(found: SharesOverview, listing: ListFormat) -> None:
    if listing.is_table and sys.stdout.isatty():
        print(CLEAR, end="")
    _show(found, listing)
    sys.stdout.flush()


def _report(error: ApiError | None) -> None:
    if error is not None:
        print(f"gpuvirt: {error}", file=sys.stderr)
