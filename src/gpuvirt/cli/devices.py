"""`gpuvirt devices`: the GPUs of this node, how each can be used, and why the rest can't."""

import os
from typing import Annotated

import typer

from gpuvirt.cli import options, render
from gpuvirt.cli.options import Output
from gpuvirt.clock import RealClock
from gpuvirt.hardware.kernel import RealKernel
from gpuvirt.node.known import snapshot
from gpuvirt.node.published import statefile
from gpuvirt.paths import HostRoots, KubeletPaths


def devices(
    *,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    config: options.Config = None,
    pci_ids: options.PciIdsFile = None,
    output: options.OutputFormat = Output.TABLE,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="Show audio, USB and NVSwitch functions that are not offered, too.")
    ] = False,
) -> None:
    """Show the GPUs of this node: mode, driver, users, what each is offered as, and why not.

    Where the agent runs, this is what the agent sees; elsewhere, and where it is --plugin-only, the host is looked at
    now, and changed in no way. What pods have, and first names, are then those of the agent's ledger, if it left one.
    """
    roots = HostRoots.under(host_root)
    kubelet = KubeletPaths(kubelet_dir or roots.local(options.KUBELET))
    settings, ids = options.read_settings(config), options.read_pci_ids(pci_ids, roots)
    kernel, clock = RealKernel(roots), RealClock()
    # A simulated host has a /proc of its own, in which no agent is.
    procs = (roots.proc, HostRoots.under(options.ROOT).proc)
    view = statefile.read(roots.run / statefile.FILE, clock.now(), snapshot.boot_id(kernel), procs)
    if view is None:
        ledger = snapshot.read_ledger(roots.local(options.LEDGER), options.plugin_only_ledger(kubelet))
        view = snapshot.take(kernel, settings, ids, clock, ledger)
    if output is Output.JSON:
        render.json_lines(view)
    else:
        render.devices(view, every=every, sees_users=os.geteuid() == 0)
