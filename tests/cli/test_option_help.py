"""The references to other options in the help of an option, and the examples in the help of a command."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperCommand, TyperGroup, TyperOption

from gpuvirt.cli.examples import EXAMPLES
from gpuvirt.cli.main import COMMANDS, program_for
from tests.cli.commandline import ran

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def commands(name: str) -> Iterator[TyperCommand | TyperGroup]:
    """Yield a command of `gpuvirt`, and those below it."""
    program = typer.main.get_command(program_for([name]))
    assert isinstance(program, TyperGroup)
    waiting = [program.commands[name]]
    while waiting:
        command = waiting.pop()
        assert isinstance(command, TyperCommand | TyperGroup)
        yield command
        waiting += command.commands.values() if isinstance(command, TyperGroup) else ()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_an_option_names_options_of_its_command_alone(name: str) -> None:
    for command in commands(name):
        options = [option for option in command.params if isinstance(option, TyperOption)]
        own = {text for option in options for text in (*option.opts, *option.secondary_opts)}
        for option in options:
            assert set(OPTION.findall(option.help or "")) <= own, (command.name, option.name)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_has_examples_of_it(name: str) -> None:
    program = typer.main.get_command(program_for([name, "-h"]))
    assert isinstance(program, TyperGroup)
    waiting = [(f"gpuvirt {name}", program.commands[name])]
    while waiting:
        path, command = waiting.pop()
        lines = [line for line in (command.epilog or "").splitlines() if line.startswith("  gpuvirt ")]
        assert lines, path
        assert all(f"{line} ".startswith(f"  {path} ") for line in lines)
        if isinstance(command, TyperGroup):
            waiting += [(f"{path} {inner}", below) for inner, below in command.commands.items()]


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_example_is_accepted(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "node01.tar.gz").touch()
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)[1:]
    program = typer.main.get_command(program_for(words))
    waiting = [program]
    while waiting:
        command = waiting.pop()
        command.callback = lambda **_: None
        waiting += command.commands.values() if isinstance(command, TyperGroup) else ()
    program.main(words, prog_name="gpuvirt", standalone_mode=False)


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_the_help_lists_commands_by_their_use(option: str) -> None:
    shown = ran(option).stdout
    headings = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[1:] == [
        "Look at GPUs:",
        "Change GPUs of this host:",
        "Manage a cluster:",
        "Other commands:",
        "Commands that run in pods (gpuvirt COMMAND -h):",
    ]
    assert all(re.search(rf"\b{name}\b", shown) for name in COMMANDS)
    assert "Run the agent" not in shown
    assert ran("node", option).stdout.startswith("Usage: gpuvirt node ")
    assert ran("vgpu", "scheduler", option).stdout.startswith("Usage: gpuvirt vgpu scheduler ")
