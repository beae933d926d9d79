"""`gpuvirt status`: the components of a cluster's GPU nodes."""

import asyncio

import typer

from gpuvirt.cli.output import render
from gpuvirt.cli.output.tables import Column, Table, console, say
from gpuvirt.cli.parameters import apiserver, options
from gpuvirt.cli.parameters.options import Output
from gpuvirt.cluster.operator.clusterstatus import ClusterStatus, ask

COLUMNS = (
    Column("NODE"),
    Column("WORKLOAD", folds=True),
    Column("COMPONENT"),
    Column("READY"),
    Column("STATE"),
    Column("DETAIL", folds=True, optional=True),
)


def print_status(found: ClusterStatus) -> None:
    """Print the ClusterPolicy's state and the table of components; the reason of a row is below it."""
    out = console()
    policy = f"ClusterPolicy {found.policy}: {found.state or 'no controller has reported its state yet'}"
    say(out, policy if found.policy is not None else "No ClusterPolicy: the controller deploys nothing.")
    if found.reason:
        say(out, found.reason, head="  ")
    if found.invalid:
        say(out, "")
        say(out, "Invalid desired state, which gpuvirt does not apply:")
    for value in found.invalid:
        say(out, value.text, head="  ")
    if not found.components:
        return
    table = Table(COLUMNS)
    for row in found.components:
        detail, reasons = (row.detail, ()) if row.ready else ("", (row.detail,))
        ready = render.yes_or_no(row.ready)
        table.add(row.node, row.workload, row.component, ready, row.state, detail, below=filter(None, reasons))
    out.print()
    table.print(out)


def status(
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    namespace: apiserver.OwnNamespaceOption = "",
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Show the state of each component on each GPU node.

    The components have the names of the operands of NVIDIA's operator, also those that are parts of gpuvirt's agent.
    The command reads GpuNodes and pods. It exits with 1 if a component is not ready.
    """
    credentials = apiserver.demanded_credentials(kubeconfig, context)
    found = asyncio.run(ask(credentials, apiserver.own_namespace(namespace, credentials)))
    if output is Output.JSON:
        render.json_lines(found)
    else:
        print_status(found)
    raise typer.Exit(0 if found.well else 1)
