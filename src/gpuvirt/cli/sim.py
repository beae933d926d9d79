"""`gpuvirt sim`: simulated machines, and programs run on them."""

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Simulated machines: see what there are, run a program on one.")

Machine = Annotated[
    str, typer.Option("--machine", "-m", metavar="NAME", help="A machine of `gpuvirt sim machines`, or a YAML file.")
]


@app.command()
def machines() -> None:
    """List the machines that can be simulated."""
    from gpuvirt.sim.machine import load_machine, machine_names

    width = max(len(name) for name in machine_names())
    for name in machine_names():
        print(f"{name:<{width}}  {load_machine(name).about}")


@app.command(context_settings={"ignore_unknown_options": True})
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD [ARG]...", help="The program to run.")],
    *,
    machine: Machine = "2xA10",
    kubelet: Annotated[bool, typer.Option("--kubelet", help="Run a simulated kubelet beside it.")] = False,
) -> None:
    """Run a program on a simulated machine: its /sys, /dev and /proc are files in a folder that is gone afterwards.

    The program finds the folder in GPUVIRT_HOST_ROOT, which every gpuvirt command obeys, and the simulated kubelet's in
    GPUVIRT_KUBELET_DIR. The files are a snapshot: they can be read and edited, but they don't act as a kernel does.
    """
    from gpuvirt.sim.builder import build_machine
    from gpuvirt.sim.export import export
    from gpuvirt.sim.machine import load_machine

    kernel = build_machine(load_machine(machine), where=machine)
    with tempfile.TemporaryDirectory(prefix="gpuvirt-") as folder:
        root, kubelet_dir = Path(folder) / "host", Path(folder) / "kubelet"
        export(kernel, root)
        (kubelet_dir / "device-plugins").mkdir(parents=True)
        raise typer.Exit(asyncio.run(_run(command, root, kubelet_dir, with_kubelet=kubelet)))


async def _run(command: list[str], root: Path, kubelet_dir: Path, *, with_kubelet: bool) -> int:
    from gpuvirt.clock import RealClock
    from gpuvirt.sim.kubelet.kubelet import running

    if not with_kubelet:
        return await _spawn(command, root, kubelet_dir)
    async with running(kubelet_dir, RealClock()):
        return await _spawn(command, root, kubelet_dir)


async def _spawn(command: list[str], root: Path, kubelet_dir: Path) -> int:
    ours = {"GPUVIRT_HOST_ROOT": str(root), "GPUVIRT_KUBELET_DIR": str(kubelet_dir)}
    environment = os.environ | ours  # noqa: TID251  handed on, not read
    try:
        process = await asyncio.create_subprocess_exec(*command, env=environment)
    except OSError as error:
        typer.echo(f"gpuvirt: {command[0]} can't be run: {error.strerror}", err=True)
        return 127
    return await process.wait()
