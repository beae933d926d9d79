"""`gpuvirt sim`: simulated machines, and programs run on them."""

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from gpuvirt.cli import options
from gpuvirt.errors import MountError
from gpuvirt.sim.mounted.nodes import Nodes

app = typer.Typer(no_args_is_help=True, help="Simulated machines: see what there are, run a program on one.")

SIGNALLED = 128
"""What shells add to the number of the signal that ended a program."""

Machine = Annotated[
    str, typer.Option("--machine", "-m", metavar="NAME", help="A machine of `gpuvirt sim machines`, or a YAML file.")
]


@app.command()
def machines() -> None:
    """List the machines that can be simulated."""
    from gpuvirt.cli.tables import console, say
    from gpuvirt.sim.machine import load_machine, machine_names

    out, width = console(), max(len(name) for name in machine_names())
    for name in machine_names():
        say(out, load_machine(name).about, head=f"{name:<{width}}  ")


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


@app.command()
def mount(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="An empty folder; it is the machine's / from now on.")],
    *,
    machine: Machine = "2xA10",
    nodes: Annotated[
        Nodes,
        typer.Option(
            help="What the nodes below /dev are: devices that can be given to containers and are all /dev/null, or"
            " files of which a group's can be opened once at a time, as a real one."
        ),
    ] = Nodes.NULL,
) -> None:
    """Mount a simulated machine: programs see its GPUs, bind them, make and remove vGPUs, and get a kernel's answers.

    It is there until Ctrl-C or SIGTERM, or until it is unmounted. Needs the extra `sim` and fuse3.
    """
    from gpuvirt.sim.builder import build_machine
    from gpuvirt.sim.machine import load_machine

    try:
        from gpuvirt.sim.mounted.mounting import serve
    except ImportError as error:
        raise MountError("mounting needs the extra sim: pip install 'gpuvirt[sim]'") from error
    except OSError as error:
        raise MountError(f"{error}; mounting needs libfuse 3 (Debian: apt-get install fuse3)") from error

    def ready() -> None:
        print(f"{machine} is mounted at {folder} until Ctrl-C", flush=True)
        print(f"try: gpuvirt devices --host-root {folder}", flush=True)

    serve(build_machine(load_machine(machine), where=machine, wait=True), folder, nodes, ready)


@app.command("import")
def import_(
    archive: Annotated[
        Path, typer.Argument(metavar="ARCHIVE", exists=True, dir_okay=False, help="A file of `gpuvirt support`.")
    ],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write; standard output without it.")
    ] = None,
) -> None:
    """Make a machine of a support archive: the host it was packed on, for `sim run`, `sim mount`, `demo` and tests.

    What a machine can't show as that host did is said on standard error, a line each. Nothing of the archive is
    unpacked, and nothing is written where it is damaged.
    """
    from gpuvirt.node.files import replace_file
    from gpuvirt.sim.importing import import_archive

    if output is not None:
        options.check_folder(output)
    imported = import_archive(archive)
    for loss in imported.losses:
        typer.echo(loss.text, err=True)
    if output is None:
        print(imported.text, end="")
        return
    replace_file(output, imported.text.encode(), durable=False, mode=0o644)
    slots, losses = len(imported.spec.slots), len(imported.losses)
    typer.echo(f"{output}: {slots} functions; {losses or 'no'} differences from the host", err=True)
    typer.echo(f"try: gpuvirt sim run -m {output} -- gpuvirt devices", err=True)


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
    code = await process.wait()
    return code if code >= 0 else SIGNALLED - code
