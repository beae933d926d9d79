"""Asks the node's MPS daemon by NVIDIA's control program.

The program comes with NVIDIA's driver, and speaks with the daemon through sockets in a folder. Contract: `man
nvidia-cuda-mps-control`, and driver 580.159.04: with commands on its standard input it ends with 0 once a daemon has
answered, also where it knows a command not, and with 1 where there is no daemon.
"""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuvirt.hardware.access.tools import PATH, ToolError, ToolMissingError, exists

PROGRAM = "nvidia-cuda-mps-control"
PIPES = "pipe"
"""The folder of its sockets in the daemon's folder."""
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
ANSWER_S = 2.0
"""The longest wait for an answer: a daemon that is stopped or overloaded answers nothing."""
SERVERS = "get_server_list"
QUIT = "quit"
"""The daemon ends once its last client has; until then it takes no new ones."""


@dataclass(frozen=True, slots=True)
class MpsControl:
    """The control program as this process sees it."""

    roots: Sequence[Path]
    """The roots in which the driver may be installed, in the order of precedence."""
    pipes: Path
    """The folder of the daemon's sockets, with the same path for this process and on the host."""

    def ask(self, commands: Sequence[str], timeout_s: float | None = ANSWER_S) -> str:
        """Return the daemon's answers; raise ToolMissingError or ToolError.

        The program needs libc alone, so that it runs outside of its driver's root.
        """
        program = self._program()
        try:
            done = subprocess.run(
                [program],
                input="".join(f"{command}\n" for command in commands),
                env={"PATH": PATH, "LC_ALL": "C", PIPE_DIRECTORY: str(self.pipes)},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolError(f"{program}: {error}") from error
        if done.returncode != 0:
            output = " ".join((done.stderr + done.stdout).split()) or "no output"
            raise ToolError(f"{program} ended with {done.returncode}: {output}", exit_code=done.returncode)
        return done.stdout

    def _program(self) -> Path:
        for root in self.roots:
            for folder in PATH.split(":"):
                if exists(found := root / folder.lstrip("/") / PROGRAM):
                    return found
        raise ToolMissingError(f"no {PROGRAM} in {' or in '.join(str(root) for root in self.roots)}")
