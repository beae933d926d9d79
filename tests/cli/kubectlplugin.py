"""Programs beside kubectl, as kubectl calls its plugins."""

import subprocess
import sys
from pathlib import Path

from tests.cli.commandline import PATH

COMMANDS = Path(sys.executable).parent


def called(name: str, *arguments: str, folder: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [name, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={"PATH": f"{folder}:{COMMANDS}:{PATH}", "COLUMNS": "100"},
    )
