"""Runs programs of the host: modprobe, and NVIDIA's sriov-manage and nvidia-smi.

NVIDIA's programs come with its driver, so they run in the root of the driver container where there is one, else in the
host's root. All of them may sleep in the kernel, so they run in the serial worker of their isolation unit. A program
that is part of a change inherits the locks of the change (`keeping`) and nothing else of this process.
"""

import os
import subprocess
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from time import sleep  # noqa: TID251  between tries, in a serial worker that may sleep
from typing import BinaryIO, Protocol, Self

import msgspec

from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import PciAddress
from gpuvirt.paths import HostPath

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MODPROBE_S = 60.0
NVIDIA_SMI_S = 120.0


class Program(StrEnum):
    """NVIDIA's programs, which come with its driver."""

    SRIOV_MANAGE = "sriov-manage"
    NVIDIA_SMI = "nvidia-smi"


PLACES = {
    Program.SRIOV_MANAGE: ("/usr/lib/nvidia/sriov-manage",),
    Program.NVIDIA_SMI: tuple(f"{folder}/nvidia-smi" for folder in PATH.split(":")),
}
PROGRAM = HostPath("/usr/bin/nvidia-smi")
"""The path of an Unread for output of nvidia-smi that could not be parsed."""
NOT_FOUND = 127
"""The exit code of chroot where it finds no such command (coreutils)."""
UNBIND_LOCK = "cannot obtain unbindlock"
"""The message of sriov-manage, in upper or lower case, while a process has the GPU open, as each NVML client has for a
moment."""
PAUSES_S = (1.0, 2.0, 3.0, 4.0)
"""The pauses before further tries of sriov-manage, as in NVIDIA's own scripts."""


class ToolError(GpuvirtError):
    """A program of the host failed: `exit_code` is None where it did not end by itself, `output` is what it printed."""

    def __init__(self, message: str, *, exit_code: int | None = None, output: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.output = output


class ToolMissingError(ToolError):
    """A program is not installed on the host."""


class Tools(Protocol):
    """The programs that gpuvirt runs."""

    def modprobe(self, module: str) -> None:
        """Load a module and its dependencies; raise ToolError."""
        ...

    def sriov_manage(self, address: PciAddress, enable: bool) -> None:
        """Switch all VFs of an NVIDIA GPU on or off; raise ToolError, ToolMissingError.

        It also succeeds without effect: on a card that it does not support, or that has its VFs already.
        """
        ...

    def nvidia_smi(self, *arguments: str) -> str:
        """Return the output of nvidia-smi; raise ToolError, ToolMissingError."""
        ...

    def demand(self, program: Program) -> None:
        """Raise ToolMissingError where a program is not installed."""
        ...

    def demand_module(self, module: str) -> None:
        """Raise ToolError where modprobe could not load a module, without loading it."""
        ...


class Ended(msgspec.Struct, frozen=True):
    """The result of a program."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """All output of the program; nvidia-smi writes its errors to standard output."""
        return "\n".join(part for part in (self.stderr.strip(), self.stdout.strip()) if part)


Run = Callable[[Sequence[str], float | None], Ended]
"""Runs a command for at most so many seconds; raises OSError or subprocess.TimeoutExpired."""


def run_program(command: Sequence[str], timeout_s: float | None, *, kept: Sequence[int] = ()) -> Ended:
    """Run a command with English output; the command inherits the file descriptors `kept`.

    The command runs to its end even if this process is killed. It writes to files in memory, because a pipe without a
    reader would end it, and it has its own session, so that signals of a terminal do not reach it.
    """
    with os.fdopen(os.memfd_create("stdout"), "r+b") as stdout, os.fdopen(os.memfd_create("stderr"), "r+b") as stderr:
        done = subprocess.run(
            command,
            env={"PATH": PATH, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            timeout=timeout_s,
            pass_fds=kept,
            start_new_session=True,
            check=False,
        )
        return Ended(done.returncode, _written(stdout), _written(stderr))


def _written(file: BinaryIO) -> str:
    """Return the output of a program, with `\\n` as line ends."""
    file.seek(0)
    return file.read().decode(errors="replace").replace("\r\n", "\n")


def run_checked(run: Run, command: Sequence[str], timeout_s: float | None) -> Ended:
    """Return the result of a command that has succeeded; raise ToolMissingError or ToolError."""
    line = " ".join(command)
    try:
        ended = run(command, timeout_s)
    except FileNotFoundError as error:
        raise ToolMissingError(f"{line}: {error}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolError(f"{line}: {error}") from error
    if ended.exit_code != 0:
        message = f"{line} ended with {ended.exit_code}: {ended.output or 'no output'}"
        kind = ToolMissingError if ended.exit_code == NOT_FOUND else ToolError
        raise kind(message, exit_code=ended.exit_code, output=ended.output)
    return ended


def exists(place: Path) -> bool:
    """Return whether a program exists; a link counts, since only chroot can resolve it within its own root."""
    return place.is_symlink() or place.exists()  # unknown: the program counts as missing, and what needs it fails


class HostTools:
    """The programs of the host whose `/` is mounted at `root`, and of the driver container whose `/` is at `driver`."""

    def __init__(
        self,
        root: Path,
        driver: Path | None = None,
        *,
        run: Run = run_program,
        pause: Callable[[float], None] = sleep,
        has: Callable[[Path], bool] = exists,
        is_confined: bool | None = None,
    ) -> None:
        """`is_confined`: this process may not call chroot (only root may), so it runs programs by their path in
        `root`."""
        self._root = root
        self._driver = driver
        self._run = run
        self._pause = pause
        self._has = has
        self._is_confined = os.geteuid() != 0 if is_confined is None else is_confined

    def keeping(self, kept: Sequence[int]) -> Self:
        """Return the same programs, which then inherit the file descriptors `kept`."""
        return type(self)(
            self._root,
            self._driver,
            run=partial(run_program, kept=kept),
            pause=self._pause,
            has=self._has,
            is_confined=self._is_confined,
        )

    def modprobe(self, module: str) -> None:
        """Load a module with the host's own modprobe, modules and settings."""
        self._run_checked([*_into(self._root), "modprobe", "--", module], MODPROBE_S)

    def sriov_manage(self, address: PciAddress, enable: bool) -> None:
        """Switch VFs; try again where another process had the GPU open.

        It has no timeout: an interrupted sriov-manage leaves the GPU without a driver.
        """
        command = [*self._command(Program.SRIOV_MANAGE), "-e" if enable else "-d", address]
        for pause_s in PAUSES_S:
            try:
                self._run_checked(command, None)
            except ToolError as error:  # unknown: the command runs once more, and its last error is raised
                if UNBIND_LOCK not in error.output.lower():
                    raise
                self._pause(pause_s)
            else:
                return
        self._run_checked(command, None)

    def nvidia_smi(self, *arguments: str) -> str:
        """Return the standard output of nvidia-smi."""
        return self._run_checked([*self._command(Program.NVIDIA_SMI), *arguments], NVIDIA_SMI_S).stdout

    def demand(self, program: Program) -> None:
        """Raise ToolMissingError where a program is in none of the roots."""
        self._command(program)

    def demand_module(self, module: str) -> None:
        """Raise ToolError where the host does not have a module, by a dry run of modprobe."""
        self._run_checked([*_into(self._root), "modprobe", "-n", "--", module], MODPROBE_S)

    def _command(self, program: Program) -> Sequence[str]:
        """Return the command that runs a program in the first root that has it."""
        roots = [root for root in (self._driver, self._root) if root is not None]
        for root in roots:
            for place in PLACES[program]:
                local = root / place.lstrip("/")
                if self._has(local):
                    return [str(local)] if self._is_confined else [*_into(root), place]
        output = f"no {program} in {' or in '.join(str(root) for root in roots)}"
        raise ToolMissingError(
            f"{output}; install NVIDIA's vGPU manager, or check that its container runs", output=output
        )

    def _run_checked(self, command: Sequence[str], timeout_s: float | None) -> Ended:
        return run_checked(self._run, command, timeout_s)


def _into(root: Path) -> Sequence[str]:
    return () if root == Path("/") else ("chroot", str(root))
