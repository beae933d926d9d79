"""The command `gpuvirt`: its subcommands, how it ends, and what it says when something is wrong.

Exit codes: 0 done, 1 failed, 2 used wrongly or configured wrongly.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Annotated

import typer

from gpuvirt import __version__
from gpuvirt.errors import ConfigError, GpuvirtError

FAILED = 1
USED_WRONGLY = 2

COMMANDS = (
    "devices",
    "doctor",
    "why",
    "node",
    "controller",
    "status",
    "uninstall",
    "discover",
    "demo",
    "support",
    "vfio",
    "vgpu",
    "install",
    "sim",
    "validate",
)
"""Each is a module beside this one, with a function of the same name or, for a group of commands, an `app`."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gpuvirt {__version__}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """GPU virtualization for Kubernetes."""


def program_for(arguments: Sequence[str]) -> typer.Typer:
    """Return the program `gpuvirt` with the command that is run, or with all where the first argument names none.

    Loading the modules of all commands takes half as long as those of the agent, which starts on each node.
    """
    program = typer.Typer(
        name="gpuvirt",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="GPU virtualization for Kubernetes: the GPUs of a node as devices of virtual machines.",
    )
    program.callback()(root)
    for name in [name for name in COMMANDS if name in arguments[:1]] or COMMANDS:
        module = import_module(f"gpuvirt.cli.{name}")
        if hasattr(module, "app"):
            program.add_typer(module.app, name=name)
        else:
            program.command(name)(getattr(module, name))
    return program


def main() -> None:
    """Run the command line."""
    run(sys.argv[1:])


def nvidia_kubevirt_gpu_device_plugin() -> None:
    """Run the agent in the place of NVIDIA's plugin: observing and offering alone, with its paths and no privileges."""
    arguments = sys.argv[1:]
    run(["--version"] if "--version" in arguments else ["node", "--plugin-only", *arguments])


def vfio_manage() -> None:
    """Run in the place of NVIDIA's vfio-manage."""
    from gpuvirt.cli import vfiomanage

    run(sys.argv[1:], vfiomanage.app, "vfio-manage")


def nvidia_vgpu_dm() -> None:
    """Run in the place of NVIDIA's vgpu-device-manager on a host; it ends with 1 whatever fails."""
    from gpuvirt.cli import vgpudm

    _run_as_nvidias(vgpudm.app, "nvidia-vgpu-dm")


def nvidia_k8s_vgpu_dm() -> None:
    """Run in the place of NVIDIA's vgpu-device-manager in a cluster; it ends with 1 whatever fails."""
    from gpuvirt.cli import k8svgpudm

    _run_as_nvidias(k8svgpudm.app, "nvidia-k8s-vgpu-dm")


def _run_as_nvidias(program: typer.Typer, name: str) -> None:
    try:
        run(sys.argv[1:], program, name)
    except SystemExit as end:
        sys.exit(FAILED if end.code else 0)


def run(arguments: list[str], program: typer.Typer | None = None, name: str = "gpuvirt") -> None:
    """Run one command and end the process."""
    # gRPC's own log goes to standard error in a form of its own; what it means for us we say ourselves.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # noqa: TID251
    try:
        (program or program_for(arguments))(arguments, prog_name=name)
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
