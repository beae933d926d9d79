"""`gpuvirt status`: the components of a cluster's GPU nodes."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from gpuvirt.cli.formats import Layout, ListFormat, ListOutput
from gpuvirt.cli.output import render, watching
from gpuvirt.cli.output.tables import Column, Repeats, Table, console, say
from gpuvirt.cli.parameters import apiserver, fleet, options
from gpuvirt.clock import RealClock
from gpuvirt.controller.clusterstatus import ClusterStatus, ask
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import UnreachableError

WAIT_S = 300
INSTALL = "helm install gpuvirt deploy/chart -n gpu-operator --create-namespace --set image.repository=REGISTRY/gpuvirt"
COLUMNS = (
    Column("NODE"),
    Column("WORKLOAD", folds=True),
    Column("COMPONENT"),
    Column("READY"),
    Column("STATE"),
    Column("DETAIL", folds=True, optional=True),
)


def print_status(found: ClusterStatus, layout: Layout = Layout()) -> None:  # noqa: B008  frozen
    """Print whether all is well, and the table of components. Each reason is printed once, below its first row."""
    out, repeats = console(), Repeats()
    invalid = list(filter(None, (repeats.fresh(value.text) for value in found.invalid)))
    table = Table(COLUMNS, below="DETAIL")
    for row in found.components:
        detail, reasons = (row.detail, ()) if row.ready else ("", (repeats.fresh(row.detail, row.node),))
        ready = render.yes_or_no(row.ready)
        table.add(row.node, row.workload, row.component, ready, row.state, detail, below=filter(None, reasons))
    if layout.headings:
        _print_verdict(out, found, repeats.fresh(found.reason) if found.state != "ready" else "", invalid)
    if found.components:
        if layout.headings:
            out.print()
        table.print(out, layout)


def _print_verdict(out: Console, found: ClusterStatus, reason: str, invalid: Sequence[str]) -> None:
    say(out, found.verdict)
    if not found.is_installed:
        say(out, INSTALL, head="  fix: ")
    for text in filter(None, (reason, found.kubevirt)):
        say(out, text, head="  ")
    if invalid:
        say(out, "")
        say(out, "Invalid desired state, which gpuvirt does not apply:")
    for text in invalid:
        say(out, text, head="  ")


def status(  # noqa: PLR0913  one parameter an option
    *,
    watch: watching.WatchOption = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until all components are ready, or until --timeout.")
    ] = False,
    timeout: Annotated[
        int, typer.Option("--timeout", min=1, metavar="SECONDS", help="Seconds that --wait waits at most.")
    ] = WAIT_S,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    namespace: Annotated[str, apiserver.own_namespace_option("the one in the ClusterPolicy's status")] = "",
    selector: fleet.SelectorOption = "",
    output: options.ListFormat = ListOutput.TABLE,
    no_headers: options.NoHeaders = False,
) -> None:
    """Show whether gpuvirt and its components on nodes are ready.

    The components have the names of the operands of NVIDIA's operator, even if gpuvirt's agent does their work.
    The command reads GpuNodes and pods. It exits with 1 if the ClusterPolicy, a component or KubeVirt's
    configuration is not ready.
    """
    listing = ListFormat(output, no_headers)
    credentials = apiserver.demanded_credentials(kubeconfig, context)
    client, own = Client(credentials), apiserver.own_namespace(namespace, credentials)

    async def read() -> ClusterStatus:
        found, names = await ask(client, own), await fleet.selected_nodes(client, selector)
        return found if names is None else found.of_nodes(names)

    if watch:
        watching.print_read(read, partial(_show, listing=listing), listing, watch=True)
        return
    found = asyncio.run(_wait(read, timeout) if wait else read())
    if namespace and found.namespace not in {"", namespace}:
        print(f"gpuvirt: gpuvirt runs in namespace {found.namespace}, not in {namespace}", file=sys.stderr)
    _show(found, listing)
    raise typer.Exit(0 if found.well else 1)


def _show(found: ClusterStatus, listing: ListFormat) -> None:
    names = (f"node/{row.node}" for row in found.components)
    render.print_list(found, names, partial(print_status, found), listing)


async def _wait(read: Callable[[], Awaitable[ClusterStatus]], timeout_s: int) -> ClusterStatus:
    """Return the status once all is ready, or after some time; print each change of the verdict."""
    clock, printed = RealClock(), ""
    found: ClusterStatus | None
    until_s = clock.monotonic_s() + timeout_s
    while True:
        is_over = clock.monotonic_s() >= until_s
        try:
            found = await read()
            text = found.verdict
        except UnreachableError as error:
            if is_over:
                raise
            found, text = None, str(error)
        if found is not None and (is_over or found.well):
            if not found.well:
                print(f"gpuvirt: still not ready after {timeout_s} s", file=sys.stderr)
            return found
        if text != printed:
            print(f"gpuvirt: {text}", file=sys.stderr)
            printed = text
        await clock.sleep(min(watching.EVERY_S, max(until_s - clock.monotonic_s(), 0)))
