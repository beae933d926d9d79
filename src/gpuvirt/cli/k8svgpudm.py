"""`nvidia-k8s-vgpu-dm`, by the name and with the options of NVIDIA's program: an agent that carves beside its plugin.

It follows the node's label, as the original does: sets the labels by which the operator takes its device plugin and its
validator away, carves, puts the labels back, and tells the node's state. Where the original removes vGPUs that machines
have, runs into a time limit with the labels left behind, or gives up, this one waits, puts back, and tries again. It
does not stop the host's services and does not reboot it: whoever keeps a GPU from its mode is named instead.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from gpuvirt.apps.logs import LogFormat, set_up
from gpuvirt.apps.node import NodeOptions, run_until_stopped
from gpuvirt.cli import apiserver, options
from gpuvirt.errors import ConfigError, InvalidIdError
from gpuvirt.facts.ids import Namespace, NodeName, parse_namespace, parse_node_name
from gpuvirt.hardware.kernel import RealKernel
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.node.change.site import site_of
from gpuvirt.node.published import statefile
from gpuvirt.paths import HostRoots, KubeletPaths

T = TypeVar("T")

log = logging.getLogger(__name__)

app = typer.Typer(
    name="nvidia-k8s-vgpu-dm",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
def run(  # noqa: PLR0913  one parameter an option
    *,
    kubeconfig: apiserver.KubeConfigOption = None,
    node_name: Annotated[
        str,
        typer.Option("--node-name", "-n", envvar="NODE_NAME", metavar="NAME", help="The node whose label is followed."),
    ] = "",
    namespace: Annotated[
        str,
        typer.Option("--namespace", "-ns", envvar="NAMESPACE", metavar="NAME", help="Where NVIDIA's operands run."),
    ] = "",
    config_file: Annotated[
        str, typer.Option("--config-file", "-f", envvar="CONFIG_FILE", metavar="FILE", help="vGPU configs.")
    ] = "",
    default: Annotated[
        str,
        typer.Option(
            "--default-vgpu-config",
            "-d",
            envvar="DEFAULT_VGPU_CONFIG",
            metavar="NAME",
            help="The config of a node without the label.",
        ),
    ] = "",
    host_root: Annotated[
        Path,
        typer.Option(
            "--host-root-mount", "-m", envvar="HOST_ROOT_MOUNT", metavar="DIR", help="Where the host's / is seen."
        ),
    ] = Path("/host"),
    driver_root: Annotated[
        Path,
        typer.Option(
            "--driver-root-ctr-path",
            "-a",
            envvar="DRIVER_ROOT_CTR_PATH",
            metavar="DIR",
            help="Where the driver's / is seen.",
        ),
    ] = Path("/driver-root"),
    kubelet_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="GPUVIRT_KUBELET_DIR",
            show_default="var/lib/kubelet below the host's root",
            metavar="DIR",
            help="The kubelet's own folder.",
        ),
    ] = None,
    state_file: Annotated[
        str,
        typer.Option(
            "--host-mig-manager-state-file", "-o", envvar="HOST_MIG_MANAGER_STATE_FILE", help="Taken, and not used."
        ),
    ] = "",
    kubelet_service: Annotated[
        str,
        typer.Option(
            "--host-kubelet-systemd-service", "-k", envvar="HOST_KUBELET_SYSTEMD_SERVICE", help="Taken, and not used."
        ),
    ] = "",
    clients_file: Annotated[
        str, typer.Option("--gpu-clients-file", "-g", envvar="GPU_CLIENTS_FILE", help="Taken, and not used.")
    ] = "",
    with_reboot: Annotated[
        bool, typer.Option("--with-reboot", "-r", envvar="WITH_REBOOT", help="Not done; a warning says so.")
    ] = False,
    with_shutdown: Annotated[
        bool,
        typer.Option(
            "--with-shutdown-host-gpu-clients",
            "-w",
            envvar="WITH_SHUTDOWN_HOST_GPU_CLIENTS",
            help="Not done; a warning says so.",
        ),
    ] = False,
) -> None:
    """Keep the vGPUs of this node as its label nvidia.com/vgpu.config says, beside NVIDIA's device plugin.

    It runs until SIGTERM or SIGINT. Starting and ending change no device.
    """
    set_up(LogFormat.TEXT, verbose=False)
    _warn_of_unused(
        {
            "--with-reboot": (with_reboot, "the host is not rebooted"),
            "--with-shutdown-host-gpu-clients": (with_shutdown, "the host's services are not stopped"),
            "--gpu-clients-file": (clients_file, "the host's services are not stopped"),
            "--host-mig-manager-state-file": (state_file, "no other MIG manager is told"),
            "--host-kubelet-systemd-service": (kubelet_service, "the kubelet is not stopped"),
        }
    )
    place = _Place(
        _known("--node-name", node_name, parse_node_name),
        _known("--namespace", namespace, parse_namespace),
        Path(_known("--config-file", config_file, str)),
        _known("--default-vgpu-config", default, str),
        HostRoots.under(host_root),
        driver_root,
        KubeletPaths(kubelet_dir or HostRoots.under(host_root).local(options.KUBELET)),
    )
    _run(place, kubeconfig)


@dataclass(frozen=True, slots=True)
class _Place:
    """What the program is told."""

    node: NodeName
    operands: Namespace
    config_file: Path
    default_config: str
    roots: HostRoots
    driver_root: Path
    kubelet: KubeletPaths


def _warn_of_unused(given: Mapping[str, tuple[str | bool, str]]) -> None:
    """Log each option that was given and has no effect, with what is not done."""
    for option, (value, what) in given.items():
        if value:
            log.warning("%s has no effect: %s", option, what)


def _known(option: str, text: str, parse: Callable[[str], T]) -> T:
    """Return what an option says; raise ConfigError where it says nothing, as the original does, or what can't be."""
    if not text:
        raise ConfigError("is missing or empty", where=option)
    try:
        return parse(text)
    except InvalidIdError as error:
        raise ConfigError(str(error), where=option) from error


def _run(place: _Place, kubeconfig: Path | None) -> None:
    cluster = apiserver.cluster_side(place.node, kubeconfig, config_map=None, operands=place.operands)
    if cluster is None:
        raise ConfigError(
            "no API server to ask: there is no service account's token here; expected one, or a kubeconfig",
            where="--kubeconfig",
        )
    if not place.config_file.exists():
        log.warning("there is no %s; until there is, the configs are the built-in ones", place.config_file)
    kernel = RealKernel(place.roots)
    run = NodeOptions(
        kernel=kernel,
        kubelet=place.kubelet,
        ledger=place.roots.local(options.LEDGER),
        state_file=place.roots.run / statefile.FILE,
        settings=Settings(mode=DesiredMode.VGPU, vgpu_config=place.default_config),
        ids=options.read_pci_ids(None, place.roots),
        vgpus_only=True,
        config_file=place.config_file,
        node_name=place.node,
        cluster=cluster,
        moves=site_of(kernel, place.roots, place.driver_root),
    )
    asyncio.run(run_until_stopped(run))
