"""Asks the node's MPS daemon by NVIDIA's control program.

The program comes with NVIDIA's driver, and speaks with the daemon through sockets in a folder. Contract: `man
nvidia-cuda-mps-control`, and driver 580.159.04: with commands on its standard input it ends with 0 once a daemon has
answered, also where it knows a command not, and with 1 where there is no daemon.
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from gpuvirt.facts.mps import PIPE_DIRECTORY
from gpuvirt.hardware.access.tools import PATH, Ended, ToolMissingError, exists, run_checked

PROGRAM = "nvidia-cuda-mps-control"
ANSWER_S = 2.0
"""The longest wait for an answer: a daemon that is stopped or overloaded answers nothing."""
SERVERS = "get_server_list"
QUIT = "quit"
"""The daemon ends once its last client has; until then it takes no new ones. A second quit meanwhile fails at
once."""


class MpsControl(msgspec.Struct, frozen=True):
    """The control program as this process sees it."""

    roots: Sequence[Path]
    """The roots in which the driver may be installed, in the order of precedence."""
    pipes: Path
    """The folder of the daemon's sockets, with the same path for this process and on the host."""

    def ask(self, commands: Sequence[str], timeout_s: float | None = ANSWER_S) -> str:
        """Return the daemon's answers; raise ToolMissingError or ToolError.

        The program needs libc alone, so that it runs outside of its driver's root.
        """

        def run(command: Sequence[str], timeout_s: float | None) -> Ended:
            done = subprocess.run(
                command,
                input="".join(f"{line}\n" for line in commands),
                env=self.environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
            return Ended(done.returncode, done.stdout, done.stderr)

        return run_checked(run, (str(self.program),), timeout_s).stdout

    @property
    def environment(self) -> Mapping[str, str]:
        """The whole environment of the control program."""
        return {"PATH": PATH, "LC_ALL": "C", PIPE_DIRECTORY: str(self.pipes)}

    @property
    def program(self) -> Path:
        """The control program; reading it raises ToolMissingError where no root has it."""
        for root in self.roots:
            for folder in PATH.split(":"):
                if exists(found := root / folder.lstrip("/") / PROGRAM):
                    return found
        raise ToolMissingError(f"no {PROGRAM} in {' or in '.join(str(root) for root in self.roots)}")
