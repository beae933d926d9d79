"""The command line, run as a person runs it."""

import os
import subprocess
import sys

PATH = os.environ["PATH"]  # noqa: TID251  handed on
GPUVIRT = [sys.executable, "-m", "gpuvirt"]


def gpuvirt(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run gpuvirt, with nothing of our own environment."""
    return subprocess.run(
        [*GPUVIRT, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"PATH": PATH, **(environment or {})},
    )
