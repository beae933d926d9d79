"""Fills .venv with what gpuvirt needs to run, faster than an editable install: no pip in it, no build, no compiling.

The sources are found by a `.pth` file, and commands are scripts that this writes. Run by Python 3.11 or later:
`tools/run_venv.py pip` also installs the dependencies that constraints.txt pins, `tools/run_venv.py links` does not.
"""

import ensurepip
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

TREE = Path(__file__).resolve().parent.parent
VENV = TREE / ".venv"
PYTHON = VENV / "bin/python"
PATH_FILE = "gpuvirt-sources.pth"
COMMAND = """#!/bin/sh
'''exec' "${{0%/*}}/python" "$0" "$@"
' '''
import sys

from {module} import {function}

sys.exit({function}())
"""
"""Both a shell script, which finds the Python beside it under a path of any length, and the Python program it runs."""


def main() -> int:
    """Make .venv where there is none, and return pip's exit code."""
    project = tomllib.loads((TREE / "pyproject.toml").read_text("utf-8"))["project"]
    if sys.argv[1:] == ["pip"]:
        if not PYTHON.exists():
            venv.create(VENV, with_pip=False, symlinks=True)
        code = _install([*project["dependencies"], *project["optional-dependencies"]["sim"]])
        if code:
            return code
    _link(project["scripts"])
    return 0


def _install(requirements: list[str]) -> int:
    names = ", ".join(sorted(requirement.split(">")[0] for requirement in requirements))
    print(f"Setting up .venv, once: fetching {names} (10 MB) ...", flush=True)
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-compile"]
    pins = ["--constraint", str(TREE / "constraints.txt")]
    return subprocess.run([PYTHON, *_pip(), "install", *options, *pins, *requirements], check=False).returncode


def _pip() -> list[str]:
    """Return how Python is told to run pip: the wheel that comes with it, else the one that ensurepip installs."""
    wheel = next(_wheels(), None)
    if wheel is not None:
        return [str(wheel / "pip")]
    subprocess.run([PYTHON, "-m", "ensurepip"], check=True, stdout=subprocess.DEVNULL)
    return ["-m", "pip"]


def _wheels() -> Iterator[Path]:
    """Yield the wheels of pip that came with this Python; distributions keep theirs in a folder of their own."""
    folder = sysconfig.get_config_var("WHEEL_PKG_DIR")
    for place in (*((Path(folder),) if folder else ()), Path(ensurepip.__path__[0]) / "_bundled"):
        yield from sorted(place.glob("pip-*.whl"))


def _link(scripts: dict[str, str]) -> None:
    """Let the Python of .venv find the sources, and have a command for each entry point."""
    (library,) = (VENV / "lib").glob("python3.*")
    (library / "site-packages" / PATH_FILE).write_text(f"{TREE / 'src'}\n", "utf-8")
    for name, target in scripts.items():
        module, _, function = target.partition(":")
        command = VENV / "bin" / name
        command.write_text(COMMAND.format(module=module, function=function), "utf-8")
        command.chmod(0o755)


if __name__ == "__main__":
    sys.exit(main())
