"""`gpuvirt validate`: the checks of a node for containers, in containers before and beside NVIDIA's."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated

import typer

from gpuvirt import validator as validation
from gpuvirt.apps.logs import LogFormat, set_up
from gpuvirt.cli import apiserver, options, vfiohost
from gpuvirt.clock import RealClock
from gpuvirt.cluster.client import Client
from gpuvirt.errors import ConfigError
from gpuvirt.hardware.containerdriver import DriverRoots
from gpuvirt.model.change.state import UnitState
from gpuvirt.node.change.observation import observe
from gpuvirt.paths import HostPath, HostRoots
from gpuvirt.validator import Check

app = typer.Typer(
    name="validate",
    no_args_is_help=True,
    help="Check what a node for containers needs, and write the files that NVIDIA's operands wait for.",
)
FOLDER = Path("/run/nvidia/validations")
Folder = Annotated[
    Path,
    typer.Option(
        "--validations-dir",
        envvar="GPUVIRT_VALIDATIONS_DIR",
        file_okay=False,
        metavar="DIR",
        help="Where the files are.",
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Try again every 5 s until it holds, instead of failing.")]


@app.command()
def driver(
    *,
    system_root: options.SystemRoot = None,
    driver_root: Annotated[
        Path, typer.Option(envvar="GPUVIRT_DRIVER_ROOT", file_okay=False, metavar="DIR", help="Where it is seen here.")
    ] = Path("/run/nvidia/driver"),
    driver_dir: Annotated[
        str,
        typer.Option(
            envvar="GPUVIRT_DRIVER_DIR", metavar="DIR", help="The root of the driver's container on the host."
        ),
    ] = "/run/nvidia/driver",
    started: Annotated[
        str,
        typer.Option(
            envvar="GPUVIRT_DRIVER_STARTED",
            metavar="FILE",
            help="The file by which the driver's container says that it is up; '' where nobody writes one.",
        ),
    ] = "",
    validations_dir: Folder = FOLDER,
    wait: Wait = False,
) -> None:
    """Check that NVIDIA's driver works, on the host or in its container, and write where it is: driver-ready."""
    roots = DriverRoots(system_root or Path("/"), driver_root, HostPath(driver_dir), Path(started) if started else None)
    _validate(validation.driver_check(roots), validations_dir / validation.DRIVER, wait=wait)


@app.command()
def toolkit(*, validations_dir: Folder = FOLDER, wait: Wait = False) -> None:
    """Check that the container toolkit has given this container GPUs: toolkit-ready."""
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
    """Check that the node offers GPUs to containers: plugin-ready."""
    node = apiserver.node_name_of(node_name)
    if node is None:
        raise ConfigError("is needed: the node that is to offer GPUs", where="--node-name")
    found = apiserver.credentials_of(kubeconfig, context)
    if found is None:
        raise ConfigError("is needed: the pod has no service account's token", where="--kubeconfig")
    _validate(validation.plugin_check(Client(found), node), validations_dir / validation.PLUGIN, wait=wait)


@app.command()
def unused(
    *, host_root: options.HostRoot = options.ROOT, kubelet_dir: options.KubeletDirOfHost = None, wait: Wait = False
) -> None:
    """Check that no VM can be using a GPU of this host.

    It holds while no GPU on a VFIO driver is in use and none carries vGPUs. What can't be read counts as used. NVIDIA's
    driver-manager takes all GPUs of a host from their drivers, whoever uses them; it runs after this check.
    """

    def look() -> UnitState:
        here = vfiohost.host(vfiohost.account(HostRoots.under(host_root), kubelet_dir))
        return observe(here.site, here.inputs).host_state()

    _run(validation.validate(validation.unused_check(look), None, RealClock(), wait=wait))


@app.command("await")
def await_file(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The file's name: toolkit-ready.")],
    *,
    validations_dir: Folder = FOLDER,
) -> None:
    """Wait until a file is there."""
    if "/" in name or name.startswith("."):
        raise typer.BadParameter(f"{name!r} is none; expected toolkit-ready", param_hint="NAME")
    _run(validation.await_marker(validation.Marker(validations_dir / name), RealClock()))


@app.command()
def rest(*, validations_dir: Folder = FOLDER) -> None:
    """Stay until told to stop, and take the files away then."""
    _run(validation.rest(validations_dir))


def _validate(check: Check, file: Path, *, wait: bool) -> None:
    _run(validation.validate(check, validation.Marker(file), RealClock(), wait=wait))


def _run(what: Coroutine[None, None, None]) -> None:
    set_up(LogFormat.TEXT, verbose=False)
    asyncio.run(what)
