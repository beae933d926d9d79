"""The output of commands: tables for a terminal, JSON for programs."""

from collections.abc import Callable, Iterable

import msgspec
from rich.console import Console
from rich.text import Text

from gpuvirt import plain
from gpuvirt.cli.formats import Layout, ListFormat, ListOutput, Output
from gpuvirt.cli.output.tables import NOTHING, Cell, Column, Table, console, say
from gpuvirt.facts.vgpu import Scheduler
from gpuvirt.model.inventory.inventory import Mode
from gpuvirt.model.offers.view import GpuView, NodeView, ResourceView, VgpuView
from gpuvirt.model.reasons import Reason, ReasonCode, count_of

DEVICE_COLUMNS = (
    *(Column("ADDRESS"), Column("NAME", folds=True, optional=True), Column("MODE")),
    *(Column(name, optional=True) for name in ("DRIVER", "GROUP", "NUMA")),
    *(Column(name, folds=True, optional=True) for name in ("USERS", "VGPUS", "SCHEDULER", "OFFERED AS", "REASON")),
    *(Column(name, wide=True) for name in ("VFS", "DESIRED", "CONFIG", "VMS", "PCI ID")),
)
RESOURCE_COLUMNS = (
    Column("RESOURCE"),
    Column("TYPE", folds=True, optional=True),
    Column("TOTAL"),
    Column("HEALTHY"),
    Column("ALLOCATED"),
    Column("REGISTERED", folds=True),
)
MODE_COLORS = {Mode.PASSTHROUGH: "green", Mode.VGPU: "cyan", Mode.CONTAINER: "blue", Mode.SHARED: "magenta"}


def print_document(value: object, output: Output | ListOutput) -> bool:
    """Print a value as JSON or YAML; return whether `output` is one of them."""
    if output in {Output.JSON, ListOutput.JSON}:
        print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
    elif output in {Output.YAML, ListOutput.YAML}:
        print(plain.write(msgspec.json.decode(msgspec.json.encode(value))), end="")
    else:
        return False
    return True


def print_list(document: object, names: Iterable[str], show: Callable[[Layout], None], listing: ListFormat) -> None:
    """Print a list in a format: as a document, by the names of its entries, or by `show` as a table."""
    if print_document(document, listing.output):
        return
    if listing.is_table:
        show(listing.layout)
        return
    for name in dict.fromkeys(names):
        print(name)


def rows_of(view: NodeView, *, every: bool) -> tuple[GpuView, ...]:
    """Return the GPUs, and the other functions that are offered; with `every`, all functions."""
    return *view.gpus, *(function for function in view.functions if every or function.offered_as is not None)


def devices(
    view: NodeView,
    *,
    every: bool,
    sees_users: bool = True,
    layout: Layout = Layout(),  # noqa: B008  frozen
) -> None:
    """Print the tables of a node's devices and resources, and the reasons.

    `sees_users` tells whether the processes that use a device are visible.
    """
    out, rows = console(), rows_of(view, every=every)
    if rows:
        devices_table(rows).print(out, layout)
    elif layout.headings:
        out.print("No GPU of NVIDIA, AMD or Intel on this host.")
    if not layout.headings:
        return
    if hidden := len(view.gpus) + len(view.functions) - len(rows):
        out.print(
            Text(f"{count_of(hidden, 'other function')} of these cards and NVSwitches hidden (--all)", style="dim")
        )
    for reason in dict.fromkeys(reasons_shown(view)):
        say_reason(out, reason)
    if view.resources:
        out.print()
        resources_table(view.resources).print(out, layout)
    source = f"agent {view.agent.version}, pid {view.agent.pid}" if view.agent else "the host"
    if view.agent is None and not sees_users:
        source += "; only root sees which processes use a device"
    out.print()
    say(out, f"as of {view.at:%Y-%m-%d %H:%M:%S} UTC, read from {source}", style="dim")


def devices_table(rows: Iterable[GpuView]) -> Table:
    """Return a table with a row for each GPU or function; columns that are empty in all rows are left out."""
    made = Table(DEVICE_COLUMNS)
    for row in rows:
        made.add(*_device_cells(row))
    return made


def _device_cells(row: GpuView) -> tuple[Cell, ...]:
    scheduler = row.scheduler
    return (
        row.address,
        row.name or row.pci_id,
        Text(row.mode, style=MODE_COLORS.get(row.mode, "")),
        row.driver or NOTHING,
        _or_nothing(row.group),
        _or_nothing(row.numa_node),
        _users(row),
        _vgpus(row.vgpus),
        NOTHING if scheduler is None else Scheduler(scheduler.policy, scheduler.timeslice_ms).text,
        _offered(row),
        _codes(row.reasons),
        _or_nothing(row.vfs),
        row.desired or NOTHING,
        row.vgpu_config or NOTHING,
        ", ".join(dict.fromkeys((*row.vms, *(vm for vgpu in row.vgpus for vm in vgpu.vms)))) or NOTHING,
        row.pci_id,
    )


def resources_table(resources: Iterable[ResourceView]) -> Table:
    """Return the table of resources that are offered to the kubelet."""
    made = Table(RESOURCE_COLUMNS)
    for resource in resources:
        because = resource.not_registered_because
        made.add(
            resource.name,
            resource.on_demand or NOTHING,
            str(len(resource.devices)),
            str(sum(device.healthy for device in resource.devices)),
            str(sum(device.allocated_to is not None for device in resource.devices)),
            "yes" if resource.registered else f"no: {because.code}" if because else NOTHING,
        )
    return made


def reasons_shown(view: NodeView) -> Iterable[Reason]:
    """Yield the reasons to explain below the table, which has only their codes."""
    for gpu in view.gpus:
        yield from (reason for reason in gpu.reasons if reason.code is not ReasonCode.CARRIES_VGPUS)
        yield from (reason for vgpu in gpu.vgpus for reason in vgpu.reasons)
    yield from (reason for function in view.functions if function.offered_as for reason in function.reasons)
    yield from view.problems
    for resource in view.resources:
        if resource.not_registered_because is not None:
            yield resource.not_registered_because


def say_reason(out: Console, reason: Reason, *, style: str = "") -> None:
    """Print a reason: its message, then its places and its fix on their own lines."""
    say(out, f"{reason.code}: {reason.subject} {reason.message}", style=style)
    if reason.seen:
        say(out, reason.seen, head=Text("  seen: ", style="dim"))
    if reason.fix:
        say(out, reason.fix, head=Text("  fix:  ", style="dim"))


def yes_or_no(is_so: bool) -> Text:
    """Return a green yes or a red no."""
    return Text("yes", style="green") if is_so else Text("no", style="red")


def _or_nothing(value: int | None) -> str:
    return NOTHING if value is None else str(value)


def _users(row: GpuView) -> str:
    users = [*row.users, *(user for vgpu in row.vgpus for user in vgpu.users)]
    return ", ".join(dict.fromkeys(users)) or NOTHING


def _vgpus(vgpus: tuple[VgpuView, ...]) -> str:
    counts: dict[str, int] = {}
    for vgpu in vgpus:
        counts[vgpu.type] = counts.get(vgpu.type, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or NOTHING


def _offered(row: GpuView) -> Text:
    names: list[str | None] = [row.offered_as, *(vgpu.offered_as for vgpu in row.vgpus)]
    names += [count_of(row.units, "unit")] if row.units else []
    shown = ", ".join(dict.fromkeys(name for name in names if name is not None))
    unhealthy = row.healthy is False or any(vgpu.reasons for vgpu in row.vgpus)
    return Text(shown or NOTHING, style="yellow" if unhealthy else "")


def _codes(reasons: tuple[Reason, ...]) -> str:
    codes = dict.fromkeys(reason.code for reason in reasons if reason.code is not ReasonCode.CARRIES_VGPUS)
    return ", ".join(map(str, codes)) or NOTHING
