"""`gpuvirt why node/NAME`."""

import typer
from rich.console import Console

from gpuvirt.cli.formats import Output
from gpuvirt.cli.output.render import print_document
from gpuvirt.cli.output.tables import NOTHING, Column, Table, console, say
from gpuvirt.cluster.access.credentials import Credentials
from gpuvirt.cluster.vms.nodeevidence import ask_node
from gpuvirt.model.doctor.vms.nodeexplanation import NodeExplanation, explain_node
from gpuvirt.model.doctor.vms.vmfindings import counts_text

RESOURCE_COLUMNS = (Column("RESOURCE"), Column("ALLOCATABLE"), Column("FREE"))
POD_COLUMNS = (Column("PENDING POD"), Column("REQUESTS", folds=True), Column("REASON", optional=True))


def explain(node: str, credentials: Credentials, output: Output, units: str) -> None:
    """Explain what a node has, and what is pending there; exit with 1 if something is wrong."""
    found = explain_node(ask_node(credentials, node, units))
    if not print_document(found, output):
        show(found)
    raise typer.Exit(1 if found.is_blocked else 0)


def show(found: NodeExplanation) -> None:
    """Print the node's resources, its reasons, and the pods that are pending."""
    out = console()
    _node(out, found)
    resources = Table(RESOURCE_COLUMNS)
    for resource in found.resources:
        free = NOTHING if resource.free is None else str(resource.free)
        resources.add(resource.name, str(resource.allocatable), free, below=filter(None, (resource.reason,)))
    if found.resources:
        out.print()
        resources.print(out)
    for reason in found.reasons:
        say(out, reason)
    out.print()
    if found.pending is None:
        say(out, "The cluster's pods could not be read, so pending pods are not known.", style="yellow")
    elif not found.pending:
        say(out, "No pod with a device of this node is pending.", style="green")
    else:
        pods = Table(POD_COLUMNS, below="MESSAGE")
        for pod in found.pending:
            pods.add(
                f"{pod.namespace}/{pod.name}", counts_text(pod.requests), pod.code or NOTHING, below=(pod.message,)
            )
        pods.print(out)


def _node(out: Console, found: NodeExplanation) -> None:
    """Print what concerns the whole node."""
    say(out, f"node {found.node} is {'ready' if found.ready else 'not ready'}", style="bold")
    if found.away is not None:
        say(out, f"It {found.away}, so nothing of it is free.", style="yellow")
    for phase in found.phases:
        say(out, f"It {phase}.")
    if found.sharing is not None:
        say(out, f"What limits the shares of new pods: {found.sharing}.")
    if not found.has_agent:
        say(out, "It has no GpuNode: gpuvirt's agent has not reported there.", style="yellow")
