"""`gpuvirt mps`: runs NVIDIA's MPS daemon of a node, by which shares of GPUs are limits, and ends it without harm."""

import os
from pathlib import Path

import typer

from gpuvirt.cli.parameters import options
from gpuvirt.facts.mps import PIPES
from gpuvirt.hardware.programs import mpscontrol, mpsdaemon
from gpuvirt.hardware.programs.mpscontrol import MpsControl

app = typer.Typer(
    name="mps",
    no_args_is_help=True,
    help="Run NVIDIA's MPS daemon, which limits shares of GPUs.",
)


@app.command()
def run(*, system_root: options.SystemRoot = None, driver_root: options.DriverRoot = options.DRIVER_ROOT) -> None:
    """Run the daemon of the node's driver, in the place of this process.

    The driver is on the host or in its container. The daemon's end ends all processes that use a GPU through it:
    `gpuvirt mps quit` waits for them.
    """
    start = mpsdaemon.prepare(system_root or Path("/"), driver_root)
    os.execvpe(start.command[0], [*start.command], start.environment)  # noqa: S606


@app.command("quit")
def quit_daemon(
    *, system_root: options.SystemRoot = None, driver_root: options.DriverRoot = options.DRIVER_ROOT
) -> None:
    """End the daemon once its last client has ended.

    Until then it takes no new clients, so that containers with a limit by MPS do not start.
    """
    control = MpsControl((driver_root, system_root or Path("/")), mpsdaemon.FOLDER / PIPES)
    control.ask((mpscontrol.QUIT,), timeout_s=None)
