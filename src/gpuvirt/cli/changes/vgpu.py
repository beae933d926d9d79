"""`gpuvirt vgpu`: lists, creates and deletes vGPUs, applies vGPU configs, and sets the scheduler of vGPUs."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gpuvirt.agent.change import unitchange
from gpuvirt.agent.change.gate.gate import UnitBusyError, gate_at
from gpuvirt.agent.change.observation import HostObservation, observe
from gpuvirt.agent.store.files import replace_file
from gpuvirt.cli.changes import vgpuchanges
from gpuvirt.cli.changes.commandhost import Host, in_worker
from gpuvirt.cli.formats import Layout, ListFormat, ListOutput, Output
from gpuvirt.cli.output import changesrender, fleetrender, render, watching
from gpuvirt.cli.output.tables import NOTHING, Column, Table, console, say
from gpuvirt.cli.parameters import apiserver, completion, fleet, options
from gpuvirt.cli.parameters.vgpuconfigs import Address, ConfigFile, Selected, ValidConfig
from gpuvirt.errors import ConfigError, DamagedError
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA, Unread
from gpuvirt.facts.vgpu import Scheduler, SchedulerPolicy
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.host.platform import read_modprobe
from gpuvirt.hardware.programs.smireport import read_scheduler
from gpuvirt.model.change.moduleoption import FILE, conflicting_options, kept, merge
from gpuvirt.model.change.vgpus.scheduling import registry_scheduler, registry_value
from gpuvirt.model.desired import vgpuconfig
from gpuvirt.model.desired.vgpuconfig import builtin_configs
from gpuvirt.model.inventory.nearness import correction
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, refusals
from gpuvirt.paths import HostRoots

scheduler_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show and set the scheduler of time-sliced vGPUs.\n\nThe commands use NVIDIA's nvidia-smi.",
)

SCHEDULER_COLUMNS = (
    Column("GPU"),
    Column("POLICY"),
    Column("TIME SLICE"),
    Column("WHEN THE DRIVER IS LOADED", folds=True),
)
PERSISTABLE = frozenset({ReasonCode.VGPU_IN_USE})
"""Reasons that prevent setting a scheduler now, but not keeping it for the driver's next load."""


class SchedulerOrder(msgspec.Struct, frozen=True):
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


@scheduler_app.command("get")
def get_scheduler(
    addresses: options.GpuAddresses = None,
    *,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    output: options.ListFormat = ListOutput.TABLE,
    no_headers: options.NoHeaders = False,
) -> None:
    """Show each GPU's vGPU scheduler, now and at the driver's next load."""
    here = vgpuchanges.vgpu_host(host_root, kubelet_dir)
    show_schedulers(here, HostRoots.under(host_root), addresses or (), ListFormat(output, no_headers))


@scheduler_app.command("set")
def set_scheduler_of_gpu(  # noqa: PLR0913  a command's options
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
    here = vgpuchanges.vgpu_host(host_root, kubelet_dir, assume_unallocated=assume_unallocated)
    order = SchedulerOrder(Scheduler(policy, timeslice_ms), persist=persist, dry_run=dry_run)
    set_scheduler(here, HostRoots.under(host_root), address, order, output=output)


def show_schedulers(here: Host, roots: HostRoots, addresses: Collection[str], listing: ListFormat) -> None:
    """Print schedulers; exit with 1 if nvidia-smi did not report one."""
    seen = observe(here.change_host, here.inputs, None)
    chosen = vgpuchanges.gpus_named(seen, addresses) or _nvidia_gpus(seen)
    kept = kept_schedulers(roots)
    rows = [_scheduler_row(seen, gpu, kept.get(gpu)) for gpu in chosen]
    why_none = vgpuchanges.no_vgpu_hosts(seen, chosen or sorted(seen.inventory.gpus))
    render.print_list(rows, (row.gpu for row in rows), partial(_print_schedulers, rows, why_none), listing)
    if any(row.reason is not None for row in rows):
        raise typer.Exit(1)


def _nvidia_gpus(seen: HostObservation) -> list[PciAddress]:
    gpu_states = vgpuchanges.gpu_states(seen)
    return [gpu for gpu in gpu_states if seen.inventory.facts.functions[gpu].id.vendor == NVIDIA]


def _scheduler_row(seen: HostObservation, gpu: PciAddress, kept: Scheduler | None) -> SchedulerRow:
    found = read_scheduler(seen.change_host.tools, gpu)
    if isinstance(found, Unread):
        return SchedulerRow(gpu, None, kept, refusals.unread(gpu, found))
    return SchedulerRow(gpu, found, kept)


def _print_schedulers(rows: Sequence[SchedulerRow], why_none: Iterable[Reason], layout: Layout) -> None:
    out = console()
    if not rows:
        changesrender.no_vgpu_hosts(out, why_none, layout)
        return
    table = Table(SCHEDULER_COLUMNS)
    for row in rows:
        policy = row.scheduler.policy.value if row.scheduler is not None else "unknown"
        ms = row.scheduler.timeslice_ms if row.scheduler is not None else None
        kept = row.kept.text if row.kept is not None else NOTHING
        table.add(row.gpu, policy, NOTHING if ms is None else f"{ms} ms", kept)
    table.print(out, layout)
    for row in rows:
        if row.reason is not None and layout.headings:
            render.say_reason(out, row.reason, style="yellow")


def set_scheduler(here: Host, roots: HostRoots, address: str, order: SchedulerOrder, *, output: Output) -> None:
    """Set a scheduler, and keep it if the order says so; exit with 1 if either failed."""
    seen = observe(here.change_host, here.inputs, None)
    (gpu,) = vgpuchanges.gpus_named(seen, [address])
    result = _set_scheduler(here, roots, seen, gpu, order)
    if not render.print_document(result, output):
        _print_result(result, order)
    if result.reasons:
        raise typer.Exit(1)


def _set_scheduler(
    here: Host, roots: HostRoots, seen: HostObservation, gpu: PciAddress, order: SchedulerOrder
) -> SchedulerResult:
    plan = unitchange.plan_scheduling(seen, gpu, order.scheduler)
    steps, reasons = tuple(step.text for step in plan.steps), (*plan.refusals, *plan.pending)
    if plan.steps and not order.dry_run:
        found = in_worker(
            gpu,
            lambda: unitchange.set_scheduler(
                here.change_host, gpu, order.scheduler, here.inputs, lambda _: None, seen.inventory
            ),
            steps,
        )
        reasons = (found,) if isinstance(found, Reason) else found
    persisted = order.persist and {reason.code for reason in reasons} <= PERSISTABLE
    if persisted and not order.dry_run:
        failures = _persist_scheduler(here, roots, gpu, order.scheduler)
        reasons, persisted = (*reasons, *failures), not failures
    return SchedulerResult(gpu, order.scheduler, steps, reasons, persisted)


def _persist_scheduler(here: Host, roots: HostRoots, gpu: PciAddress, scheduler: Scheduler) -> tuple[Reason, ...]:
    try:
        with gate_at(here.change_host.locks).modules():
            return write_module_options(here.change_host.kernel, roots, gpu, scheduler)
    except (OSError, DamagedError, UnitBusyError) as error:
        return (refusals.failed(f"write {FILE}", gpu, Seen("", str(error))),)


def _print_result(result: SchedulerResult, order: SchedulerOrder) -> None:
    out = console()
    changesrender.print_planned(out, result.steps if order.dry_run else ())
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


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Create and delete vGPUs, and apply vGPU configs.\n\nNo command removes a vGPU that is in use.",
)
app.add_typer(scheduler_app, name="scheduler")

Rebind = Annotated[
    bool, typer.Option("--rebind", help="First bind GPUs that are on a VFIO driver to their original drivers.")
]


@app.command("apply")
def apply(  # noqa: PLR0913  a command's options
    *,
    config_file: ConfigFile = None,
    selected: Selected = None,
    rebind: Rebind = False,
    dry_run: options.DryRun = False,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    assume_unallocated: options.AssumeUnallocated = False,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Apply a vGPU config to the GPUs that it names.

    The command creates the config's vGPUs, and removes unused vGPUs that the config does not include. It never removes
    a vGPU that is in use.
    """
    where = vgpuchanges.AppliedHost(host_root, kubelet_dir, output, assume_unallocated)
    vgpuchanges.apply(where, config_file, selected, rebind=rebind, dry_run=dry_run)


@app.command("assert")
def assert_(
    *,
    config_file: ConfigFile = None,
    selected: Selected = None,
    valid_config: ValidConfig = False,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Check whether GPUs carry the vGPUs of a vGPU config.

    The command exits with 0 if they do. Otherwise it prints the missing steps and the reasons, and exits with 1.
    """
    where = vgpuchanges.AppliedHost(host_root, kubelet_dir, output)
    vgpuchanges.check(where, config_file, selected, valid_only=valid_config)


@app.command("list")
def list_(  # noqa: PLR0913  a command's options
    *,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    output: options.ListFormat = ListOutput.TABLE,
    no_headers: options.NoHeaders = False,
    node: fleet.NodeOption = None,
    all_nodes: fleet.AllNodesOption = False,
    old_all_nodes: fleet.OldAllNodesOption = False,
    selector: fleet.SelectorOption = "",
    watch: watching.WatchOption = False,
    kubeconfig: fleet.ClusterFile = None,
    context: apiserver.ContextOption = "",
) -> None:
    """List the vGPUs of this host or cluster, and their users."""
    every_node, listing = all_nodes or old_all_nodes, ListFormat(output, no_headers)
    gpu_nodes = fleet.asked_nodes(node, kubeconfig, context, every=every_node, selector=selector, watch=watch)
    if gpu_nodes is not None:

        async def read() -> list[fleetrender.NodeVgpu]:
            return fleetrender.vgpus_of(await gpu_nodes())

        def print_nodes(rows: list[fleetrender.NodeVgpu]) -> None:
            render.print_list(rows, (row.id for row in rows), partial(fleetrender.vgpus, rows), listing)

        watching.print_read(read, print_nodes, listing, watch=watch)
        return
    here = vgpuchanges.vgpu_host(host_root, kubelet_dir)
    rows = changesrender.rows_of(vgpuchanges.gpu_states(observe(here.change_host, here.inputs, None)))
    ids = (row.id for row in rows)
    render.print_list(rows, ids, partial(changesrender.vgpus, rows), listing)


@app.command("types")
def types(
    addresses: options.GpuAddresses = None,
    *,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    output: options.ListFormat = ListOutput.TABLE,
    no_headers: options.NoHeaders = False,
) -> None:
    """List each GPU's vGPU types, and how many vGPUs fit."""
    here = vgpuchanges.vgpu_host(host_root, kubelet_dir)
    seen = observe(here.change_host, here.inputs, None)
    chosen = vgpuchanges.gpus_named(seen, addresses or sorted(seen.inventory.gpus))
    rows = changesrender.types_of(
        {gpu: gpu_state for gpu, gpu_state in vgpuchanges.gpu_states(seen).items() if gpu in chosen}
    )
    names = (row.name for row in rows)
    why_none = vgpuchanges.no_vgpu_hosts(seen, chosen)
    render.print_list(rows, names, partial(changesrender.types, rows, why_none), ListFormat(output, no_headers))


@app.command("create")
def create(  # noqa: PLR0913  a command's options
    address: Address,
    vgpu_type: Annotated[
        str,
        typer.Argument(metavar="TYPE", autocompletion=completion.types, help="A vGPU type: A10-4Q, or NVIDIA A10-4Q."),
    ],
    *,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Number of vGPUs.")] = 1,
    dry_run: options.DryRun = False,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    assume_unallocated: options.AssumeUnallocated = False,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Create vGPUs on a GPU, in addition to its existing ones."""
    where = vgpuchanges.AppliedHost(host_root, kubelet_dir, output, assume_unallocated)
    vgpuchanges.create(where, address, vgpu_type, count, dry_run=dry_run)


@app.command("delete")
def delete(
    vgpus: Annotated[list[str], typer.Argument(metavar="VGPU...", help="Ids of vGPUs (gpuvirt vgpu list).")],
    *,
    dry_run: options.DryRun = False,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    assume_unallocated: options.AssumeUnallocated = False,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Remove vGPUs that are not in use.

    For a vGPU that is in use, the command prints the user, and exits with 1.
    """
    where = vgpuchanges.AppliedHost(host_root, kubelet_dir, output, assume_unallocated)
    vgpuchanges.delete(where, vgpus, dry_run=dry_run)


@app.command("default-config")
def default_config(
    *,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="CONFIG",
            autocompletion=completion.configs,
            help="Print only this config: default, A10-4Q, ...",
        ),
    ] = None,
) -> None:
    """Print the built-in vGPU configs as a config file.

    There is one config for each vGPU type, and `default`. NVIDIA's vgpu-device-manager accepts the file, too.
    """
    configs = builtin_configs()
    if name is not None and name not in configs:
        hint = correction(name, configs) or "`gpuvirt vgpu default-config` prints them all"
        raise ConfigError(f"there is no built-in config {name}; {hint}", where="--name")
    print(vgpuconfig.written(configs if name is None else {name: configs[name]}), end="")


def write_module_options(
    kernel: Kernel, roots: HostRoots, gpu: PciAddress, desired: Scheduler | None
) -> tuple[Reason, ...]:
    """Set a GPU's scheduler for each load of the driver, or remove the setting (None); return why it was not written.

    Raises DamagedError if gpuvirt's file has lines that gpuvirt has not written, and OSError.
    """
    obstacles = conflicting_options(read_modprobe(kernel), gpu) if desired is not None else ()
    if obstacles:
        return obstacles
    path = roots.local(FILE)
    existing = _module_options(path)
    text = merge(existing, gpu, registry_value(desired) if desired is not None else None)
    if text is None:
        path.unlink(missing_ok=True)
    elif text != existing:
        replace_file(path, text.encode(), mode=0o644)
    return ()


def kept_schedulers(roots: HostRoots) -> Mapping[PciAddress, Scheduler | None]:
    """Return the schedulers in gpuvirt's file, None for a value that sets none.

    Raises DamagedError if the file has lines of other programs, and OSError.
    """
    values = kept(_module_options(roots.local(FILE)) or "")
    return {gpu: registry_scheduler(value) for gpu, value in values.items()}


def _module_options(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None  # unknown: nothing, the file does not exist
