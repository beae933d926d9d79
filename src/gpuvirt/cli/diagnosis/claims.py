"""`gpuvirt claims`: the claims (DRA) that have, or may get, GPUs of gpuvirt's nodes."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer
from rich.text import Text

from gpuvirt.cli.formats import Layout, ListFormat, ListOutput
from gpuvirt.cli.output import render, watching
from gpuvirt.cli.output.tables import NOTHING, Column, Table, console, say
from gpuvirt.cli.parameters import apiserver, fleet, options
from gpuvirt.diagnosis.claimsreading import read_claims
from gpuvirt.diagnosis.vms.podclaims import ClaimSeen, ClaimState
from gpuvirt.facts.ids import Namespace
from gpuvirt.kube.client import Client

STYLES = {ClaimState.IN_USE: "green", ClaimState.PENDING: "yellow", ClaimState.PREPARING: "yellow"}
COLUMNS = (
    Column("CLAIM"),
    Column("STATE"),
    Column("NODE"),
    Column("GPUS", folds=True),
    Column("CLASSES", folds=True, optional=True),
    Column("PODS", folds=True),
)


def claims(  # noqa: PLR0913  one parameter an option
    *,
    watch: watching.WatchOption = False,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace", "-n", metavar="NAME", help="Namespace of claims. Default: that of the kubeconfig's context."
        ),
    ] = "",
    everywhere: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Show the claims of all namespaces.")
    ] = False,
    selector: Annotated[str, fleet.selector_option("claims")] = "",
    output: options.ListFormat = ListOutput.TABLE,
    no_headers: options.NoHeaders = False,
) -> None:
    """Show the claims (DRA) that have GPUs, or wait for some.

    A claim is Pending until a scheduler has given it GPUs, Allocated while no pod uses it, Preparing until its pod has
    them, InUse while the pod runs, and Ending until the node has them back. Claims of other drivers are not shown.
    """
    credentials = apiserver.demanded_credentials(kubeconfig, context)
    within = None if everywhere else apiserver.own_namespace(namespace, credentials)
    listing = ListFormat(output, no_headers)
    watching.print_read(
        partial(read_claims, Client(credentials), within, selector),
        partial(_show, namespace=within, listing=listing),
        listing,
        watch=watch,
    )


def _show(found: Sequence[ClaimSeen], *, namespace: Namespace | None, listing: ListFormat) -> None:
    names = (f"claim/{claim.name}" for claim in found)
    render.print_list(found, names, partial(_print, found, namespace), listing)


def _print(found: Sequence[ClaimSeen], namespace: Namespace | None, layout: Layout) -> None:
    """Print the table of claims, each with its reason below it; of all namespaces with their names."""
    out, table = console(), Table((*((Column("NAMESPACE"),) if namespace is None else ()), *COLUMNS))
    for claim in found:
        first = (claim.namespace,) if namespace is None else ()
        table.add(
            *first,
            claim.name,
            Text(claim.state, style=STYLES.get(claim.state, "")),
            claim.node or NOTHING,
            ", ".join(device.text for device in claim.devices) or NOTHING,
            ", ".join(claim.classes),
            ", ".join(claim.pods) or NOTHING,
            below=filter(None, (claim.reason,)),
        )
    if found:
        table.print(out, layout)
    elif layout.headings:
        where = "The cluster" if namespace is None else f"The namespace {namespace}"
        hint = "" if namespace is None else "; choose another with --namespace NAME, or all with -A"
        say(out, f"{where} has no claim for GPUs of gpuvirt's{hint}.")
