"""Programs of the host that gpuvirt has to run: modprobe, and NVIDIA's sriov-manage and nvidia-smi.

NVIDIA's come with its driver, so they are run in the driver container's root where there is one, else in the host's.
All of them may sleep in the kernel, so they run in the lane of their unit. One that takes part in a change keeps the
locks of the change (`keeping`) and nothing else of this process.
"""

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from time import sleep  # noqa: TID251  between tries, in a lane that may sleep
from typing import BinaryIO, Protocol, Self

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
"""What an Unread names as its place where nvidia-smi said something that was not understood."""
NOT_FOUND = 127
"""How chroot ends where it finds no such command (coreutils)."""
UNBIND_LOCK = "cannot obtain unbindlock"
"""What sriov-manage says, in whatever case, while somebody looks at the GPU: NVML's clients do for a moment each."""
PAUSES_S = (1.0, 2.0, 3.0, 4.0)
"""How long to wait before each further try of sriov-manage, as NVIDIA's own scripts do."""


class ToolError(GpuvirtError):
    """A program of the host failed. `exit_code` is None where it did not end by itself, `said` what it wrote."""

    def __init__(self, message: str, *, exit_code: int | None = None, said: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.said = said


class ToolMissingError(ToolError):
    """A program of the host is not there."""


class Tools(Protocol):
    """What is asked of programs."""

    def modprobe(self, module: str) -> None:
        """Load a module with what it needs; raise ToolError."""
        ...

    def sriov_manage(self, address: PciAddress, enable: bool) -> None:
        """Switch all VFs of an NVIDIA GPU on or off; raise ToolError, ToolMissingError.

        It ends well, too, where it did nothing: on a card that it does not know, or that has its VFs already.
        """
        ...

    def nvidia_smi(self, *arguments: str) -> str:
        """Return what nvidia-smi writes; raise ToolError, ToolMissingError."""
        ...

    def demand(self, program: Program) -> None:
        """Raise ToolMissingError where a program is not installed, which `said` of the error tells."""
        ...

    def demand_module(self, module: str) -> None:
        """Raise ToolError where modprobe could not load a module; nothing is loaded."""
        ...


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        """What it wrote; nvidia-smi writes its errors among its answers."""
        return "\n".join(part for part in (self.stderr.strip(), self.stdout.strip()) if part)


Run = Callable[[Sequence[str], float | None], Ended]
"""Runs a command for so many seconds at most; raises OSError or subprocess.TimeoutExpired."""


def run_program(command: Sequence[str], timeout_s: float | None, *, kept: Sequence[int] = ()) -> Ended:
    """Run a command of the host's, with a language that we can read; `kept` are descriptors that it has open, too.

    It goes on to its end if this process is killed meanwhile: it writes to files in memory, as a pipe that nobody reads
    would end it, and a terminal's signals don't reach it.
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
    """Return what a program has written, with line ends as ours."""
    file.seek(0)
    return file.read().decode(errors="replace").replace("\r\n", "\n")


def is_there(place: Path) -> bool:
    """Return whether a program is there; a link is one into its own root, which only chroot can follow."""
    return place.is_symlink() or place.exists()


class HostTools:
    """The programs of the host whose `/` is seen at `root`, and of the driver container whose `/` is at `driver`."""

    def __init__(
        self,
        root: Path,
        driver: Path | None = None,
        *,
        run: Run = run_program,
        pause: Callable[[float], None] = sleep,
        has: Callable[[Path], bool] = is_there,
        is_confined: bool | None = None,
    ) -> None:
        """`is_confined`: this process may not change its root (only root may), so programs run where they lie."""
        self._root = root
        self._driver = driver
        self._run = run
        self._pause = pause
        self._has = has
        self._is_confined = os.geteuid() != 0 if is_confined is None else is_confined

    def keeping(self, kept: Sequence[int]) -> Self:
        """Return the same programs, run as processes that have the descriptors `kept` open for as long as they live."""
        return type(self)(
            self._root,
            self._driver,
            run=partial(run_program, kept=kept),
            pause=self._pause,
            has=self._has,
            is_confined=self._is_confined,
        )

    def modprobe(self, module: str) -> None:
        """Load a module by the host's own modprobe, with the host's own modules and settings."""
        self._called([*_into(self._root), "modprobe", "--", module], MODPROBE_S)

    def sriov_manage(self, address: PciAddress, enable: bool) -> None:
        """Switch VFs; a try that met somebody with the GPU open is made again.

        It is never cut short: half done, it leaves the GPU without a driver.
        """
        command = [*self._found(Program.SRIOV_MANAGE), "-e" if enable else "-d", address]
        for pause_s in PAUSES_S:
            try:
                self._called(command, None)
            except ToolError as error:
                if UNBIND_LOCK not in error.said.lower():
                    raise
                self._pause(pause_s)
            else:
                return
        self._called(command, None)

    def nvidia_smi(self, *arguments: str) -> str:
        """Return what nvidia-smi writes to its standard output."""
        return self._called([*self._found(Program.NVIDIA_SMI), *arguments], NVIDIA_SMI_S).stdout

    def demand(self, program: Program) -> None:
        """See that a program is in one of the roots."""
        self._found(program)

    def demand_module(self, module: str) -> None:
        """See by modprobe's dry run that the host has a module."""
        self._called([*_into(self._root), "modprobe", "-n", "--", module], MODPROBE_S)

    def _found(self, program: Program) -> Sequence[str]:
        """Return how a program is called in the first root that has it at one of its places."""
        roots = [root for root in (self._driver, self._root) if root is not None]
        for root in roots:
            for place in PLACES[program]:
                local = root / place.lstrip("/")
                if self._has(local):
                    return [str(local)] if self._is_confined else [*_into(root), place]
        said = f"no {program} in {' nor in '.join(str(root) for root in roots)}"
        raise ToolMissingError(f"{said}; install NVIDIA's vGPU manager, or see that its container runs", said=said)

    def _called(self, command: Sequence[str], timeout_s: float | None) -> Ended:
        line = " ".join(command)
        try:
            ended = self._run(command, timeout_s)
        except FileNotFoundError as error:
            raise ToolMissingError(f"{line}: {error}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolError(f"{line}: {error}") from error
        if ended.exit_code != 0:
            message = f"{line} ended with {ended.exit_code}: {ended.said or 'it said nothing'}"
            kind = ToolMissingError if ended.exit_code == NOT_FOUND else ToolError
            raise kind(message, exit_code=ended.exit_code, said=ended.said)
        return ended


def _into(root: Path) -> Sequence[str]:
    return () if root == Path("/") else ("chroot", str(root))
