"""`gpuvirt node`: the agent."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from gpuvirt.apps.logs import LogFormat, set_up
from gpuvirt.apps.node import run_until_stopped
from gpuvirt.cli.parameters import apiserver, options
from gpuvirt.cli.parameters.options import ListenOption, address_of
from gpuvirt.cli.services.agentoptions import labelling_agent, plugin_only_agent, plugin_only_settings, whole_agent
from gpuvirt.facts.ids import NodeName, parse_config_map_name
from gpuvirt.model.desired.settings import Settings
from gpuvirt.node.published.markers import Markers
from gpuvirt.node.store import desiredstatestore
from gpuvirt.paths import HostRoots, KubeletPaths

log = logging.getLogger(__name__)
PluginOnly = Annotated[
    bool,
    typer.Option(
        "--plugin-only",
        help="Only observe and offer, unprivileged; needs the kubelet's device-plugins folder and /dev/vfio.",
    ),
]
LabelsOnly = Annotated[
    bool,
    typer.Option(
        "--labels-only",
        help="Only observe, unprivileged, and label the node with the type of its vGPUs, as in mode container.",
    ),
]
ValidationsDir = Annotated[
    Path | None,
    typer.Option(
        envvar="GPUVIRT_VALIDATIONS_DIR",
        file_okay=False,
        metavar="DIR",
        help="Folder of the files by which NVIDIA's operands wait for each other (/run/nvidia/validations).",
    ),
]
AwaitController = Annotated[
    bool,
    typer.Option(
        "--await-controller",
        envvar="GPUVIRT_AWAIT_CONTROLLER",
        help="Register a new resource only after the controller has reported in the node's GpuNode whether KubeVirt"
        " offers it itself; wait at most 30 s.",
    ),
]


def node(  # noqa: PLR0913  one parameter an option
    *,
    host_root: options.HostRoot = options.ROOT,
    system_root: options.SystemRoot = None,
    kubelet_dir: options.KubeletDir = options.KUBELET_DIR,
    config: options.Config = None,
    pci_ids: options.PciIdsFile = None,
    node_name: apiserver.NodeNameOption = None,
    kubeconfig: apiserver.KubeConfigOption = None,
    context: apiserver.ContextOption = "",
    plugin_only: PluginOnly = False,
    labels_only: LabelsOnly = False,
    validations_dir: ValidationsDir = None,
    await_controller: AwaitController = False,
    listen: ListenOption,
    log_format: options.LogFormatOption = LogFormat.TEXT,
    verbose: options.Verbose = False,
) -> None:
    """Run the agent of this node: offer its GPUs to the kubelet.

    The agent runs until SIGTERM or SIGINT. Starting or stopping it changes no device, so it may be restarted at any
    time.
    """
    set_up(log_format, verbose=verbose)
    if labels_only:
        side = apiserver.labels_side(apiserver.node_name_of(node_name), kubeconfig, context)
        observer = labelling_agent(HostRoots.under(host_root), options.read_settings(config))
        asyncio.run(run_until_stopped(replace(observer, listen=address_of(listen)), side))
        return
    roots = HostRoots.under(host_root, system_root)
    kubelet = KubeletPaths.seen_through(kubelet_dir, roots.system)
    settings = plugin_only_settings(config) if plugin_only else options.read_settings(config)
    ids = options.read_pci_ids(pci_ids, roots)
    agent = (plugin_only_agent if plugin_only else whole_agent)(roots, kubelet, settings, ids)
    node = None if plugin_only else apiserver.node_name_of(node_name)
    config_map = parse_config_map_name(settings.vgpu_config_map)
    cluster = apiserver.cluster_side(node, kubeconfig, config_map, context=context)
    if node is not None and cluster is None:
        _report_unapplied(settings, node)
    run = replace(
        agent,
        change_host=agent.change_host if settings.manages or cluster is not None else None,
        markers=Markers(validations_dir, roots.system) if validations_dir is not None else None,
        node_name=node,
        vgpu_configs=options.read_vgpu_configs(settings),
        desired_state=agent.ledger.with_name(desiredstatestore.FILE) if node is not None else None,
        watches_gpu_node=cluster is not None,
        awaits_controller=await_controller and cluster is not None,
        writes_node_counts=cluster is not None,
        listen=address_of(listen),
        service_manager=os.environ.get("NOTIFY_SOCKET"),  # noqa: TID251  systemd puts it there (sd_notify(3))
    )
    asyncio.run(run_until_stopped(run, cluster))


def _report_unapplied(settings: Settings, node: NodeName) -> None:
    """Log a setting that waits for the node's labels, which no API server reports."""
    if settings.vgpu_config is not None:
        log.warning(
            "vgpu_config: %s is not applied: a label of node %s goes before this setting, and without an API server the"
            " agent does not know the labels; leave out --node-name, or give --kubeconfig",
            settings.vgpu_config,
            node,
        )
