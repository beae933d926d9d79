"""`gpuvirt vgpu scheduler`: how the time-sliced vGPUs of a GPU share its time."""

from typing import Annotated

import typer

from gpuvirt.cli import options, schedulers, vgpuhost
from gpuvirt.cli.options import Output
from gpuvirt.cli.vgpuoptions import Address
from gpuvirt.facts.vgpu import Scheduler, SchedulerPolicy

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="How the time-sliced vGPUs of a GPU share its time; nvidia-smi tells and sets it.",
)


@app.command("get")
def get(
    addresses: options.GpuAddresses = None,
    *,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Show the vGPU scheduler that each GPU has, and the one that is kept for when its driver is loaded again."""
    here = vgpuhost.host(host_root, kubelet_dir)
    schedulers.get(here, schedulers.roots(host_root), addresses or (), as_json=output is Output.JSON)


@app.command("set")
def set_(  # noqa: PLR0913  a command's options
    address: Address,
    policy: Annotated[SchedulerPolicy, typer.Argument(metavar="best-effort|equal-share|fixed-share")],
    *,
    timeslice_ms: Annotated[
        int | None,
        typer.Option("--timeslice-ms", metavar="N", help="1 to 30 milliseconds; the driver's own without it."),
    ] = None,
    persist: Annotated[
        bool, typer.Option("--persist", help="Have the driver set it whenever it is loaded, too: a modprobe file.")
    ] = False,
    dry_run: options.DryRun = False,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    assume_unallocated: options.AssumeUnallocated = False,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Let a GPU's vGPUs share its time in another way, at once and until its driver is loaded again.

    It is not set while machines run on the GPU; `--persist` counts from the next load of the driver on all the same.
    """
    here = vgpuhost.host(host_root, kubelet_dir, assume_unallocated=assume_unallocated)
    roots = schedulers.roots(host_root)
    order = schedulers.Order(Scheduler(policy, timeslice_ms), persist=persist, dry_run=dry_run)
    schedulers.set_(here, roots, address, order, as_json=output is Output.JSON)
