"""NVIDIA's MPS daemon of a node: its start, in the root of its driver, and questions to it.

Contract: `man nvidia-cuda-mps-control`, and driver 580.159.04. Its server needs the driver's libraries, so the daemon
runs in the root of the host or of the driver's container, and the folder of its sockets has the same path everywhere.
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from gpuvirt.errors import GpuvirtError
from gpuvirt.facts import mps
from gpuvirt.facts.mps import PIPE_DIRECTORY, PIPES
from gpuvirt.hardware.access.tools import (
    PATH,
    Ended,
    Run,
    ToolError,
    ToolMissingError,
    exists,
    run_checked,
    run_program,
)
from gpuvirt.hardware.programs.containerdriver import DriverRoots, NotReadyError, find_driver
from gpuvirt.paths import HostPath

PROGRAM = "nvidia-cuda-mps-control"
ANSWER_S = 2.0
"""The longest wait for an answer: a daemon that is stopped or overloaded answers nothing."""
SERVERS = "get_server_list"
QUIT = "quit"
"""The daemon ends once its last client has; until then it takes no new ones. A second quit meanwhile fails at
once."""


class MpsControl(msgspec.Struct, frozen=True):
    """NVIDIA's control program, which asks the node's MPS daemon, as this process sees it.

    The program comes with NVIDIA's driver, and speaks with the daemon through sockets in a folder. Contract: `man
    nvidia-cuda-mps-control`, and driver 580.159.04: with commands on its standard input it ends with 0 once a daemon
    has answered, also where it knows a command not, and with 1 where there is no daemon.
    """

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


FOLDER = Path("/run/gpuvirt") / mps.FOLDER
"""The daemon's folder on a host, with the folders of its sockets and its logs."""
LOGS, LOG_DIRECTORY = "log", "CUDA_MPS_LOG_DIRECTORY"
MANY_USERS = "multiuser-server"
"""The option of newer daemons to serve the processes of all users at once; else those of another user wait."""
HELP_S, MOUNT_S = 10.0, 30.0


class MpsStart(msgspec.Struct, frozen=True):
    """The command of a daemon that stays in the foreground, and its whole environment."""

    command: Sequence[str]
    environment: Mapping[str, str]


def prepare(system: Path, driver: Path, folder: Path = FOLDER, run: Run = run_program) -> MpsStart:
    """Prepare the daemon's folder, and return how it is started; raise NotReadyError, GpuvirtError.

    `system` and `driver` are the roots of the host and of the driver's container as this process sees them.
    """
    found = find_driver(DriverRoots(system, driver, HostPath(str(driver)), started=None), run)
    root = system if found.is_on_host else driver
    into = () if root == Path("/") else ("chroot", str(root))
    _check_alone(MpsControl((root,), folder / PIPES))
    for part in (PIPES, LOGS):
        (folder / part).mkdir(mode=0o755, parents=True, exist_ok=True)
    if not found.is_on_host:
        place = root / folder.relative_to("/")
        place.mkdir(parents=True, exist_ok=True)
        try:
            run_checked(run, ("mount", "--bind", str(folder), str(place)), MOUNT_S)
        except ToolError as error:
            raise GpuvirtError(f"{folder} can't be mounted at {place}: {error.output or error}") from error
    options = (f"-{MANY_USERS}",) if MANY_USERS in _help((*into, PROGRAM), run) else ()
    environment = {
        "PATH": PATH,
        "LC_ALL": "C",
        PIPE_DIRECTORY: str(folder / PIPES),
        LOG_DIRECTORY: str(folder / LOGS),
    }
    return MpsStart((*into, PROGRAM, "-f", *options), environment)


def _help(program: Sequence[str], run: Run) -> str:
    """Return the program's help, whatever its exit code is."""
    try:
        return run_checked(run, (*program, "--help"), HELP_S).output
    except ToolError as error:
        return error.output


def _check_alone(control: MpsControl) -> None:
    """Raise NotReadyError where a daemon serves the folder already: a second one would take its sockets away."""
    try:
        control.ask((SERVERS,))
    except ToolMissingError as error:
        raise NotReadyError(f"{error}; it comes with NVIDIA's driver") from error
    except ToolError:
        return
    raise NotReadyError(f"an MPS daemon already serves {control.pipes}; stop it with gpuvirt mps quit")
