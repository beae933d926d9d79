"""The modules that the command line loads before it calls a command, and its completion in shells."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from gpuvirt import __version__
from gpuvirt.cli.main import COMMANDS, program_for
from tests.cli.commandline import GPUVIRT, PATH, loaded_by, ran

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("arguments", [["--help"], [], ["--version"], ["no-such-command"]])
def test_only_the_called_command_is_imported(arguments: list[str]) -> None:
    modules = loaded_by(*arguments)
    ours = {name for name in modules if name.startswith("gpuvirt.")}
    assert ours == {
        "gpuvirt.cli",
        "gpuvirt.cli.interrupts",
        "gpuvirt.cli.main",
        "gpuvirt.cli.version",
        "gpuvirt.distributions",
        "gpuvirt.errors",
    }
    assert not {"yaml", "msgspec", "rich", "grpc", "asyncio"} & modules


@pytest.mark.parametrize("command", ["node", "validate", "discover", "controller"])
def test_cluster_programs_do_not_import_table_rendering(command: str) -> None:
    modules = loaded_by(command, "--help")
    assert f"gpuvirt.cli.services.{command}" in modules
    assert not {"rich", "gpuvirt_sim", "python_socks", "cryptography"} & modules


NOT_OF_EVERY_AGENT = (
    "gpuvirt.kube",
    "gpuvirt.hardware.programs",
    "gpuvirt.controller.install",
    "gpuvirt.diagnosis",
    "gpuvirt.agent.change.unitchange",
    "gpuvirt.agent.reconcile.reconciler",
    "gpuvirt_sim",
    "gpuvirt.cli.support",
    "h11",
    "rich",
    "yaml",
)
"""The modules of agents that have an API server, change GPUs, or read YAML; and those that no agent needs."""


def test_an_agent_loads_no_part_that_its_mode_does_not_need() -> None:
    modules = loaded_by("node", "--help")
    assert "gpuvirt.agent.agent" in modules
    assert not {name for name in modules if name.startswith(tuple(f"{part}." for part in NOT_OF_EVERY_AGENT))}
    assert not set(NOT_OF_EVERY_AGENT) & modules


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_begins_with_its_summary(name: str) -> None:
    listed = typer.main.get_group(program_for([])).commands[name]
    loaded = typer.main.get_group(program_for([name])).commands[name]
    assert (listed.help or "").removesuffix(".") == (loaded.help or "").split("\n\n")[0].split(". ")[0].removesuffix(
        "."
    )
    assert listed.get_short_help_str() == loaded.get_short_help_str()


def test_a_mistyped_command_is_reported_with_a_suggestion() -> None:
    done = ran("vfo")
    assert done.returncode == 2
    assert "No such command 'vfo'. Did you mean 'vfio'?" in done.stderr


def completed(line: str) -> list[str]:
    """Return bash's completions of the last word of a line."""
    words = line.split(" ")
    environment = {"_GPUVIRT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(GPUVIRT, capture_output=True, text=True, check=True, env={"PATH": PATH, **environment})
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gpuvirt v", ["validate", "version", "vfio", "vgpu"]),
        ("gpuvirt vfio b", ["bind"]),
        ("gpuvirt vfio bind --dry", ["--dry-run"]),
        ("gpuvirt vgpu scheduler ", ["get", "set"]),
        ("gpuvirt devices -o ", ["json", "name", "table", "wide", "yaml"]),
        ("gpuvirt doctor -o ", ["json", "table", "yaml"]),
        ("gpuvirt sim run --host 2xA10-v", ["2xA10-vgpu"]),
        ("gpuvirt plan node/a --vgpu-config A10-2", ["A10-24A", "A10-24C", "A10-24Q", "A10-2A", "A10-2B", "A10-2Q"]),
        ("gpuvirt vgpu create 0000:65:00.0 T4-16", ["T4-16A", "T4-16C", "T4-16Q"]),
        ("gpuvirt devices --node ", []),  # no kubeconfig
    ],
)
def test_shells_complete_commands_options_and_values(line: str, words: list[str]) -> None:
    assert sorted(completed(line)) == words


@pytest.mark.parametrize("printed_by", ["completion bash", "--show-completion"])
def test_bash_completes_by_the_installed_script(printed_by: str) -> None:
    folder = Path(sys.executable).parent
    script = f"""
eval "$(gpuvirt {printed_by})"
COMP_WORDS=(gpuvirt vfio u) COMP_CWORD=2
_gpuvirt_completion gpuvirt
echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["/bin/bash", "-c", script], capture_output=True, text=True, check=False, env={"PATH": f"{folder}:{PATH}"}
    )
    assert done.stdout.split() == ["unbind"], done.stderr


@pytest.mark.parametrize(
    ("shell", "begins"),
    [
        ("zsh", "#compdef gpuvirt\n"),
        ("fish", "complete --command gpuvirt "),
        ("powershell", "Import-Module PSReadLine\n"),
    ],
)
def test_a_script_is_printed_for_each_shell(shell: str, begins: str) -> None:
    done = ran("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(begins)


@pytest.mark.parametrize(
    ("command", "distribution", "folders"),
    [
        ("demo", "gpuvirt-sim", "./schedules ./simulator"),
        ("sim", "gpuvirt-sim", "./schedules ./simulator"),
        ("schedule", "gpuvirt-schedules", "./schedules"),
    ],
)
@pytest.mark.parametrize(("version", "state"), [(None, "is not installed"), ("0.0.9", "is installed in version 0.0.9")])
def test_a_command_without_its_distribution_of_this_version_says_how_to_get_it(
    tmp_path: Path, command: str, distribution: str, folders: str, version: str | None, state: str
) -> None:
    installed = tmp_path / f"{distribution.replace('-', '_')}-0.0.9.dist-info"
    if version is not None:
        installed.mkdir()
        (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (installed / "entry_points.txt").write_text(f"[gpuvirt.commands]\n{command} = gpuvirt_sim.commands.{command}\n")
    # No other distribution has metadata; the modules are found as ever.
    script = (
        "import sys, importlib.metadata as metadata\n"
        "finder = metadata.MetadataPathFinder.find_distributions\n"
        f"only = metadata.DistributionFinder.Context(path=[{str(tmp_path)!r}])\n"
        "metadata.MetadataPathFinder.find_distributions = lambda context=None: finder(only)\n"
        f"from gpuvirt.cli.main import run\nrun([{command!r}])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"gpuvirt: {command} needs {distribution} {__version__}, which {state};"
        f" in a clone of gpuvirt: pip install {folders}; or pip install {distribution}=={__version__}\n"
    )
