"""Each command of README.md and docs/*.md is accepted as it stands; those of a simulated host are run."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from lab.cluster.helm import helm

from gpuvirt.cli.dropin import vfiomanage, vgpudm
from gpuvirt.cli.main import program_for
from tests.docs.commandblocks import ROOT, Block, blocks

BLOCKS = tuple(blocks())
RELEASE = "gpuvirt"
BENCHMARKS = "docs/benchmarks.md"
"""The page that also says how to build programs of others."""
KUBECTL = {"annotate", "apply", "cordon", "create", "delete", "describe", "exec", "get", "label", "logs", "patch"}
KUBECTL |= {"port-forward", "wait"}
HELM = {"install", "upgrade", "template", "test", "uninstall", "rollback"}
SHELL = {"base64", "cd", "export", "grep", "mkdir"}
USAGE_ERROR = typer.BadParameter.__mro__[1]
"""click's, which some versions of typer have in private."""
PLACEHOLDERS = {"/tmp/host": "/"}  # noqa: S108  of docs/simulator.md
"""Existing folders in place of those that earlier commands of a page make."""
MAKEFILE = (ROOT / "Makefile").read_text()


def words_of(program: str) -> Sequence[tuple[Block, Sequence[str]]]:
    """Return the commands of a program, each with its block."""
    return [(block, command) for block in BLOCKS for command in block.commands() if command[0] == program]


def parsed(program: typer.Typer, words: Sequence[str]) -> None:
    """Parse a command line by the real parser, and run nothing; it raises what the user would read."""
    command = typer.main.get_command(program)
    _silence(command)
    command.main([PLACEHOLDERS.get(word, word) for word in words], prog_name="gpuvirt", standalone_mode=False)


def _silence(command: object) -> None:
    command.callback = lambda **_: None  # type: ignore[attr-defined]
    for inner in getattr(command, "commands", {}).values():
        _silence(inner)


def check_gpuvirt(words: Sequence[str]) -> None:
    parsed(program_for(words), words)
    if "--" in words:
        check(words[words.index("--") + 1 :])


def check_kubectl(words: Sequence[str]) -> None:
    if words[0] == "gpuvirt":
        check_gpuvirt(words[1:])
        return
    assert words[0] in KUBECTL
    for option, value in pairwise(words):
        if option == "-f" and value != "-" and not value.isupper():
            assert (ROOT / value).exists(), value


def check_helm(words: Sequence[str]) -> None:
    assert words[0] in HELM
    assert words[1] == RELEASE or words[2].startswith("oci://"), "the release has one name"


def check_make(words: Sequence[str]) -> None:
    for word in words:
        name, assigned, _ = word.partition("=")
        assert f"$({name})" in MAKEFILE if assigned else re.search(rf"^{name}:", MAKEFILE, re.MULTILINE), word


def check_python(words: Sequence[str]) -> None:
    option, module, *_ = words
    path = ROOT / module.replace(".", "/")
    assert option == "-m"
    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


CHECKS: Mapping[str, Callable[[Sequence[str]], None]] = {
    "gpuvirt": check_gpuvirt,
    ".venv/bin/gpuvirt": check_gpuvirt,
    "kubectl": check_kubectl,
    "helm": check_helm,
    "make": check_make,
    ".venv/bin/python": check_python,
    "vfio-manage": lambda words: parsed(vfiomanage.app, words),
    "nvidia-vgpu-dm": lambda words: parsed(vgpudm.app, words),
}


def check(command: Sequence[str]) -> bool:
    """Check a command; return whether its program is one of ours, or one that the pages can count on."""
    program, *words = command
    assert "..." not in command, "a command is complete"
    if program in CHECKS:
        CHECKS[program](words)
    elif (ROOT / program).is_file():
        assert os.access(ROOT / program, os.X_OK)
    return program in CHECKS or program in SHELL


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_commands_are_accepted(block: Block) -> None:
    """A block with a program that this test does not know says why; other text is fenced as ```text or ```yaml."""
    if block.lines[0].startswith("#!"):  # a script
        return
    known = [check(command) for command in block.commands() if not command[0].startswith("--")]
    assert block.page == BENCHMARKS or bool(block.not_run) is not all(known), "expected <!-- not run: REASON -->"


@pytest.mark.ring("mount")
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.host], ids=lambda block: block.name)
def test_a_simulated_host_prints_what_the_page_shows(block: Block, tmp_path: Path) -> None:
    """A line `...` of the page stands for any lines."""
    script = f"{block.first} >/dev/null\n" + "\n".join(f"{line} || [ $? = 1 ]" for line in block.shell())
    run = [sys.executable, "-m", "gpuvirt", "sim", "run", "-H", block.host, "--", "sh", "-ec", script]
    commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # noqa: TID251  handed on
    # Without COLUMNS, which a worker of a parallel run has: a page shows what a pipe gets.
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"PATH": commands}  # noqa: TID251
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = [line for line in block.lines if not line.startswith("$ ")]
    pattern = "".join("(?:.*\n)*" if line == "..." else f"{re.escape(line)} *\n" for line in shown)
    assert re.fullmatch(pattern, done.stdout), done.stdout


def test_there_are_commands_of_each_program() -> None:
    assert len(BLOCKS) > 100
    for program in CHECKS.keys() - {"vfio-manage", "nvidia-vgpu-dm"}:
        assert words_of(program)
    assert [block for block in BLOCKS if block.host]


@pytest.mark.parametrize(
    "wrong",
    [
        ["gpuvirt", "devices", "--no-such-option"],
        ["gpuvirt", "no-such-command"],
        ["gpuvirt", "vgpu", "no-such-command"],
        ["gpuvirt", "sim", "run", "--", "gpuvirt", "doctor", "--no-such-option"],
        ["kubectl", "gpuvirt", "status", "--no-such-option"],
        ["kubectl", "no-such-verb"],
        ["kubectl", "apply", "-f", "deploy/no-such-file.yaml"],
        ["helm", "install", "--generate-name", "deploy/chart"],
        ["helm", "upgrade", "gpuvirt", "..."],
        ["make", "no-such-target"],
        ["make", "image", "NO_SUCH_VARIABLE=1"],
        [".venv/bin/python", "-m", "no.such.module"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_is_noticed(wrong: Sequence[str]) -> None:
    with pytest.raises((AssertionError, USAGE_ERROR)):
        check(wrong)


def test_nvidias_form_of_the_install_is_named_once() -> None:
    texts = [path.read_text() for folder in ("docs", "examples", "deploy") for path in (ROOT / folder).rglob("*.*")]
    assert "".join((*texts, (ROOT / "README.md").read_text())).count("--generate-name") == 1


@pytest.mark.ring("helm")
def test_helm_renders_each_command() -> None:
    """An upgrade adds its values to those of an install; a block of options alone, to the page's earlier ones."""
    rendered, earlier = 0, dict[str, list[str]]()
    for block in BLOCKS:
        for program, *words in block.commands():
            options = earlier.setdefault(block.page, [])
            if program.startswith("--"):
                options += [f"{program}={words[0]}"]
            elif program == "helm" and words[0] in {"install", "upgrade"} and words[1] == RELEASE:
                given = [f"{option}={value}" for option, value in pairwise(words) if option.startswith("--set")]
                render(block, *options, *given)
                rendered += 1
    assert rendered > 10


def render(block: Block, *options: str) -> None:
    base = ("image.repository=registry.example.com/gpuvirt", "extender.enabled=true", "scheduler.enabled=true")
    chart = (RELEASE, str(ROOT / "deploy/chart"), *(f"--set={value}" for value in base))
    done = subprocess.run([str(helm()), "template", *chart, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{block.name}: {done.stderr}"
