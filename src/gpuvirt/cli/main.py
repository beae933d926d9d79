"""The command `gpuvirt`: its subcommands, exit codes and error messages.

Exit codes: 0 for success, 1 for a failure, 2 for wrong options or an invalid configuration.
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
    "devices": "List the GPUs of this node, and what each is offered as.",
    "doctor": "Find what keeps the GPUs of this host from VMs.",
    "why": "Explain what keeps a GPU from VMs, or a VM from its GPUs.",
    "node": "Run the agent of this node: offer its GPUs to the kubelet.",
    "controller": "Run the controller, which deploys operands to GPU nodes.",
    "status": "Show the state of each component on each GPU node.",
    "uninstall": "Remove what gpuvirt has created in the cluster.",
    "discover": "Label this node by its NVIDIA GPUs and operating system.",
    "demo": "Show what gpuvirt does, on a simulated host with GPUs.",
    "support": "Pack the state of this host's GPUs into one archive.",
    "vfio": "Bind GPUs to a VFIO driver for VMs, or back to the host's.",
    "vgpu": "Create and delete vGPUs, and apply vGPU configs.",
    "install": "Install what helm cannot; the chart's Jobs run this.",
    "sim": "Simulate hosts with GPUs, and run programs on them.",
    "validate": "Check a container node, for NVIDIA's operands.",
}
"""The help line of each command, so that `gpuvirt --help` loads no command.

`gpuvirt --help` cuts lines of more than 62 characters at 80 columns. Each command is a module of this package with a
function of the same name or, for a group of commands, an `app`.
"""


def root(version: Version = False) -> None:
    """GPU virtualization for Kubernetes."""


def program_for(words: Sequence[str]) -> typer.Typer:
    """Return the program `gpuvirt` for a command line; it loads only the called command.

    The agent runs on each node, and the modules of all commands would take more memory than its own.
    """
    program = typer.Typer(
        name="gpuvirt",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="GPU virtualization for Kubernetes: GPUs and vGPUs of a node as devices of VMs.",
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
    """Stand in for a command that is not called."""


def _completed_words() -> Sequence[str] | None:
    """Return the words after `gpuvirt` that a shell completes, None outside of shell completion."""
    environment = os.environ  # noqa: TID251  shells pass the typed words in the environment
    if "_GPUVIRT_COMPLETE" not in environment:
        return None
    typed = environment.get("COMP_WORDS") or environment.get("_TYPER_COMPLETE_ARGS") or ""
    return typed.split()[1:]


def main() -> None:
    """Run the command line."""
    run(sys.argv[1:])


def nvidia_kubevirt_gpu_device_plugin() -> None:
    """Run the agent in place of NVIDIA's plugin: it only observes and offers, with the plugin's paths, unprivileged."""
    arguments = sys.argv[1:]
    run(["--version"] if "--version" in arguments else ["node", "--plugin-only", *arguments])


def vfio_manage() -> None:
    """Run in place of NVIDIA's vfio-manage."""
    run(sys.argv[1:], _program("vfiomanage"), "vfio-manage")


def nvidia_vgpu_dm() -> None:
    """Run in place of NVIDIA's vgpu-device-manager on a host; the exit code of every failure is 1."""
    _run_as_nvidias("vgpudm", "nvidia-vgpu-dm")


def nvidia_k8s_vgpu_dm() -> None:
    """Run in place of NVIDIA's vgpu-device-manager in a cluster; the exit code of every failure is 1."""
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
    # gRPC would log to standard error in its own format; gpuvirt logs connection errors itself.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # noqa: TID251
    try:
        (program or program_for(_completed_words() or arguments))(arguments, prog_name=name)
    except (GpuvirtError, ExceptionGroup, OSError) as failure:
        errors = list(_flat(failure))
        for error in errors:
            if not isinstance(error, GpuvirtError | OSError):
                raise  # a defect of gpuvirt, which needs its traceback
            print(f"gpuvirt: {error}", file=sys.stderr)
        sys.exit(USED_WRONGLY if any(isinstance(error, ConfigError) for error in errors) else FAILED)


def _flat(failure: Exception) -> Iterator[Exception]:
    """Yield the errors of a failure; a failure of one of several tasks is an ExceptionGroup."""
    if isinstance(failure, ExceptionGroup):
        for inner in failure.exceptions:
            yield from _flat(inner)
    else:
        yield failure
