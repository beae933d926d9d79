"""`gpuvirt vgpu scheduler`: shows and sets the scheduler of a GPU's time-sliced vGPUs."""

from typing import Annotated

import typer

from gpuvirt.cli.changes import schedulers, vgpuhost
from gpuvirt.cli.formats import Output
from gpuvirt.cli.parameters import options
from gpuvirt.cli.parameters.vgpuconfigs import Address
from gpuvirt.facts.vgpu import Scheduler, SchedulerPolicy

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show and set the scheduler of time-sliced vGPUs.\n\nThe commands use NVIDIA's nvidia-smi.",
)


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
    schedulers.get(here, schedulers.roots(host_root), addresses or (), output=output)


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
    """Set the vGPU scheduler of a GPU until its driver is loaded again.

    While VMs use vGPUs of the GPU, the command refuses to set it. With `--persist` it still writes the modprobe file,
    for the next load of the driver.
    """
    here = vgpuhost.host(host_root, kubelet_dir, assume_unallocated=assume_unallocated)
    roots = schedulers.roots(host_root)
    order = schedulers.Order(Scheduler(policy, timeslice_ms), persist=persist, dry_run=dry_run)
    schedulers.set_(here, roots, address, order, output=output)
