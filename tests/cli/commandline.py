"""The command line, as a user runs it."""

import asyncio
import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from gpuvirt.cli import main

PATH = os.environ["PATH"]  # noqa: TID251  passed on
GPUVIRT = [sys.executable, "-m", "gpuvirt"]


def gpuvirt(
    *arguments: str, environment: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run gpuvirt as a program, without the environment of this process."""
    return subprocess.run(
        [*GPUVIRT, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"PATH": PATH, **(environment or {})},
        cwd=cwd,
    )


def called(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    program: Callable[[], None] = main.main,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command of gpuvirt in this process, which takes a tenth of the time; not for commands that keep running.

    `program` is gpuvirt itself, or one of those with the names of NVIDIA's programs.
    """
    output = io.BytesIO(), io.BytesIO()
    out, err = (io.TextIOWrapper(stream, encoding="utf-8", write_through=True) for stream in output)
    code: object = 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(cwd or Path.cwd()),
        _environment({"PATH": PATH, **(environment or {})}),
        _arguments(arguments),
    ):
        try:
            program()
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(
        arguments, code if isinstance(code, int) else 0, *(stream.getvalue() for stream in output)
    )


def ran(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    program: Callable[[], None] = main.main,
) -> subprocess.CompletedProcess[str]:
    """Run a command as `called` does, and return its output as text."""
    done = called(*arguments, environment=environment, cwd=cwd, program=program)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@contextlib.contextmanager
def _arguments(arguments: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = ["gpuvirt", *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)  # noqa: TID251  restored below
    os.environ.clear()  # noqa: TID251
    os.environ.update(variables)  # noqa: TID251
    try:
        yield
    finally:
        os.environ.clear()  # noqa: TID251
        os.environ.update(before)  # noqa: TID251


def loaded_by(*arguments: str) -> set[str]:
    """Return the modules that a command line has loaded when it exits."""
    script = (
        "import sys\nfrom gpuvirt.cli.main import run\n"
        f"try: run({list(arguments)!r})\n"
        "finally: print('\\n' + ' '.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return set(done.stdout.splitlines()[-1].split())


async def printed(kubeconfig: Path, *arguments: str) -> str:
    """Return what a command prints."""
    process = await asyncio.create_subprocess_exec(
        *(*GPUVIRT, *arguments, "--kubeconfig", str(kubeconfig)), env={"PATH": PATH}, stdout=asyncio.subprocess.PIPE
    )
    return (await process.communicate())[0].decode()
