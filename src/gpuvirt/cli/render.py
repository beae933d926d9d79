"""What people see: tables on a terminal, JSON for programs."""

import sys
from collections.abc import Iterable

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuvirt.model.inventory import Mode
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.view import GpuView, NodeView, ResourceView, VgpuView

MODE_COLORS = {Mode.PASSTHROUGH: "green", Mode.VGPU: "cyan", Mode.CONTAINER: "blue"}
PIPE_WIDTH = 240
"""Columns where there is no terminal: wide enough that nothing is cut that a person may grep for."""


def console() -> Console:
    """Return where to write."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def json_lines(value: object) -> None:
    """Write a value as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def devices(view: NodeView, *, every: bool) -> None:
    """Write the table of a node's devices, what is offered, and what is wrong.

    Functions beside GPUs have a row when they are offered, or when `every` one is wanted.
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
    source = f"agent {view.agent.version}, pid {view.agent.pid}" if view.agent else "a look at the host; no agent runs"
    out.print(Text(f"\nas of {view.at:%Y-%m-%d %H:%M:%S} UTC, from {source}", style="dim"))


def devices_table(rows: Iterable[GpuView]) -> Table:
    """Return a table with a row for each GPU or function, and one for each kind of vGPU on it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("ADDRESS", "NAME", "MODE", "DRIVER", "GROUP", "NUMA", "USERS", "VGPUS", "OFFERED AS", "REASON"):
        table.add_column(name, overflow="fold", no_wrap=name in {"ADDRESS", "MODE", "GROUP", "NUMA"})
    for row in rows:
        table.add_row(
            row.address,
            row.name or row.pci_id,
            Text(row.mode, style=MODE_COLORS.get(row.mode, "")),
            row.driver or "-",
            _or_dash(row.group),
            _or_dash(row.numa_node),
            _users(row),
            _vgpus(row.vgpus),
            _offered(row),
            _code(row.reasons),
        )
    return table


def resources_table(resources: Iterable[ResourceView]) -> Table:
    """Return a table of what is offered to the kubelet."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("RESOURCE", "DEVICES", "HEALTHY", "HELD", "REGISTERED"):
        table.add_column(name, overflow="fold")
    for resource in resources:
        because = resource.not_registered_because
        table.add_row(
            resource.name,
            str(len(resource.devices)),
            str(sum(device.healthy for device in resource.devices)),
            str(sum(device.holder is not None for device in resource.devices)),
            "yes" if resource.registered else f"no: {because.code}" if because else "-",
        )
    return table


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


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _users(row: GpuView) -> str:
    users = [*row.users, *(user for vgpu in row.vgpus for user in vgpu.users)]
    return ", ".join(dict.fromkeys(users)) or "-"


def _vgpus(vgpus: tuple[VgpuView, ...]) -> str:
    counts: dict[str, int] = {}
    for vgpu in vgpus:
        counts[vgpu.type] = counts.get(vgpu.type, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "-"


def _offered(row: GpuView) -> Text:
    names = [row.offered_as, *(vgpu.offered_as for vgpu in row.vgpus)]
    shown = ", ".join(dict.fromkeys(name for name in names if name is not None))
    unhealthy = row.healthy is False or any(vgpu.reasons for vgpu in row.vgpus)
    return Text(shown or "-", style="yellow" if unhealthy else "")


def _code(reasons: tuple[Reason, ...]) -> str:
    return ", ".join(dict.fromkeys(str(reason.code) for reason in reasons)) or "-"
