"""`gpuvirt node`: the agent of a node: the whole one, the unprivileged one, or the one that only labels.

The agent of `gpuvirt node --labels-only` observes the host and labels the node, and can do nothing else. NVIDIA's
device plugin offers the GPUs of such a node, and NVIDIA's driver has them. This agent has no access to the kubelet,
changes no driver and no vGPU, takes no lease and writes no file of the host. It needs neither privileges nor
capabilities: `/sys` and `/proc/driver/nvidia` can be read by every user.
"""

import asyncio
import logging
import os
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from gpuvirt import documents
from gpuvirt.agent import published
from gpuvirt.agent.change.changehost import change_host_of
from gpuvirt.agent.change.gate.gate import plugin_gates
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.options import NodeOptions
from gpuvirt.agent.process import run_until_stopped
from gpuvirt.agent.published import Markers
from gpuvirt.agent.store import agentstate
from gpuvirt.cli.parameters import apiserver, options
from gpuvirt.cli.parameters.options import ListenOption, address_of
from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import NodeName, parse_config_map_name
from gpuvirt.facts.runtimes import enables_cdi
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.hardware.host.runtimes import read_runtimes
from gpuvirt.logs import LogFormat, set_up
from gpuvirt.model.change.vgpus.desiredvgpus import ConfigSet, read_config_set
from gpuvirt.model.desired import vgpuconfig
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import ConfigText
from gpuvirt.model.desired.settings import CdiUse, Settings
from gpuvirt.model.node.desirednode import RequestTerms
from gpuvirt.model.node.picture import NodeTerms
from gpuvirt.model.offers.namereview import ReviewTerms
from gpuvirt.paths import HostRoots, KubeletPaths

log = logging.getLogger(__name__)
PluginOnly = Annotated[
    bool,
    typer.Option(
        "--plugin-only",
        help="Only observe the host and offer devices, unprivileged; needs the kubelet's device-plugins folder and"
        " /dev/vfio.",
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
    settings = _plugin_only_settings(config) if plugin_only else options.read_settings(config)
    ids = options.read_pci_ids(pci_ids, roots)
    node = None if plugin_only else apiserver.node_name_of(node_name)
    config_map = parse_config_map_name(settings.vgpu_config_map)
    cluster = apiserver.cluster_side(node, kubeconfig, config_map, context=context)
    if node is not None and cluster is None:
        _report_unapplied(settings, node)
    terms = NodeTerms(
        settings,
        ids,
        notice=Intervals().of_notice if cluster is not None else None,
        review=ReviewTerms(expected=await_controller and cluster is not None),
        request=RequestTerms(node is not None, cluster is not None, _read_vgpu_configs(settings)),
    )
    agent = (_plugin_only_agent if plugin_only else _whole_agent)(roots, kubelet, terms)
    run = replace(
        agent,
        change_host=agent.change_host if settings.manages or cluster is not None else None,
        markers=Markers(validations_dir, roots.system) if validations_dir is not None else None,
        node_name=node,
        desired_state=agent.ledger.with_name(agentstate.DESIRED_FILE) if node is not None else None,
        listen=address_of(listen),
        service_manager=os.environ.get("NOTIFY_SOCKET"),  # noqa: TID251  systemd puts it there (sd_notify(3))
    )
    asyncio.run(run_until_stopped(run, cluster))


def _read_vgpu_configs(settings: Settings) -> ConfigSet:
    """Return the vGPU configs of the file that the settings name, none if they name none; raise ConfigError."""
    if settings.vgpu_config_file is None:
        return ConfigSet()
    text = documents.text_of(Path(settings.vgpu_config_file))
    vgpuconfig.parse(text, where=settings.vgpu_config_file)
    return read_config_set(ConfigText(text, settings.vgpu_config_file), ConfigSet())


def _report_unapplied(settings: Settings, node: NodeName) -> None:
    """Log a setting that waits for the node's labels, which no API server reports."""
    if settings.vgpu_config is not None:
        log.warning(
            "vgpu_config: %s is not applied: a label of node %s goes before this setting, and without an API server the"
            " agent does not know the labels; leave out --node-name, or give --kubeconfig",
            settings.vgpu_config,
            node,
        )


def _whole_agent(roots: HostRoots, kubelet: KubeletPaths, terms: NodeTerms) -> NodeOptions:
    """Return the options of an agent that offers GPUs and changes them."""
    kernel = RealKernel(roots)
    change_host = change_host_of(kernel, roots, kubelet)
    return _offering(
        NodeOptions(
            kernel=kernel,
            kubelet=kubelet,
            ledger=roots.local(options.LEDGER),
            gates=change_host.locks,
            state_file=roots.run / published.VIEW_FILE,
            terms=terms,
            change_host=change_host,
            tools=change_host.tools,
            cdi_folder=roots.run / published.CDI_FOLDER,
            proc=roots.proc,
            pods=_pods(roots, kubelet),
        ),
        roots,
    )


def _plugin_only_agent(roots: HostRoots, kubelet: KubeletPaths, terms: NodeTerms) -> NodeOptions:
    """Return the options of an unprivileged agent: its files are beside the kubelet's sockets, it changes nothing."""
    return _offering(
        NodeOptions(
            kernel=RealKernel(roots),
            kubelet=kubelet,
            ledger=options.plugin_only_ledger(kubelet),
            gates=plugin_gates(kubelet.device_plugins),
            state_file=None,
            terms=terms,
            plugin_only=True,
        ),
        roots,
    )


def labelling_agent(roots: HostRoots, settings: Settings) -> NodeOptions:
    """Return the options of an agent that only labels; all GPUs are for containers, whatever `settings` say."""
    return NodeOptions(
        kernel=RealKernel(roots),
        kubelet=KubeletPaths(options.KUBELET_DIR),
        ledger=Path(options.LEDGER),  # of the agent's own container
        gates=Path("/run/gpuvirt/gate"),  # of the same container, and never used: the agent allocates nothing
        state_file=None,
        terms=NodeTerms(
            replace(settings, mode=DesiredMode.CONTAINER, modes={}, workload_label=False),
            options.read_pci_ids(None, roots),
            review=ReviewTerms(),
            vgpus_only=True,
        ),
        plugin_only=True,
        labels_only=True,
    )


def _plugin_only_settings(config: Path | None) -> Settings:
    """Return the settings; raise ConfigError for one that an unprivileged agent can't follow."""
    settings = options.read_settings(config)
    if settings.cdi is CdiUse.ANSWERS:
        raise ConfigError(
            "answers can't name CDI devices with --plugin-only, which writes no CDI specs; expected none or files",
            where=str(config),
            path="$.cdi",
        )
    if settings.manages:
        raise ConfigError(
            "drivers of GPUs can't be changed with --plugin-only, which may not write to the host; expected unmanaged",
            where=str(config),
            path="$.mode" if settings.mode is not DesiredMode.UNMANAGED else "$.modes",
        )
    return settings


def _offering(agent: NodeOptions, roots: HostRoots) -> NodeOptions:
    """Return the options with what an agent that offers devices reads of the runtime and of the driver."""
    return replace(
        agent,
        cdi_folders=(roots.system / "etc/cdi",),
        cdi_enabled=lambda: enables_cdi(read_runtimes(RealKernel(HostRoots.under(roots.system)))),
        system_root=roots.system,
        driver_root=roots.run / "nvidia/driver",
    )


def _pods(roots: HostRoots, kubelet: KubeletPaths) -> Path | None:
    """Return the folder of the kubelet's pods, which the agent sees below the host's `/`."""
    usual = KubeletPaths(Path("/var/lib/kubelet"))
    return roots.system / usual.pods.relative_to("/") if kubelet == usual else None
