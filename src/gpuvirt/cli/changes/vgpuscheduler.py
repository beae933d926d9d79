"""`gpuvirt vgpu scheduler`: shows and sets the scheduler of a GPU's time-sliced vGPUs, through nvidia-smi.

A scheduler that is kept is written to gpuvirt's modprobe file, which modprobe reads when it loads the driver.
"""

from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec
import typer

from gpuvirt.agent.change import byhand
from gpuvirt.agent.change.gate.gate import UnitBusyError, gate_at
from gpuvirt.agent.change.observation import HostObservation, observe
from gpuvirt.agent.published import moduleoptions
from gpuvirt.cli.changes import vgpuhost
from gpuvirt.cli.changes.inworker import in_worker
from gpuvirt.cli.changes.vfiohost import Host
from gpuvirt.cli.formats import Output
from gpuvirt.cli.output import render
from gpuvirt.cli.output.tables import NOTHING, Column, Table, console, say
from gpuvirt.cli.parameters import options
from gpuvirt.cli.parameters.vgpuconfigs import Address
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA, Unread
from gpuvirt.facts.vgpu import Scheduler, SchedulerPolicy
from gpuvirt.hardware.programs.smireport import read_scheduler
from gpuvirt.model.change.moduleoption import FILE
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, refusals
from gpuvirt.paths import HostRoots

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show and set the scheduler of time-sliced vGPUs.\n\nThe commands use NVIDIA's nvidia-smi.",
)

COLUMNS = (
    Column("GPU"),
    Column("POLICY"),
    Column("TIME SLICE"),
    Column("WHEN THE DRIVER IS LOADED", folds=True),
)
PERSISTABLE = frozenset({ReasonCode.VGPU_IN_USE})
"""Reasons that prevent setting a scheduler now, but not keeping it for the driver's next load."""


class Order(msgspec.Struct, frozen=True):
    """The scheduler to set, and the options of the command."""

    scheduler: Scheduler
    persist: bool
    dry_run: bool


class SchedulerRow(msgspec.Struct, frozen=True):
    """The scheduler of one GPU."""

    gpu: PciAddress
    scheduler: Scheduler | None
    """None if nvidia-smi did not report it."""
    kept: Scheduler | None
    """The scheduler that the driver gets when it is loaded; None if gpuvirt's modprobe file has none."""
    reason: Reason | None = None


class SchedulerResult(msgspec.Struct, frozen=True):
    """The result of setting a scheduler, or of its dry run."""

    gpu: PciAddress
    scheduler: Scheduler
    steps: tuple[str, ...]
    reasons: tuple[Reason, ...]
    persisted: bool
    """Whether the scheduler is kept for the driver's next load, or would be."""


@app.command("get")
def get(
    addresses: options.GpuAddresses = None,
    *,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Show each GPU's vGPU scheduler, now and at the driver's next load."""
    here = vgpuhost.host(host_root, kubelet_dir)
    show_schedulers(here, HostRoots.under(host_root), addresses or (), output=output)


@app.command("set")
def set_(  # noqa: PLR0913  a command's options
    address: Address,
    policy: Annotated[SchedulerPolicy, typer.Argument(metavar="best-effort|equal-share|fixed-share")],
    *,
    timeslice_ms: Annotated[
        int | None,
        typer.Option("--timeslice-ms", metavar="N", help="Time slice, 1 to 30 ms. Default: the driver's."),
    ] = None,
    persist: Annotated[
        bool, typer.Option("--persist", help="Also write it to a modprobe file, for each load of the driver.")
    ] = False,
    dry_run: options.DryRun = False,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    assume_unallocated: options.AssumeUnallocated = False,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Set the vGPU scheduler of a GPU until its driver is reloaded.

    While VMs use vGPUs of the GPU, the command refuses to set it. With `--persist` it still writes the modprobe file,
    for the next load of the driver.
    """
    here = vgpuhost.host(host_root, kubelet_dir, assume_unallocated=assume_unallocated)
    order = Order(Scheduler(policy, timeslice_ms), persist=persist, dry_run=dry_run)
    set_scheduler(here, HostRoots.under(host_root), address, order, output=output)


def show_schedulers(here: Host, roots: HostRoots, addresses: Collection[str], *, output: Output) -> None:
    """Print schedulers; exit with 1 if nvidia-smi did not report one."""
    seen = observe(here.change_host, here.inputs, None)
    chosen = vgpuhost.gpus_named(seen, addresses) or _gpus(seen)
    kept = moduleoptions.read_kept(roots)
    rows = [_row(seen, gpu, kept.get(gpu)) for gpu in chosen]
    if not render.print_document(rows, output):
        _show(rows)
    if any(row.reason is not None for row in rows):
        raise typer.Exit(1)


def _gpus(seen: HostObservation) -> list[PciAddress]:
    gpu_states = vgpuhost.gpu_states(seen)
    return [gpu for gpu in gpu_states if seen.inventory.facts.functions[gpu].id.vendor == NVIDIA]


def _row(seen: HostObservation, gpu: PciAddress, kept: Scheduler | None) -> SchedulerRow:
    found = read_scheduler(seen.change_host.tools, gpu)
    if isinstance(found, Unread):
        return SchedulerRow(gpu, None, kept, refusals.unread(gpu, found))
    return SchedulerRow(gpu, found, kept)


def _show(rows: Sequence[SchedulerRow]) -> None:
    out = console()
    if not rows:
        out.print("No GPU of this host can carry vGPUs now; see: gpuvirt doctor")
        return
    table = Table(COLUMNS)
    for row in rows:
        policy = row.scheduler.policy.value if row.scheduler is not None else "unknown"
        ms = row.scheduler.timeslice_ms if row.scheduler is not None else None
        kept = row.kept.text if row.kept is not None else NOTHING
        table.add(row.gpu, policy, NOTHING if ms is None else f"{ms} ms", kept)
    table.print(out)
    for row in rows:
        if row.reason is not None:
            render.say_reason(out, row.reason, style="yellow")


def set_scheduler(here: Host, roots: HostRoots, address: str, order: Order, *, output: Output) -> None:
    """Set a scheduler, and keep it if the order says so; exit with 1 if either failed."""
    seen = observe(here.change_host, here.inputs, None)
    (gpu,) = vgpuhost.gpus_named(seen, [address])
    result = _set(here, roots, seen, gpu, order)
    if not render.print_document(result, output):
        _print_result(result, order)
    if result.reasons:
        raise typer.Exit(1)


def _set(here: Host, roots: HostRoots, seen: HostObservation, gpu: PciAddress, order: Order) -> SchedulerResult:
    plan = byhand.scheduling(seen, gpu, order.scheduler)
    steps, reasons = tuple(step.text for step in plan.steps), (*plan.refusals, *plan.pending)
    if plan.steps and not order.dry_run:
        found = in_worker(
            gpu,
            lambda: byhand.set_scheduler(
                here.change_host, gpu, order.scheduler, here.inputs, lambda _: None, seen.inventory
            ),
            steps,
        )
        reasons = (found,) if isinstance(found, Reason) else found
    persisted = order.persist and {reason.code for reason in reasons} <= PERSISTABLE
    if persisted and not order.dry_run:
        failures = _persist(here, roots, gpu, order.scheduler)
        reasons, persisted = (*reasons, *failures), not failures
    return SchedulerResult(gpu, order.scheduler, steps, reasons, persisted)


def _persist(here: Host, roots: HostRoots, gpu: PciAddress, scheduler: Scheduler) -> tuple[Reason, ...]:
    try:
        with gate_at(here.change_host.locks).modules():
            return moduleoptions.persist(here.change_host.kernel, roots, gpu, scheduler)
    except (OSError, DamagedError, UnitBusyError) as error:
        return (refusals.failed(f"write {FILE}", gpu, Seen("", str(error))),)


def _print_result(result: SchedulerResult, order: Order) -> None:
    out = console()
    for step in result.steps if order.dry_run else ():
        out.print(step, soft_wrap=True)
    for reason in result.reasons:
        render.say_reason(out, reason, style="yellow")
    if not result.reasons:
        has = "would have" if order.dry_run and result.steps else "has"
        already = "" if result.steps else " already"
        line = f"{result.gpu}: {has} the vGPU scheduler {result.scheduler.text}{already}"
        say(out, line, style="green")
    if result.persisted:
        kept = "would be kept" if order.dry_run else "is kept"
        say(
            out,
            f"{result.gpu}: {result.scheduler.text} {kept} in {FILE}, which modprobe reads when it loads the driver",
        )
