"""Programs of the host that gpuvirt has to run: modprobe."""

import subprocess
from pathlib import Path
from typing import Protocol

from gpuvirt.errors import GpuvirtError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MODPROBE_S = 60.0


class ToolError(GpuvirtError):
    """A program of the host failed, or is not there."""


class Tools(Protocol):
    """What is asked of programs."""

    def modprobe(self, module: str) -> None:
        """Load a module with what it needs; raise ToolError."""
        ...


class HostTools:
    """The programs of the host whose `/` is seen at `root`."""

    def __init__(self, root: Path) -> None:
        self._into = () if root == Path("/") else ("chroot", str(root))

    def modprobe(self, module: str) -> None:
        """Load a module by the host's own modprobe, with the host's own modules and settings."""
        command = [*self._into, "modprobe", "--", module]
        try:
            done = subprocess.run(
                command, env={"PATH": PATH}, capture_output=True, text=True, timeout=MODPROBE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolError(f"{' '.join(command)}: {error}") from error
        if done.returncode != 0:
            raise ToolError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
