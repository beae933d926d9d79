"""`gpuvirt why vm/NAME`, `vmi/NAME` and `pod/NAME`: what is asked, and how the explanation is shown."""

import typer
from rich.text import Text

from gpuvirt.cli import apiserver
from gpuvirt.cli.diagnosis import WAY_STYLES, finding
from gpuvirt.cli.options import Output
from gpuvirt.cli.render import json_lines
from gpuvirt.cli.tables import NOTHING, Column, Table, console, say
from gpuvirt.cluster.access.credentials import Credentials
from gpuvirt.cluster.vms.evidence import ask
from gpuvirt.facts.ids import ObjectName
from gpuvirt.model.doctor.explanation import NOT_REACHED
from gpuvirt.model.doctor.vms import vmexplanation
from gpuvirt.model.doctor.vms.vmevidence import ObjectKind, ObjectRef
from gpuvirt.model.doctor.vms.vmexplanation import Explanation
from gpuvirt.model.doctor.vms.vmfindings import in_words
from gpuvirt.model.doctor.vms.vmnodes import NodeVerdict

NODE_COLUMNS = (Column("NODE"), Column("RESOURCE", folds=True), Column("ALLOCATABLE"), Column("FREE"), Column("REASON"))


def explain(target: tuple[ObjectKind, ObjectName], credentials: Credentials, namespace: str, output: Output) -> None:
    """Explain why a VM, a VMI or a pod does not have its GPUs; end with 1 where something is in the way."""
    kind, name = target
    found = vmexplanation.explain(ask(credentials, ObjectRef(kind, name, apiserver.home_of(namespace, credentials))))
    if output is Output.JSON:
        json_lines(found)
    else:
        show(found)
    raise typer.Exit(1 if found.blocker is not None else 0)


def show(found: Explanation) -> None:
    """Write an explanation: the blocker first, then each step, then the nodes."""
    out = console()
    kind, _, name = found.target.partition("/")
    requests = f" requests {in_words(found.requests)}" if found.requests else ""
    say(out, f"{kind} {found.namespace}/{name}{requests}", style="bold")
    out.print()
    if found.blocker is None:
        say(out, "It has its devices.", style="green")
    else:
        out.print(Text("This is what is in its way:", style="bold red"))
        for line in finding(found.blocker, out.width):
            out.print(line, soft_wrap=True)
    out.print()
    for stage in found.stages:
        if stage.message != NOT_REACHED:
            standing = (f"  {stage.standing:<8} ", WAY_STYLES[stage.standing])
            say(out, stage.message, head=Text.assemble(standing, f"{stage.step:<10} "))
    if later := [stage.step for stage in found.stages if stage.message == NOT_REACHED]:
        say(out, ", ".join(later), head=Text("  then     ", style="dim"), style="dim")
    if found.scheduler:
        out.print()
        say(out, found.scheduler, head="the scheduler says: ")
    if found.nodes:
        out.print()
        _nodes(found).print(out)
    for unread in found.unread:
        say(out, unread, head="could not be read: ", style="yellow")


def _nodes(found: Explanation) -> Table:
    table = Table(NODE_COLUMNS)
    for verdict in found.nodes:
        against = verdict.obstacle
        code = Text("none", style="green") if against is None else Text(str(against.code), style="yellow")
        below = () if against is None else (f"{against.subject} {against.message}",)
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


def _free(verdict: NodeVerdict, resource: str) -> str:
    return NOTHING if verdict.free is None else str(verdict.free[resource])
