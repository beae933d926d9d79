"""The command `gpuvirt`: its subcommands, how it ends, and what it says when something is wrong.

Exit codes: 0 done, 1 failed, 2 used wrongly or configured wrongly.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module

import typer

from gpuvirt.cli.version import Version
from gpuvirt.errors import ConfigError, GpuvirtError

FAILED = 1
USED_WRONGLY = 2

COMMANDS = {
    "devices": "Show the GPUs of this node: mode, driver, users, what each is offered as, and why not.",
    "doctor": "Check the way from firmware to virtual machine: what is wrong, where it is seen, why it matters, what"
    " mends it.",
    "why": "Name the one thing that keeps a GPU from a virtual machine, or a VM or pod from its GPUs, and what mends"
    " it.",
    "node": "Run the agent of this node: find its GPUs and offer them to the kubelet.",
    "controller": "Run the controller: it keeps nodes, GpuNodes and operands as the ClusterPolicy and the nodes' labels"
    " say.",
    "status": "Show the components of all nodes with GPUs, as their agents and pods say; ends with 1 where one is not"
    " well.",
    "uninstall": "Take away what gpuvirt has put into the cluster.",
    "discover": "Keep labels of this node that say whether it has NVIDIA GPUs, and which system it runs.",
    "demo": "Show what gpuvirt does, on a simulated host with GPUs; needs no GPU, no cluster, and under 20 seconds.",
    "support": "Pack what somebody else needs to see of this host into one archive: its GPUs, not its secrets.",
    "vfio": "Give GPUs to virtual machines' driver, and back; nothing that a machine has is ever touched.",
    "vgpu": "Which vGPUs are wanted on a node's GPUs, and what configs say of that.",
    "install": "Write what helm can't; the chart's Jobs run it.",
    "sim": "Simulated hosts: see what there are, run a program on one.",
    "validate": "Check what a node for containers needs, and write the files that NVIDIA's operands wait for.",
}
"""What each command does, so that `gpuvirt --help` loads none of them.

Each is a module beside this one, with a function of the same name or, for a group of commands, an `app`.
"""


def root(version: Version = False) -> None:
    """GPU virtualization for Kubernetes."""


def program_for(words: Sequence[str]) -> typer.Typer:
    """Return the program `gpuvirt` for a command line: of its commands, the one that is called is loaded.

    The agent runs on each node, and the modules of all commands would take more memory than its own.
    """
    program = typer.Typer(
        name="gpuvirt",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="GPU virtualization for Kubernetes: the GPUs of a node as devices of virtual machines.",
    )
    program.callback()(root)
    called = next((word for word in words if not word.startswith("-")), None)
    for name, about in COMMANDS.items():
        if name != called:
            program.command(name, help=about)(_not_loaded)
            continue
        module = import_module(f"gpuvirt.cli.{name}")
        if hasattr(module, "app"):
            program.add_typer(module.app, name=name)
        else:
            program.command(name)(getattr(module, name))
    return program


def _not_loaded() -> None:
    """Stand for a command that is not called."""


def _completed_words() -> Sequence[str] | None:
    """Return the words after `gpuvirt` that a shell wants completed, None where none does."""
    environment = os.environ  # noqa: TID251  how shells hand over what is typed
    if "_GPUVIRT_COMPLETE" not in environment:
        return None
    typed = environment.get("COMP_WORDS") or environment.get("_TYPER_COMPLETE_ARGS") or ""
    return typed.split()[1:]


def main() -> None:
    """Run the command line."""
    run(sys.argv[1:])


def nvidia_kubevirt_gpu_device_plugin() -> None:
    """Run the agent in the place of NVIDIA's plugin: observing and offering alone, with its paths and no privileges."""
    arguments = sys.argv[1:]
    run(["--version"] if "--version" in arguments else ["node", "--plugin-only", *arguments])


def vfio_manage() -> None:
    """Run in the place of NVIDIA's vfio-manage."""
    run(sys.argv[1:], _program("vfiomanage"), "vfio-manage")


def nvidia_vgpu_dm() -> None:
    """Run in the place of NVIDIA's vgpu-device-manager on a host; it ends with 1 whatever fails."""
    _run_as_nvidias("vgpudm", "nvidia-vgpu-dm")


def nvidia_k8s_vgpu_dm() -> None:
    """Run in the place of NVIDIA's vgpu-device-manager in a cluster; it ends with 1 whatever fails."""
    _run_as_nvidias("k8svgpudm", "nvidia-k8s-vgpu-dm")


def _program(module: str) -> typer.Typer:
    program: typer.Typer = import_module(f"gpuvirt.cli.{module}").app
    return program


def _run_as_nvidias(module: str, name: str) -> None:
    try:
        run(sys.argv[1:], _program(module), name)
    except SystemExit as end:
        sys.exit(FAILED if end.code else 0)


def run(arguments: list[str], program: typer.Typer | None = None, name: str = "gpuvirt") -> None:
    """Run one command and end the process."""
    # gRPC's own log goes to standard error in a form of its own; what it means for us we say ourselves.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # noqa: TID251
    try:
        (program or program_for(_completed_words() or arguments))(arguments, prog_name=name)
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
