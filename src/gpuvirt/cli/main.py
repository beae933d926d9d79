"""The command `gpuvirt`: its subcommands, exit codes and error messages.

Exit codes: 0 for success, 1 for a failure, 2 for wrong options or an invalid configuration.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import typer
from typer.core import TyperGroup
from typer.main import get_command
from typing_extensions import override

from gpuvirt.cli.interrupts import taken_interrupts
from gpuvirt.cli.version import Version
from gpuvirt.distributions import SCHEDULES, SIMULATOR, load_part
from gpuvirt.errors import ConfigError, GpuvirtError

FAILED = 1
USED_WRONGLY = 2


@dataclass(frozen=True, slots=True)
class Command:
    """A command, so that `gpuvirt --help` loads none; a dataclass, since msgspec alone takes 8 ms to load."""

    group: str
    """The heading under which `gpuvirt --help` lists it."""
    module: str
    """The module of this package that has the command; empty for another distribution's."""
    help: str
    """`gpuvirt --help` cuts lines of more than 62 characters at 80 columns."""
    distribution: str = ""
    """The distribution that brings the command by an entry point; empty for gpuvirt itself."""


LOOK, CHANGE, CLUSTER, OTHER = "Look at GPUs", "Change GPUs of this host", "Manage a cluster", "Other commands"
IN_PODS = "Commands that run in pods"
COMMANDS = {
    "devices": Command(LOOK, "diagnosis.devices", "List the GPUs of this host or cluster, and their resources."),
    "why": Command(LOOK, "diagnosis.why", "Explain why no VM can use a GPU, or why a VM lacks its GPUs."),
    "doctor": Command(LOOK, "diagnosis.doctor", "Find the problems that keep the GPUs of this host from VMs."),
    "status": Command(LOOK, "diagnosis.status", "Show whether gpuvirt and its components on nodes are ready."),
    "shares": Command(LOOK, "diagnosis.shares", "Show the shared GPUs of the cluster, and their free units."),
    "claims": Command(LOOK, "diagnosis.claims", "Show the claims (DRA) that have GPUs, or wait for some."),
    "plan": Command(LOOK, "diagnosis.plan", "Preview the changes that a label would make on a node."),
    "slices": Command(LOOK, "changes.slices", "Show in which shapes claims (DRA) could get this host's GPUs."),
    "support": Command(LOOK, "diagnosis.support", "Pack the state of this host's GPUs into one archive."),
    "vfio": Command(CHANGE, "changes.vfio", "Bind GPUs to a VFIO driver for VMs, or back to the host's."),
    "vgpu": Command(CHANGE, "changes.vgpu", "Create and delete vGPUs, and apply vGPU configs."),
    "install": Command(CLUSTER, "services.install", "Run the installation steps of the chart's Jobs."),
    "uninstall": Command(CLUSTER, "services.install", "Remove gpuvirt's objects and labels from the cluster."),
    "schedule": Command(CLUSTER, "", "Show, plan and check VgpuSchedules, and switch phases.", distribution=SCHEDULES),
    "demo": Command(OTHER, "", "Show what gpuvirt does, on a simulated host with GPUs.", distribution=SIMULATOR),
    "sim": Command(OTHER, "", "Simulate hosts with GPUs, and run programs on them.", distribution=SIMULATOR),
    "completion": Command(OTHER, "parameters.completion", "Print the script that completes words in a shell."),
    "version": Command(OTHER, "diagnosis.version", "Print the version."),
    "node": Command(IN_PODS, "services.node", "Run the agent of this node: offer its GPUs to the kubelet."),
    "controller": Command(IN_PODS, "services.controller", "Run the controller, which deploys operands to GPU nodes."),
    "extender": Command(IN_PODS, "services.extender", "Run the scheduler extender, which places shares of GPUs."),
    "webhook": Command(IN_PODS, "services.webhook", "Run the admission webhook for Kata pods and pods with units."),
    "discover": Command(IN_PODS, "services.discover", "Label this node with its NVIDIA GPUs and operating system."),
    "mps": Command(IN_PODS, "services.mps", "Run NVIDIA's MPS daemon, which limits shares of GPUs."),
    "validate": Command(IN_PODS, "services.validate", "Run the checks of container nodes for NVIDIA's operands."),
}
"""The commands by name. The module of each has a function of the same name. That of a group of commands has the group's
name, and an `app`."""
HELP = ("-h", "--help")


class Formatter(Protocol):
    """The writer of a help text: click's, which some versions of typer have in private."""

    def section(self, name: str) -> AbstractContextManager[None]:
        """Write a heading, and indent what follows."""

    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None:
        """Write names and their descriptions in two columns."""

    def write_text(self, text: str) -> None:
        """Write a paragraph."""


class Program(TyperGroup):
    """The program `gpuvirt`, whose help has the commands by what a user does, and no description of those of pods."""

    @override
    def format_commands(self, ctx: object, formatter: Formatter) -> None:
        """Write the commands in groups."""
        for group in (LOOK, CHANGE, CLUSTER, OTHER):
            with formatter.section(group):
                formatter.write_dl(
                    [(name, command.help) for name, command in COMMANDS.items() if command.group == group]
                )
        with formatter.section(f"{IN_PODS} (gpuvirt COMMAND -h)"):
            formatter.write_text(", ".join(name for name, command in COMMANDS.items() if command.group == IN_PODS))


def root(version: Version = False) -> None:
    """GPU virtualization for Kubernetes."""


def program_for(words: Sequence[str]) -> typer.Typer:
    """Return the program `gpuvirt` for a command line; it loads only the called command.

    The agent runs on each node, and the modules of all commands would take more memory than its own. Raises
    MissingPartError if the distribution of the command is not installed.
    """
    program = typer.Typer(
        name="gpuvirt",
        cls=Program,
        context_settings={"help_option_names": list(HELP)},
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="GPU virtualization for Kubernetes: whole GPUs and vGPUs for VMs, shares of GPUs for pods.",
    )
    program.callback()(root)
    called = next((word for word in words if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        if name != called:
            program.command(name, help=command.help)(_not_loaded)
            continue
        if command.distribution:
            module = load_part("gpuvirt.commands", name, command.distribution)
        else:
            module = import_module(f"gpuvirt.cli.{command.module}")
        if hasattr(module, "app") and module.__name__.endswith(f".{name}"):
            program.add_typer(module.app, name=name)
        else:
            program.command(name)(getattr(module, name))
        if not set(HELP).isdisjoint(words):
            from gpuvirt.cli.examples import add_examples  # noqa: PLC0415

            add_examples(program)
    return program


def _not_loaded() -> None:
    """Stand in for a command that is not called; some versions of typer have click's lazy groups in private."""


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
    """Run in place of NVIDIA's vfio-manage; the exit code of every failure is 1."""
    _run_as_nvidias("vfiomanage", "vfio-manage")


def nvidia_vgpu_dm() -> None:
    """Run in place of NVIDIA's vgpu-device-manager on a host; the exit code of every failure is 1."""
    _run_as_nvidias("vgpudm", "nvidia-vgpu-dm")


def nvidia_k8s_vgpu_dm() -> None:
    """Run in place of NVIDIA's vgpu-device-manager in a cluster; the exit code of every failure is 1."""
    _run_as_nvidias("k8svgpudm", "nvidia-k8s-vgpu-dm")


def _run_as_nvidias(module: str, name: str) -> None:
    try:
        program: typer.Typer = import_module(f"gpuvirt.cli.dropin.{module}").app
        run(sys.argv[1:], program, name)
    except SystemExit as end:
        sys.exit(FAILED if end.code else 0)


def run(arguments: list[str], program: typer.Typer | None = None, name: str = "gpuvirt") -> None:
    """Run one command and end the process."""
    # gRPC would log to standard error in its own format; gpuvirt logs connection errors itself.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # noqa: TID251
    try:
        program = program or program_for(_completed_words() or arguments)
        command = get_command(program)  # called itself, a Typer sets a hook that prints the traceback of interrupts
        with taken_interrupts():
            command(arguments, prog_name=name)
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
