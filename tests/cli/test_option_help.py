"""The references to other options in the help of an option."""

import re
from collections.abc import Iterator

import pytest
import typer.main
from typer.core import TyperCommand, TyperGroup, TyperOption

from gpuvirt.cli.main import COMMANDS, program_for

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
