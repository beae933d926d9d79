"""`gpuvirt mps`: runs NVIDIA's MPS daemon of a node, by which shares of GPUs are limits, and ends it without harm."""

import asyncio
from pathlib import Path

import typer

from gpuvirt.agent import mps
from gpuvirt.cli.parameters import options
from gpuvirt.clock import RealClock
from gpuvirt.facts.mps import PIPES
from gpuvirt.hardware.programs import mpsdaemon
from gpuvirt.hardware.programs.mpsdaemon import MpsControl

app = typer.Typer(
    name="mps",
    no_args_is_help=True,
    help="Run NVIDIA's MPS daemon, which limits shares of GPUs.",
)


@app.command()
def run(
    *, system_root: options.DriverSystemRoot = options.ROOT, driver_root: options.DriverRoot = options.DRIVER_ROOT
) -> None:
    """Run the daemon of the node's driver, which is on the host or in its container.

    If the daemon exits, all processes that use a GPU through it end. After SIGTERM or SIGINT it accepts no new clients,
    and exits once the last client has ended.
    """
    control = _control(system_root, driver_root)
    start = mpsdaemon.prepare(system_root, driver_root)
    raise typer.Exit(asyncio.run(mps.run_until_unused(start, control, RealClock())))


@app.command("quit")
def quit_daemon(
    *, system_root: options.DriverSystemRoot = options.ROOT, driver_root: options.DriverRoot = options.DRIVER_ROOT
) -> None:
    """Stop the daemon once its last client has ended.

    Until then it accepts no new clients, so containers with a limit by MPS do not start.
    """
    _control(system_root, driver_root).ask((mpsdaemon.QUIT,), timeout_s=None)


def _control(system_root: Path, driver_root: Path) -> MpsControl:
    return MpsControl((driver_root, system_root), mpsdaemon.FOLDER / PIPES)
