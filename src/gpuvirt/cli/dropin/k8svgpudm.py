"""`nvidia-k8s-vgpu-dm`, with the name and options of NVIDIA's program: an agent that applies vGPU configs.

The agent follows the node's label beside NVIDIA's device plugin, as the original does. It sets the labels by which
NVIDIA's operator removes its device plugin and validator, applies the vGPU config, restores the labels, and reports the
state in the node's label. The original removes vGPUs that VMs are using, and leaves its labels behind when it fails or
its time limit passes; this program waits, restores the labels, and tries again. It neither stops the host's services
nor reboots the host: the reason names the processes that keep a GPU from its mode.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer

from gpuvirt.agent import published
from gpuvirt.agent.change.changehost import change_host_of
from gpuvirt.agent.options import NodeOptions
from gpuvirt.agent.process import run_until_stopped
from gpuvirt.agent.store import agentstate
from gpuvirt.cli.parameters import apiserver, options
from gpuvirt.errors import ConfigError, InvalidIdError
from gpuvirt.facts.ids import Namespace, NodeName, parse_namespace, parse_node_name
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.logs import LogFormat, set_up
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.node.desirednode import RequestTerms
from gpuvirt.model.node.picture import NodeTerms
from gpuvirt.model.offers.namereview import ReviewTerms
from gpuvirt.paths import HostRoots, KubeletPaths

T = TypeVar("T")

log = logging.getLogger(__name__)

app = typer.Typer(
    name="nvidia-k8s-vgpu-dm",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


NodeNameOption = Annotated[
    str,
    typer.Option(
        "--node-name", "-n", envvar="NODE_NAME", metavar="NAME", help="The node whose label selects the vGPU config."
    ),
]
NamespaceOption = Annotated[
    str, typer.Option("--namespace", "-ns", envvar="NAMESPACE", metavar="NAME", help="Namespace of NVIDIA's operands.")
]
ConfigFile = Annotated[
    str, typer.Option("--config-file", "-f", envvar="CONFIG_FILE", metavar="FILE", help="vGPU configs.")
]
DefaultConfig = Annotated[
    str,
    typer.Option(
        "--default-vgpu-config",
        "-d",
        envvar="DEFAULT_VGPU_CONFIG",
        metavar="NAME",
        help="The vGPU config of a node without the label.",
    ),
]
HostRoot = Annotated[
    Path,
    typer.Option(
        "--host-root-mount", "-m", envvar="HOST_ROOT_MOUNT", metavar="DIR", help="Folder where the host's / is mounted."
    ),
]
DriverRoot = Annotated[
    Path,
    typer.Option(
        "--driver-root-ctr-path",
        "-a",
        envvar="DRIVER_ROOT_CTR_PATH",
        metavar="DIR",
        help="Folder where the driver's / is mounted.",
    ),
]
KubeletDir = Annotated[
    Path | None,
    typer.Option(
        envvar="GPUVIRT_KUBELET_DIR",
        show_default="var/lib/kubelet below the host's root",
        metavar="DIR",
        help="The kubelet's folder.",
    ),
]
StateFile = Annotated[
    str,
    typer.Option(
        "--host-mig-manager-state-file", "-o", envvar="HOST_MIG_MANAGER_STATE_FILE", help="Accepted and ignored."
    ),
]
KubeletService = Annotated[
    str,
    typer.Option(
        "--host-kubelet-systemd-service", "-k", envvar="HOST_KUBELET_SYSTEMD_SERVICE", help="Accepted and ignored."
    ),
]
ClientsFile = Annotated[
    str, typer.Option("--gpu-clients-file", "-g", envvar="GPU_CLIENTS_FILE", help="Accepted and ignored.")
]
WithReboot = Annotated[
    bool, typer.Option("--with-reboot", "-r", envvar="WITH_REBOOT", help="Accepted and ignored, with a warning.")
]
WithShutdown = Annotated[
    bool,
    typer.Option(
        "--with-shutdown-host-gpu-clients",
        "-w",
        envvar="WITH_SHUTDOWN_HOST_GPU_CLIENTS",
        help="Accepted and ignored, with a warning.",
    ),
]


@app.command()
def run(  # noqa: PLR0913  one parameter an option
    *,
    kubeconfig: apiserver.KubeConfigOption = None,
    node_name: NodeNameOption = "",
    namespace: NamespaceOption = "",
    config_file: ConfigFile = "",
    default: DefaultConfig = "",
    host_root: HostRoot = Path("/host"),
    driver_root: DriverRoot = Path("/driver-root"),
    kubelet_dir: KubeletDir = None,
    state_file: StateFile = "",
    kubelet_service: KubeletService = "",
    clients_file: ClientsFile = "",
    with_reboot: WithReboot = False,
    with_shutdown: WithShutdown = False,
) -> None:
    """Apply the vGPU config that this node's label nvidia.com/vgpu.config names, beside NVIDIA's device plugin.

    It runs until SIGTERM or SIGINT. Starting or stopping it changes no device.
    """
    set_up(LogFormat.TEXT, verbose=False)
    for option, (value, what) in {
        "--with-reboot": (with_reboot, "the host is not rebooted"),
        "--with-shutdown-host-gpu-clients": (with_shutdown, "the host's services are not stopped"),
        "--gpu-clients-file": (clients_file, "the host's services are not stopped"),
        "--host-mig-manager-state-file": (state_file, "no other MIG manager is notified"),
        "--host-kubelet-systemd-service": (kubelet_service, "the kubelet is not stopped"),
    }.items():
        if value:
            log.warning("%s has no effect: %s", option, what)
    roots = HostRoots.under(host_root)
    arguments = _Arguments(
        _parsed("--node-name", node_name, parse_node_name),
        _parsed("--namespace", namespace, parse_namespace),
        Path(_parsed("--config-file", config_file, str)),
        _parsed("--default-vgpu-config", default, str),
        roots,
        driver_root,
        KubeletPaths.seen_through(kubelet_dir or roots.local(options.KUBELET), roots.system),
    )
    _run(arguments, kubeconfig)


class _Arguments(msgspec.Struct, frozen=True):
    """The options of the program, parsed."""

    node: NodeName
    operands: Namespace
    config_file: Path
    default_config: str
    roots: HostRoots
    driver_root: Path
    kubelet: KubeletPaths


def _parsed(option: str, text: str, parse: Callable[[str], T]) -> T:
    """Return an option's value; raise ConfigError if it is invalid, or empty, as the original does."""
    if not text:
        raise ConfigError("is missing or empty", where=option)
    try:
        return parse(text)
    except InvalidIdError as error:
        raise ConfigError(str(error), where=option) from error


def _run(arguments: _Arguments, kubeconfig: Path | None) -> None:
    cluster = apiserver.cluster_side(arguments.node, kubeconfig, config_map=None, operands=arguments.operands)
    if cluster is None:
        raise apiserver.no_credentials()
    if not arguments.config_file.exists():
        log.warning("%s does not exist; the built-in vGPU configs apply until it does", arguments.config_file)
    kernel = RealKernel(arguments.roots)
    change_host = change_host_of(kernel, arguments.roots, arguments.kubelet, arguments.driver_root)
    ledger = arguments.roots.local(options.LEDGER)
    run = NodeOptions(
        kernel=kernel,
        kubelet=arguments.kubelet,
        ledger=ledger,
        gates=change_host.locks,
        state_file=arguments.roots.run / published.VIEW_FILE,
        terms=NodeTerms(
            Settings(mode=DesiredMode.VGPU, vgpu_config=arguments.default_config),
            options.read_pci_ids(None, arguments.roots),
            review=ReviewTerms(),
            vgpus_only=True,
            request=RequestTerms(in_cluster=True),
        ),
        config_file=arguments.config_file,
        node_name=arguments.node,
        desired_state=ledger.with_name(agentstate.DESIRED_FILE),
        change_host=change_host,
    )
    asyncio.run(run_until_stopped(run, cluster))
