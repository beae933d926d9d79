"""What `gpuvirt status` shows."""

from gpuvirt.cli import render
from gpuvirt.cli.tables import Column, Table, console, say
from gpuvirt.cluster.operator.clusterstatus import ClusterStatus

COLUMNS = (
    Column("NODE"),
    Column("WORKLOAD", folds=True),
    Column("COMPONENT"),
    Column("READY"),
    Column("STATE"),
    Column("DETAIL", folds=True, optional=True),
)


def status(found: ClusterStatus) -> None:
    """Write the ClusterPolicy's state and the table of components; a reason stands below its row."""
    out = console()
    policy = f"ClusterPolicy {found.policy}: {found.state or 'no controller has said anything of it yet'}"
    say(out, policy if found.policy is not None else "No ClusterPolicy: nothing is wanted.")
    if found.reason:
        say(out, found.reason, head="  ")
    if found.invalid:
        say(out, "")
        say(out, "Invalid desired state, which changes nothing:")
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
