"""`gpuvirt devices`: the GPUs of this host or of other nodes, and what each is offered as."""

import os
from functools import partial
from typing import Annotated

import typer

from gpuvirt.agent import published
from gpuvirt.agent.change.typenames import asking
from gpuvirt.agent.known import snapshot
from gpuvirt.cli.formats import Layout, ListFormat, ListOutput
from gpuvirt.cli.output import fleetrender, render, watching
from gpuvirt.cli.parameters import apiserver, fleet, options
from gpuvirt.clock import RealClock
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.paths import HostRoots, KubeletPaths


def devices(  # noqa: PLR0913  one parameter an option
    *,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    config: options.Config = None,
    pci_ids: options.PciIdsFile = None,
    output: options.ListFormat = ListOutput.TABLE,
    no_headers: options.NoHeaders = False,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="Also list audio, USB and NVSwitch functions that are not offered.")
    ] = False,
    node: fleet.NodeOption = None,
    all_nodes: fleet.AllNodesOption = False,
    old_all_nodes: fleet.OldAllNodesOption = False,
    selector: fleet.SelectorOption = "",
    watch: watching.WatchOption = False,
    kubeconfig: fleet.ClusterFile = None,
    context: apiserver.ContextOption = "",
) -> None:
    """List the GPUs of this host or cluster, and their resources.

    The list shows each GPU's mode, driver, users and vGPUs, and the reason why a GPU is not offered. The command
    changes nothing. If the agent runs on this host, the list is the agent's. Without an agent, or with an agent in
    --plugin-only, the command reads the host, and takes allocations and resource names from the agent's ledger. With
    --node or --all-nodes, it shows nodes of the cluster, as their agents report them in GpuNodes.
    """
    every_node, listing = all_nodes or old_all_nodes, ListFormat(output, no_headers)
    gpu_nodes = fleet.asked_nodes(node, kubeconfig, context, every=every_node, selector=selector, watch=watch)
    if gpu_nodes is not None:

        async def read() -> list[fleetrender.NodeDevices]:
            return fleetrender.devices_of(await gpu_nodes())

        def print_nodes(rows: list[fleetrender.NodeDevices]) -> None:
            render.print_list(rows, (f"node/{row.node}" for row in rows), partial(fleetrender.devices, rows), listing)

        watching.print_read(read, print_nodes, listing, watch=watch)
        return
    roots = HostRoots.under(host_root)
    kubelet = KubeletPaths(kubelet_dir or roots.local(options.KUBELET))
    settings, ids = options.read_settings(config), options.read_pci_ids(pci_ids, roots)
    kernel, clock = RealKernel(roots), RealClock()
    # An agent of a simulated host runs in this host's /proc.
    procs = (roots.proc, HostRoots.under(options.ROOT).proc)
    view = published.read_view(roots.run / published.VIEW_FILE, clock.monotonic_s(), snapshot.boot_id(kernel), procs)
    if view is None:
        ledger = snapshot.read_ledger(roots.local(options.LEDGER), options.plugin_only_ledger(kubelet))
        view = snapshot.take(kernel, settings, ids, clock, ledger, asking(roots))
    names = (row.address for row in render.rows_of(view, every=every))

    def show(layout: Layout) -> None:
        render.devices(view, every=every, sees_users=os.geteuid() == 0, layout=layout)

    render.print_list(view, names, show, listing)
