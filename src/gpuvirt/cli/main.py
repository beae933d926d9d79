"""The command `gpuvirt`: its subcommands, how it ends, and what it says when something is wrong.

Exit codes: 0 done, 1 failed, 2 used wrongly or configured wrongly.
"""

import os
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from gpuvirt import __version__
from gpuvirt.cli import (
    controller,
    demo,
    devices,
    discover,
    doctor,
    install,
    k8svgpudm,
    node,
    sim,
    status,
    support,
    uninstall,
    validate,
    vfio,
    vfiomanage,
    vgpu,
    vgpudm,
    why,
)
from gpuvirt.errors import ConfigError, GpuvirtError

FAILED = 1
USED_WRONGLY = 2

app = typer.Typer(
    name="gpuvirt",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="GPU virtualization for Kubernetes: the GPUs of a node as devices of virtual machines.",
)
app.command("devices")(devices.devices)
app.command("doctor")(doctor.doctor)
app.command("why")(why.why)
app.command("node")(node.node)
app.command("controller")(controller.controller)
app.command("status")(status.status)
app.command("uninstall")(uninstall.uninstall)
app.command("discover")(discover.discover)
app.command("demo")(demo.demo)
app.add_typer(vfio.app, name="vfio")
app.add_typer(vgpu.app, name="vgpu")
app.add_typer(install.app, name="install")
app.command("support")(support.support)
app.add_typer(sim.app, name="sim")
app.add_typer(validate.app, name="validate")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gpuvirt {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """GPU virtualization for Kubernetes."""


def main() -> None:
    """Run the command line."""
    run(sys.argv[1:])


def nvidia_kubevirt_gpu_device_plugin() -> None:
    """Run the agent in the place of NVIDIA's plugin: observing and offering alone, with its paths and no privileges."""
    arguments = sys.argv[1:]
    run(["--version"] if "--version" in arguments else ["node", "--plugin-only", *arguments])


def vfio_manage() -> None:
    """Run in the place of NVIDIA's vfio-manage."""
    run(sys.argv[1:], vfiomanage.app, "vfio-manage")


def nvidia_vgpu_dm() -> None:
    """Run in the place of NVIDIA's vgpu-device-manager on a host; it ends with 1 whatever fails."""
    _run_as_nvidias(vgpudm.app, "nvidia-vgpu-dm")


def nvidia_k8s_vgpu_dm() -> None:
    """Run in the place of NVIDIA's vgpu-device-manager in a cluster; it ends with 1 whatever fails."""
    _run_as_nvidias(k8svgpudm.app, "nvidia-k8s-vgpu-dm")


def _run_as_nvidias(program: typer.Typer, name: str) -> None:
    try:
        run(sys.argv[1:], program, name)
    except SystemExit as end:
        sys.exit(FAILED if end.code else 0)


def run(arguments: list[str], program: typer.Typer = app, name: str = "gpuvirt") -> None:
    """Run one command and end the process."""
    # gRPC's own log goes to standard error in a form of its own; what it means for us we say ourselves.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # noqa: TID251
    try:
        program(arguments, prog_name=name)
    except (GpuvirtError, ExceptionGroup, OSError) as failure:
        errors = list(_flat(failure))
        for error in errors:
            if not isinstance(error, GpuvirtError | OSError):
                raise  # ours, and worth its traceback
            print(f"gpuvirt: {error}", file=sys.stderr)
        sys.exit(USED_WRONGLY if any(isinstance(error, ConfigError) for error in errors) else FAILED)


def _flat(failure: Exception) -> Iterator[Exception]:
    """Yield the errors that a failure consists of; what fails in one of several tasks comes in groups."""
    if isinstance(failure, ExceptionGroup):
        for inner in failure.exceptions:
            yield from _flat(inner)
    else:
        yield failure
