"""What people see: tables on a terminal, JSON for programs."""

from collections.abc import Iterable

import msgspec
from rich.console import Console
from rich.text import Text

from gpuvirt.cli.tables import NOTHING, Cell, Column, Table, console, say
from gpuvirt.facts.vgpu import Scheduler
from gpuvirt.model.inventory.inventory import Mode
from gpuvirt.model.offers.view import GpuView, NodeView, ResourceView, SchedulerView, VgpuView
from gpuvirt.model.reasons import Reason, ReasonCode

DEVICE_COLUMNS = (
    *(Column("ADDRESS"), Column("NAME", folds=True, optional=True), Column("MODE")),
    *(Column(name, optional=True) for name in ("DRIVER", "GROUP", "NUMA")),
    *(Column(name, folds=True, optional=True) for name in ("USERS", "VGPUS", "SCHEDULER", "OFFERED AS", "REASON")),
)
RESOURCE_COLUMNS = (
    Column("RESOURCE"),
    Column("TOTAL"),
    Column("HEALTHY"),
    Column("ALLOCATED"),
    Column("REGISTERED", folds=True),
)
MODE_COLORS = {Mode.PASSTHROUGH: "green", Mode.VGPU: "cyan", Mode.CONTAINER: "blue"}


def json_lines(value: object) -> None:
    """Write a value as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def devices(view: NodeView, *, every: bool, sees_users: bool = True) -> None:
    """Write the table of a node's devices, what is offered, and what is wrong.

    Functions beside GPUs have a row when they are offered, or when `every` one is wanted. `sees_users` is whether we
    could see the processes that use a device.
    """
    out = console()
    functions = [function for function in view.functions if every or function.offered_as is not None]
    if not view.gpus and not functions:
        out.print("No GPU of NVIDIA, AMD or Intel on this host.")
    else:
        devices_table((*view.gpus, *functions)).print(out)
    if hidden := len(view.functions) - len(functions):
        out.print(Text(f"and {hidden} other functions of these cards and NVSwitches (--all)", style="dim"))
    for reason in reasons_shown(view):
        say_reason(out, reason)
    if view.resources:
        out.print()
        resources_table(view.resources).print(out)
    source = f"agent {view.agent.version}, pid {view.agent.pid}" if view.agent else "a look at the host"
    if view.agent is None and not sees_users:
        source += "; which processes use a device is known to root alone"
    out.print()
    say(out, f"as of {view.at:%Y-%m-%d %H:%M:%S} UTC, from {source}", style="dim")


def devices_table(rows: Iterable[GpuView]) -> Table:
    """Return a table with a row for each GPU or function; a column that says nothing of any row is left out."""
    made = Table(DEVICE_COLUMNS)
    for row in rows:
        made.add(*_device_cells(row))
    return made


def _device_cells(row: GpuView) -> tuple[Cell, ...]:
    return (
        row.address,
        row.name or row.pci_id,
        Text(row.mode, style=MODE_COLORS.get(row.mode, "")),
        row.driver or NOTHING,
        _or_nothing(row.group),
        _or_nothing(row.numa_node),
        _users(row),
        _vgpus(row.vgpus),
        _scheduler(row.scheduler),
        _offered(row),
        _codes(row.reasons),
    )


def resources_table(resources: Iterable[ResourceView]) -> Table:
    """Return a table of what is offered to the kubelet."""
    made = Table(RESOURCE_COLUMNS)
    for resource in resources:
        because = resource.not_registered_because
        made.add(
            resource.name,
            str(len(resource.devices)),
            str(sum(device.healthy for device in resource.devices)),
            str(sum(device.allocated_to is not None for device in resource.devices)),
            "yes" if resource.registered else f"no: {because.code}" if because else NOTHING,
        )
    return made


def reasons_shown(view: NodeView) -> Iterable[Reason]:
    """Yield each reason of which the table has only the code, and that an admin may want to mend."""
    for gpu in view.gpus:
        yield from (reason for reason in gpu.reasons if reason.code is not ReasonCode.CARRIES_VGPUS)
        yield from (reason for vgpu in gpu.vgpus for reason in vgpu.reasons)
    yield from (reason for function in view.functions if function.offered_as for reason in function.reasons)
    yield from view.notes
    for resource in view.resources:
        if resource.not_registered_because is not None:
            yield resource.not_registered_because


def say_reason(out: Console, reason: Reason, *, style: str = "") -> None:
    """Print a reason: what is wrong, then on lines of their own where it was seen and how to mend it."""
    say(out, f"{reason.code}: {reason.subject} {reason.message}", style=style)
    if reason.seen:
        say(out, reason.seen, head=Text("  seen: ", style="dim"))
    if reason.fix:
        say(out, reason.fix, head=Text("  fix:  ", style="dim"))


def yes_or_no(is_so: bool) -> Text:
    """Return a word that is seen from afar."""
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


def _scheduler(scheduler: SchedulerView | None) -> str:
    return NOTHING if scheduler is None else Scheduler(scheduler.policy, scheduler.timeslice_ms).text


def _offered(row: GpuView) -> Text:
    names = [row.offered_as, *(vgpu.offered_as for vgpu in row.vgpus)]
    shown = ", ".join(dict.fromkeys(name for name in names if name is not None))
    unhealthy = row.healthy is False or any(vgpu.reasons for vgpu in row.vgpus)
    return Text(shown or NOTHING, style="yellow" if unhealthy else "")


def _codes(reasons: tuple[Reason, ...]) -> str:
    return ", ".join(dict.fromkeys(str(reason.code) for reason in reasons)) or NOTHING
