"""`gpuvirt validate`: the checks of a container node, which run in init containers of NVIDIA's operands."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated

import typer

from gpuvirt.agent import validator as validation
from gpuvirt.agent.change.observation import observe
from gpuvirt.agent.validator import Check
from gpuvirt.cli.changes import commandhost
from gpuvirt.cli.parameters import apiserver, options
from gpuvirt.clock import RealClock
from gpuvirt.errors import ConfigError
from gpuvirt.hardware.programs.containerdriver import DriverRoots
from gpuvirt.kube.client import Client
from gpuvirt.logs import LogFormat, set_up
from gpuvirt.model.change.state import UnitState
from gpuvirt.paths import HostPath, HostRoots

app = typer.Typer(
    name="validate",
    no_args_is_help=True,
    help="Run the checks of container nodes for NVIDIA's operands.",
)
FOLDER = Path("/run/nvidia/validations")
Folder = Annotated[
    Path,
    typer.Option(
        "--validations-dir",
        envvar="GPUVIRT_VALIDATIONS_DIR",
        file_okay=False,
        metavar="DIR",
        help="Folder of the files that NVIDIA's operands wait for.",
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Repeat the check every 5 s until it passes.")]


@app.command()
def driver(
    *,
    system_root: options.DriverSystemRoot = options.ROOT,
    driver_root: options.DriverRoot = options.DRIVER_ROOT,
    driver_dir: Annotated[
        str,
        typer.Option(envvar="GPUVIRT_DRIVER_DIR", metavar="DIR", help="Root of the driver's container on the host."),
    ] = "/run/nvidia/driver",
    started: Annotated[
        str,
        typer.Option(
            envvar="GPUVIRT_DRIVER_STARTED",
            metavar="FILE",
            help="File that the driver's container writes once it runs; '' if it writes none.",
        ),
    ] = "",
    validations_dir: Folder = FOLDER,
    wait: Wait = False,
) -> None:
    """Check NVIDIA's driver, and write driver-ready.

    The driver is on the host or in its container. The file names the driver's paths.
    """
    roots = DriverRoots(system_root, driver_root, HostPath(driver_dir), Path(started) if started else None)
    _validate(validation.driver_check(roots), validations_dir / validation.DRIVER, wait=wait)


@app.command()
def toolkit(*, validations_dir: Folder = FOLDER, wait: Wait = False) -> None:
    """Check the container toolkit, and write toolkit-ready.

    The check passes if the toolkit has added GPUs to this container.
    """
    _validate(validation.toolkit_check(), validations_dir / validation.TOOLKIT, wait=wait)


@app.command()
def plugin(
    *,
    node_name: apiserver.NodeNameOption = None,
    kubeconfig: apiserver.KubeConfigOption = None,
    context: apiserver.ContextOption = "",
    validations_dir: Folder = FOLDER,
    wait: Wait = False,
) -> None:
    """Check that the node offers GPUs, and write plugin-ready."""
    node = apiserver.node_name_of(node_name)
    if node is None:
        raise ConfigError("is missing: expected the node that offers GPUs", where="--node-name")
    found = apiserver.credentials_of(kubeconfig, context)
    if found is None:
        raise apiserver.no_credentials()
    _validate(validation.plugin_check(Client(found), node), validations_dir / validation.PLUGIN, wait=wait)


@app.command()
def unused(
    *, host_root: options.HostRoot = options.ROOT, kubelet_dir: options.KubeletDirOfHost = None, wait: Wait = False
) -> None:
    """Check that no VM uses a GPU of this host.

    The check passes while no GPU on a VFIO driver is in use, and no GPU carries vGPUs. A GPU whose files can't be read
    counts as used. NVIDIA's driver-manager runs after this check: it unbinds all GPUs of a host, also those in use.
    """

    def look() -> UnitState:
        here = commandhost.host(commandhost.account(HostRoots.under(host_root), kubelet_dir))
        return observe(here.change_host, here.inputs).host_state()

    _run(validation.validate(validation.unused_check(look), None, RealClock(), wait=wait))


@app.command("await")
def await_file(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the file: toolkit-ready.")],
    *,
    validations_dir: Folder = FOLDER,
) -> None:
    """Wait until a file exists."""
    if "/" in name or name.startswith("."):
        raise typer.BadParameter(f"{name!r} is not a file name; expected toolkit-ready", param_hint="NAME")
    _run(validation.await_marker(validation.Marker(validations_dir / name), RealClock()))


@app.command()
def rest(*, validations_dir: Folder = FOLDER) -> None:
    """Wait for SIGTERM, then remove the files."""
    _run(validation.rest(validations_dir))


def _validate(check: Check, file: Path, *, wait: bool) -> None:
    _run(validation.validate(check, validation.Marker(file), RealClock(), wait=wait))


def _run(what: Coroutine[None, None, None]) -> None:
    set_up(LogFormat.TEXT, verbose=False)
    asyncio.run(what)
