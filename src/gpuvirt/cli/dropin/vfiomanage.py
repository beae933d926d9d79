"""`vfio-manage`, with the name and options of NVIDIA's program, for an init container or a shell.

It does the same as `gpuvirt vfio`, but only to NVIDIA's devices. Where the original warns and exits with 0, this
program prints the reason for each device and exits with 1. `unbind` restores the original drivers, where NVIDIA's
program leaves devices without a driver.
"""

from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from gpuvirt.cli.changes import commandhost, vfio
from gpuvirt.cli.changes.commandhost import Host
from gpuvirt.cli.changes.vfio import Chosen
from gpuvirt.cli.formats import Output
from gpuvirt.cli.parameters import options
from gpuvirt.cli.podaccount import AllocationReader
from gpuvirt.cli.version import Version
from gpuvirt.facts.pci import NVIDIA, FunctionKind, PciFunction
from gpuvirt.hardware.functions.pci import read_function
from gpuvirt.hardware.usage.processes import shows_all
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu
from gpuvirt.paths import HostRoots

app = typer.Typer(
    name="vfio-manage",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Bind NVIDIA's GPUs to a VFIO driver, and unbind them.",
)


@app.callback()
def root(*, version: Version = False) -> None:
    """Bind NVIDIA's GPUs to a VFIO driver, and unbind them."""


Every = Annotated[bool, typer.Option("--all", "-a", help="All of NVIDIA's GPUs on this host.")]
DeviceId = Annotated[str | None, typer.Option("--device-id", "-d", metavar="ADDRESS", help="One device.")]
HostRoot = Annotated[
    Path,
    typer.Option(
        envvar="HOST_ROOT", exists=True, file_okay=False, metavar="DIR", help="Folder where the host's / is mounted."
    ),
]
BindSwitches = Annotated[bool, typer.Option("--bind-nvswitches", envvar="BIND_NVSWITCHES", help="NVSwitches, too.")]
UnbindSwitches = Annotated[bool, typer.Option("--unbind-nvswitches", envvar="BIND_NVSWITCHES", help="NVSwitches, too.")]


@app.command("bind")
def bind(
    *,
    every: Every = False,
    device_id: DeviceId = None,
    host_root: HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    assume_unallocated: options.AssumeUnallocated = False,
    nvswitches: BindSwitches = False,
) -> None:
    """Bind GPUs to the most specific VFIO driver."""
    account = commandhost.account(_roots(host_root), kubelet_dir, assume_unallocated=assume_unallocated)
    _manage(DesiredDriver.PASSTHROUGH, account, device_id, every=every, nvswitches=nvswitches)


@app.command("unbind")
def unbind(
    *,
    every: Every = False,
    device_id: DeviceId = None,
    host_root: HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    assume_unallocated: options.AssumeUnallocated = False,
    nvswitches: UnbindSwitches = False,
) -> None:
    """Bind GPUs back to their original drivers."""
    account = commandhost.account(_roots(host_root), kubelet_dir, assume_unallocated=assume_unallocated)
    _manage(DesiredDriver.NATIVE, account, device_id, every=every, nvswitches=nvswitches)


def _roots(host_root: Path) -> HostRoots:
    """Return the host's folders, with the `/proc` that shows all processes: the host's, or in some pods their own."""
    roots = HostRoots.under(host_root)
    own = HostRoots.under(options.ROOT).proc
    return replace(roots, proc=own) if shows_all(own) and not shows_all(roots.proc) else roots


def _manage(
    desired: DesiredDriver, account: AllocationReader, device_id: str | None, *, every: bool, nvswitches: bool
) -> None:
    if every == (device_id is not None):
        raise typer.BadParameter("give exactly one of --all and --device-id")
    host = replace(commandhost.host(account), unfit={})  # NVIDIA's program succeeds for a GPU that is bound already
    if device_id is not None and (why := _why_skipped(host, device_id, nvswitches=nvswitches)) is not None:
        typer.echo(f"{device_id}: {why}", err=True)
        return
    chosen = Chosen([device_id] if device_id else (), every, nvswitches, vendor=NVIDIA)
    vfio.change(host, DesiredGpu(desired), chosen, Output.TABLE, dry_run=False)


def _why_skipped(host: Host, device_id: str, *, nvswitches: bool) -> str | None:
    """Return why a device is skipped, None if it is not. Skipping is no failure, as for NVIDIA's program."""
    (address,) = commandhost.parsed([device_id])
    function = read_function(host.change_host.kernel, address, None)
    if not isinstance(function, PciFunction) or function.id.vendor != NVIDIA:
        return "not one of NVIDIA's devices; nothing is done"
    if function.kind is FunctionKind.NVSWITCH and not nvswitches:
        return "an NVSwitch, which is left alone unless BIND_NVSWITCHES or the option for it says otherwise"
    return None
