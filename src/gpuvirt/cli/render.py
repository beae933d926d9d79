"""What people see: tables on a terminal, JSON for programs."""

from collections.abc import Iterable
from itertools import compress

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuvirt.facts.vgpu import Scheduler
from gpuvirt.model.inventory import Mode
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.view import GpuView, NodeView, ResourceView, SchedulerView, VgpuView

NOTHING = "-"
DEVICE_COLUMNS = (
    *("ADDRESS", "NAME", "MODE", "DRIVER", "GROUP", "NUMA"),
    *("USERS", "VGPUS", "SCHEDULER", "OFFERED AS", "REASON"),
)
MODE_COLORS = {Mode.PASSTHROUGH: "green", Mode.VGPU: "cyan", Mode.CONTAINER: "blue"}
WIDTH = 240
"""Columns of a table. A narrower terminal wraps lines; words are never cut, as somebody may copy or grep them."""


def console() -> Console:
    """Return where to write; `[...]` and `:...:` in a text are the host's own words, and no markup."""
    return Console(width=WIDTH, highlight=False, markup=False, emoji=False)


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
        out.print(devices_table((*view.gpus, *functions)))
    if hidden := len(view.functions) - len(functions):
        out.print(Text(f"and {hidden} other functions of these cards and NVSwitches (--all)", style="dim"))
    for line in why_lines(view):
        out.print(line, soft_wrap=True)
    if view.resources:
        out.print()
        out.print(resources_table(view.resources))
    source = f"agent {view.agent.version}, pid {view.agent.pid}" if view.agent else "a look at the host"
    if view.agent is None and not sees_users:
        source += "; which processes use a device is known to root alone"
    out.print(Text(f"\nas of {view.at:%Y-%m-%d %H:%M:%S} UTC, from {source}", style="dim"))


def devices_table(rows: Iterable[GpuView]) -> Table:
    """Return a table with a row for each GPU or function; a column that says nothing of any row is left out."""
    lines = [_device_cells(row) for row in rows]
    told = [any(str(line[at]) != NOTHING for line in lines) for at in range(len(DEVICE_COLUMNS))]
    made = table(compress(DEVICE_COLUMNS, told))
    for line in lines:
        made.add_row(*compress(line, told))
    return made


def _device_cells(row: GpuView) -> tuple[Text | str, ...]:
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
    made = table(("RESOURCE", "DEVICES", "HEALTHY", "HELD", "REGISTERED"))
    for resource in resources:
        because = resource.not_registered_because
        made.add_row(
            resource.name,
            str(len(resource.devices)),
            str(sum(device.healthy for device in resource.devices)),
            str(sum(device.holder is not None for device in resource.devices)),
            "yes" if resource.registered else f"no: {because.code}" if because else NOTHING,
        )
    return made


def why_lines(view: NodeView) -> Iterable[str]:
    """Yield a line for each reason of which the table has only the code, and that somebody may want to mend."""
    for gpu in view.gpus:
        yield from (reason.text for reason in gpu.reasons if reason.code is not ReasonCode.CARRIES_VGPUS)
        yield from (reason.text for vgpu in gpu.vgpus for reason in vgpu.reasons)
    yield from (reason.text for function in view.functions if function.offered_as for reason in function.reasons)
    yield from (note.text for note in view.notes)
    for resource in view.resources:
        if resource.not_registered_because is not None:
            yield resource.not_registered_because.text


def table(names: Iterable[str]) -> Table:
    """Return a table with these columns, and no row yet."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        made.add_column(name, no_wrap=True)
    return made


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
