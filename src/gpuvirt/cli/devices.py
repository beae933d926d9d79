"""`gpuvirt devices`: the GPUs of this node, how each can be used, and why the rest can't."""

from typing import Annotated

import typer

from gpuvirt.cli import options
from gpuvirt.cli.options import Output
from gpuvirt.paths import HostRoots


def devices(
    *,
    host_root: options.HostRoot = options.ROOT,
    config: options.Config = None,
    pci_ids: options.PciIdsFile = None,
    output: options.OutputFormat = Output.TABLE,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="Show audio, USB and NVSwitch functions that are not offered, too.")
    ] = False,
) -> None:
    """Show the GPUs of this node: mode, driver, users, what each is offered as, and why not.

    Where the agent runs, this is what the agent sees; elsewhere the host is looked at now, and changed in no way.
    """
    from gpuvirt.cli import render
    from gpuvirt.clock import RealClock
    from gpuvirt.hardware.kernel import RealKernel
    from gpuvirt.node import onelook, statefile

    roots = HostRoots.under(host_root)
    kernel, clock = RealKernel(roots), RealClock()
    view = statefile.read(roots.run / statefile.FILE, clock.now(), onelook.boot_id(kernel))
    if view is None:
        settings, ids = options.read_settings(config), options.read_pci_ids(pci_ids, roots)
        view = onelook.take(kernel, settings, ids, clock)
    if output is Output.JSON:
        render.json_lines(view)
    else:
        render.devices(view, every=every)
