"""Runs the project's own checkers, as `make lint` does."""

import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"


def run(tool: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a checker: `check_words`."""
    command = [sys.executable, str(TOOLS / f"{tool}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def faults(tool: str, *arguments: str) -> list[str]:
    """Return what a checker finds, line by line; its exit code says whether it finds anything."""
    done = run(tool, *arguments)
    assert done.returncode == (1 if done.stdout else 0), done.stderr
    return done.stdout.splitlines()
