"""`gpuvirt sim`: simulated hosts, and programs that run on them."""

import asyncio
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Annotated

import msgspec
import typer

from gpuvirt.agent.store.files import replace_file
from gpuvirt.cli.formats import ListFormat, ListOutput
from gpuvirt.cli.output import render
from gpuvirt.cli.output.tables import console, say
from gpuvirt.cli.parameters import completion, options
from gpuvirt.clock import RealClock
from gpuvirt.errors import ConfigError
from gpuvirt_sim.archives.importing import import_archive
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.commands import simulatedhost
from gpuvirt_sim.files.durations import parse_durations
from gpuvirt_sim.hostspec import host_names, load_host, meant_host
from gpuvirt_sim.kubelet.kubelet import running
from gpuvirt_sim.mounted.nodes import Nodes
from gpuvirt_sim.programs import executables
from gpuvirt_sim.programs.executables import VgpuManager

app = typer.Typer(no_args_is_help=True, help="Simulate hosts with GPUs, and run programs on them.")

SIGNALLED = 128
"""A shell's exit code of a program that a signal ended is this plus the signal's number."""


def _completed_hosts(incomplete: str) -> list[str]:
    return completion.starting(incomplete, host_names())


HostName = Annotated[
    str,
    typer.Option(
        "--host",
        "-H",
        metavar="NAME",
        autocompletion=_completed_hosts,
        help="A host of `gpuvirt sim hosts`, or a YAML file.",
    ),
]
Manager = Annotated[
    VgpuManager,
    typer.Option(
        "--vgpu-manager",
        help="Place of NVIDIA's vGPU manager, which has nvidia-smi and sriov-manage: on the host, in a container"
        " (/run/nvidia/driver), or none.",
    ),
]


class SimulatedHostRow(msgspec.Struct, frozen=True):
    """One simulated host."""

    name: str
    about: str


@app.command()
def hosts(*, output: options.ListFormat = ListOutput.TABLE) -> None:
    """List the hosts that can be simulated."""
    rows = [SimulatedHostRow(name, load_host(name).about) for name in host_names()]
    render.print_list(rows, host_names(), lambda _: _print_hosts(rows), ListFormat(output))


def _print_hosts(rows: Sequence[SimulatedHostRow]) -> None:
    out, width = console(), max(len(row.name) for row in rows)
    for row in rows:
        say(out, row.about, head=f"{row.name:<{width}}  ")


@app.command(context_settings={"ignore_unknown_options": True})
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD [ARG]...", help="The program to run.")],
    *,
    host: HostName = "2xA10",
    kubelet: Annotated[bool, typer.Option("--kubelet", help="Run a simulated kubelet, too.")] = False,
    manager: Manager = VgpuManager.HOST,
    snapshot: Annotated[
        bool, typer.Option("--snapshot", help="Simulate the host by plain files, which do not react to writes.")
    ] = False,
) -> None:
    """Run a program on a simulated host.

    The host's /, with /sys, /dev and /proc, is a temporary folder. The environment of the program names it in
    GPUVIRT_HOST_ROOT, which gpuvirt's commands use, and the simulated kubelet's folder in GPUVIRT_KUBELET_DIR. PATH has
    the host's nvidia-smi, sriov-manage and modprobe.

    The folder is mounted, and reacts to writes as a kernel does. With --snapshot, or where nothing can be mounted
    (libfuse 3 or /dev/fuse is missing), the folder has plain files: programs can read and edit them, but
    no file reacts, and nvidia-smi, sriov-manage and modprobe fail.
    """
    spec = load_host(host)
    signal.signal(signal.SIGINT, lambda *_: None)  # the program gets Ctrl-C, too, and decides whether it ends
    here = Path.cwd()  # libfuse goes to /
    with tempfile.TemporaryDirectory(prefix="gpuvirt-") as folder:
        root, kubelet_dir = Path(folder) / "host", Path(folder) / "kubelet"
        root.mkdir()
        if kubelet:  # without its folder, the host has no kubelet
            (kubelet_dir / "device-plugins").mkdir(parents=True)
        with simulatedhost.at(root, spec, host, manager, snapshot=snapshot):
            environment = _environment(root, kubelet_dir, manager)
            code = asyncio.run(_run(_Program(command, environment, here), kubelet_dir, with_kubelet=kubelet))
    raise typer.Exit(code)


@app.command()
def mount(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="An empty folder, which becomes the host's /.")],
    *,
    host: HostName = "2xA10",
    nodes: Annotated[
        Nodes,
        typer.Option(
            help="Kind of the nodes below /dev. `null`: device nodes that containers can get, all of them /dev/null."
            " `files`: files; the file of an IOMMU group can be open only once, as on a real host."
        ),
    ] = Nodes.NULL,
    manager: Manager = VgpuManager.HOST,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPERATION=DURATION",
            help="Duration of an operation: remove=300ms. Operations are writes (remove, create, bind, unbind,"
            " sriov_numvfs, current_vgpu_type) and programs (modprobe, nvidia-smi, sriov-manage). Repeatable.",
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Append all writes to the host and calls of its programs to this file, as lines of JSON.",
        ),
    ] = None,
) -> None:
    """Mount a simulated host at a folder.

    Programs can list its GPUs, bind them, and create and remove vGPUs; the files react as a kernel does. The host has
    its own programs, at DIR/usr/bin/nvidia-smi, DIR/usr/lib/nvidia/sriov-manage and DIR/usr/sbin/modprobe. They work
    by their paths and after chroot, and commands with --host-root DIR use them.

    With --nodes files, a process that opens the file of an IOMMU group and writes `use` to it uses the group's devices,
    as a VM does by ioctls: unbind and remove then block until the process closes the file. A read of that file lists
    the devices that the kernel has requested back.

    The host stays mounted until Ctrl-C, SIGTERM or an unmount. It needs fuse3.
    """
    durations = parse_durations(slow or (), where="--slow")
    simulatedhost.check_mountable()
    from gpuvirt_sim.mounted.mounting import serve
    from gpuvirt_sim.mounted.record import Record

    search = executables.search_path(folder.absolute(), manager)  # fuse changes the working folder

    def ready() -> None:
        print(f"{host} is mounted at {folder} until Ctrl-C", flush=True)
        print(f"try: gpuvirt devices --host-root {folder}", flush=True)
        if manager is not VgpuManager.NONE:
            print(f"try: PATH={search}:$PATH nvidia-smi", flush=True)

    kernel = build_host(load_host(host), where=host, wait=True)
    kernel.blocking.last(durations)
    with _opened(record) as file:
        serve(kernel, folder, nodes, ready, manager, Record(file, RealClock()))


@app.command("import")
def import_(
    archive: Annotated[
        Path, typer.Argument(metavar="ARCHIVE", exists=True, dir_okay=False, help="An archive of `gpuvirt support`.")
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="YAML file to write. Default: standard output."),
    ] = None,
) -> None:
    """Make a simulated host from a support archive.

    `sim run`, `sim mount`, `demo` and tests take the YAML file. Standard error lists the differences of the simulated
    host from the archive's host. The archive is not unpacked to disk. If it is damaged, no file is written.
    """
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
    typer.echo(f"{output}: {slots} PCI functions; {losses or 'no'} differences from the archive's host", err=True)
    typer.echo(f"try: gpuvirt sim run -H {output} -- gpuvirt devices", err=True)


def _opened(record: Path | None) -> AbstractContextManager[IO[bytes] | None]:
    try:
        return nullcontext() if record is None else record.open("ab")
    except OSError as error:
        raise ConfigError(f"{record} can't be written: {error.strerror}", where="--record") from error


class _Program(msgspec.Struct, frozen=True):
    command: list[str]
    environment: Mapping[str, str]
    folder: Path


async def _run(program: _Program, kubelet_dir: Path, *, with_kubelet: bool) -> int:
    if not with_kubelet:
        return await _spawn(program)
    async with running(kubelet_dir, RealClock()):
        return await _spawn(program)


async def _spawn(program: _Program) -> int:
    started: list[asyncio.subprocess.Process] = []

    def forward(number: int) -> None:
        for process in started:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGHUP):  # libfuse's own handlers would end only the mount
        asyncio.get_running_loop().add_signal_handler(number, forward, number)
    try:
        started.append(
            await asyncio.create_subprocess_exec(*program.command, env=program.environment, cwd=program.folder)
        )
    except OSError as error:
        name, *words = program.command
        host = meant_host(name) if isinstance(error, FileNotFoundError) else None
        hint = f"; did you mean gpuvirt sim run -H {host} -- {shlex.join(words) or 'COMMAND'}?" if host else ""
        typer.echo(f"gpuvirt: {name} can't be run: {error.strerror}{hint}", err=True)
        return 127
    code = await started[0].wait()
    return code if code >= 0 else SIGNALLED - code


def _environment(root: Path, kubelet_dir: Path, manager: VgpuManager) -> Mapping[str, str]:
    """Return the environment of a program on a simulated host."""
    outer = os.environ  # noqa: TID251  passed to the program
    path = f"{executables.search_path(root, manager)}:{outer.get('PATH', os.defpath)}:{Path(sys.executable).parent}"
    return outer | {"GPUVIRT_HOST_ROOT": str(root), "GPUVIRT_KUBELET_DIR": str(kubelet_dir), "PATH": path}
