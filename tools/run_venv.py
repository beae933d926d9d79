"""Fills .venv with the packages that gpuvirt needs to run, without installing pip, building or compiling.

That is faster than an editable install. A `.pth` file leads to the sources, and the commands are scripts. Requires
Python 3.11. `tools/run_venv.py pip` also installs the dependencies that constraints.txt pins, `tools/run_venv.py links`
does not.
"""

import ensurepip
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path

TREE = Path(__file__).resolve().parent.parent
VENV = TREE / ".venv"
PYTHON = VENV / "bin/python"
PATH_FILE = "gpuvirt-sources.pth"
OTHERS = ("schedules", "simulator")
"""The folders of the other distributions, whose entry points `gpuvirt` runs."""
COMMAND = """#!/bin/sh
'''exec' "${{0%/*}}/python" "$0" "$@"
' '''
import sys

from {module} import {function}

sys.exit({function}())
"""
"""A shell script, which finds the Python beside it at a path of any length, and also the Python program to run."""


def main() -> int:
    """Create .venv where it is missing, and return pip's exit code."""
    project = tomllib.loads((TREE / "pyproject.toml").read_text("utf-8"))["project"]
    others = [tomllib.loads((TREE / folder / "pyproject.toml").read_text("utf-8"))["project"] for folder in OTHERS]
    if sys.argv[1:] == ["pip"]:
        if not PYTHON.exists():
            venv.create(VENV, with_pip=False, symlinks=True)
        required = [dependency for each in (project, *others) for dependency in each["dependencies"]]
        code = _install([dependency for dependency in required if not dependency.startswith("gpuvirt")])
        if code:
            return code
    _link(project["scripts"])
    for folder, other in zip(OTHERS, others, strict=True):
        _register(TREE / folder / "src", other["name"], other["entry-points"])
    return 0


def _install(requirements: list[str]) -> int:
    names = ", ".join(sorted(requirement.split(">")[0] for requirement in requirements))
    print(f"Setting up .venv, once: fetching {names} (10 MB) ...", flush=True)
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-compile"]
    pins = ["--constraint", str(TREE / "constraints.txt")]
    return subprocess.run([PYTHON, *_pip(), "install", *options, *pins, *requirements], check=False).returncode


def _pip() -> list[str]:
    """Return how Python runs pip: the wheel that comes with it, otherwise the pip that ensurepip installs."""
    wheel = next(_wheels(), None)
    if wheel is not None:
        return [str(wheel / "pip")]
    subprocess.run([PYTHON, "-m", "ensurepip"], check=True, stdout=subprocess.DEVNULL)
    return ["-m", "pip"]


def _wheels() -> Iterator[Path]:
    """Yield the pip wheels of this Python; distributions keep theirs in a separate folder."""
    folder = sysconfig.get_config_var("WHEEL_PKG_DIR")
    for place in (*((Path(folder),) if folder else ()), Path(ensurepip.__path__[0]) / "_bundled"):
        yield from sorted(place.glob("pip-*.whl"))


def _link(scripts: dict[str, str]) -> None:
    """Make .venv's Python find the sources, and write a command for each entry point."""
    (library,) = (VENV / "lib").glob("python3.*")
    sources = (TREE / "src", *(TREE / folder / "src" for folder in OTHERS))
    (library / "site-packages" / PATH_FILE).write_text("".join(f"{folder}\n" for folder in sources), "utf-8")
    for name, target in scripts.items():
        module, _, function = target.partition(":")
        command = VENV / "bin" / name
        command.write_text(COMMAND.format(module=module, function=function), "utf-8")
        command.chmod(0o755)


def _register(sources: Path, name: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Make .venv's Python find the entry points of another distribution."""
    (library,) = (VENV / "lib").glob("python3.*")
    package = name.replace("-", "_")
    text = (sources / package / "__init__.py").read_text("utf-8")
    (version,) = re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    folder = library / "site-packages" / f"{package}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (folder / "entry_points.txt").write_text("\n".join((*lines, "")), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
