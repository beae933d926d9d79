"""`gpuvirt why vm/NAME`, `vmi/NAME` and `pod/NAME`."""

import typer
from rich.text import Text

from gpuvirt.cli.formats import Output
from gpuvirt.cli.output.diagnosisrender import print_blocker, print_stages
from gpuvirt.cli.output.render import print_document
from gpuvirt.cli.output.tables import NOTHING, Column, Table, console, say
from gpuvirt.cli.parameters import apiserver
from gpuvirt.cluster.access.credentials import Credentials
from gpuvirt.cluster.shares.sharing import Sharing
from gpuvirt.cluster.vms.evidence import ask
from gpuvirt.facts.ids import ObjectName
from gpuvirt.model.doctor.vms import vmexplanation
from gpuvirt.model.doctor.vms.vmevidence import ObjectKind, ObjectRef
from gpuvirt.model.doctor.vms.vmexplanation import Explanation
from gpuvirt.model.doctor.vms.vmfindings import counts_text
from gpuvirt.model.doctor.vms.vmnodes import NodeFit

NODE_COLUMNS = (Column("NODE"), Column("RESOURCE", folds=True), Column("ALLOCATABLE"), Column("FREE"), Column("REASON"))


def explain(
    target: tuple[ObjectKind, ObjectName],
    credentials: Credentials,
    namespace: str,
    output: Output,
    sharing: Sharing,
) -> None:
    """Explain why a VM, a VMI or a pod does not have its GPUs; exit with 1 if something blocks it."""
    kind, name = target
    found = vmexplanation.explain(
        ask(credentials, ObjectRef(kind, name, apiserver.own_namespace(namespace, credentials)), sharing)
    )
    if not print_document(found, output):
        show(found)
    raise typer.Exit(1 if found.blocker is not None else 0)


def show(found: Explanation) -> None:
    """Print an explanation: the blocker, the stages, and the nodes."""
    out = console()
    kind, _, name = found.target.partition("/")
    requests = f" requests {counts_text(found.requests)}" if found.requests else ""
    say(out, f"{kind} {found.namespace}/{name}{requests}", style="bold")
    out.print()
    if found.blocker is None:
        say(out, f"The {kind} has its devices.", style="green")
    else:
        print_blocker(out, found.blocker)
    out.print()
    print_stages(out, found.stages, width=10)
    if found.scheduler:
        out.print()
        say(out, found.scheduler, head="the scheduler reports: ")
    if found.nodes:
        out.print()
        _nodes(found).print(out)
    for unread in found.unread:
        say(out, unread, head="could not be read: ", style="yellow")


def _nodes(found: Explanation) -> Table:
    table = Table(NODE_COLUMNS, below="MESSAGE")
    for verdict in found.nodes:
        obstacle = verdict.obstacle
        code = Text("none", style="green") if obstacle is None else Text(str(obstacle.code), style="yellow")
        below = () if obstacle is None else (f"{obstacle.subject} {obstacle.message}",)
        for number, resource in enumerate(found.requests):
            last = number == len(found.requests) - 1
            table.add(
                verdict.node,
                resource,
                str(verdict.allocatable[resource]),
                _free(verdict, resource),
                code if number == 0 else "",
                below=below if last else (),
            )
    return table


def _free(verdict: NodeFit, resource: str) -> str:
    return NOTHING if verdict.free is None else str(verdict.free[resource])
