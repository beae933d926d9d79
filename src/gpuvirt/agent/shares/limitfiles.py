"""The limits of shares: HAMi-core's library on the host with the linker's list of it, or the node's MPS daemon."""

import stat
from pathlib import Path

import msgspec

from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.agent.store.files import replace_file
from gpuvirt.facts.mps import FOLDER, PIPES
from gpuvirt.hardware.access.tools import ToolError
from gpuvirt.model.desired.settings import HamiCore
from gpuvirt.model.reasons import sharing
from gpuvirt.model.reasons.sharing import NoLimit
from gpuvirt.model.shares.node import mps
from gpuvirt.model.shares.node.hamicore import HEADER, LIBRARY, why_unusable
from gpuvirt.model.shares.node.limits import LimitPaths
from gpuvirt.model.shares.placement import GpuId


class MpsLimits(msgspec.Struct, frozen=True):
    """The daemon of the node."""

    roots: tuple[Path, ...]
    """The roots in which NVIDIA's driver may be installed, in the order of precedence."""
    pipes: Path
    """The folder of the daemon's sockets, with the same path for the agent and on the host."""

    def ensure(self, gpu: GpuId) -> str:
        """Return the folder of the daemon's sockets; raise AllocationRefusedError where clients would have no limits.

        A process that finds no daemon runs without it, and so without its limits (seen with driver 580.159.04).
        """
        from gpuvirt.hardware.programs.mpsdaemon import MpsControl  # noqa: PLC0415  other agents do without

        pipes = self.pipes
        try:
            daemon = mps.parse(MpsControl(self.roots, pipes).ask(mps.QUESTIONS))
        except ToolError as error:
            raise AllocationRefusedError(sharing.limit_not_possible(pipes, NoLimit.DAEMON, str(error))) from error
        if daemon is None:
            raise AllocationRefusedError(
                sharing.limit_not_possible(pipes, NoLimit.DAEMON, f"it did not answer {mps.PERCENTAGE}")
            )
        if (clients := daemon.clients_of(gpu)) >= mps.MOST_CLIENTS:
            raise AllocationRefusedError(sharing.limit_not_possible(gpu, NoLimit.CLIENTS, f"ps: {clients} clients"))
        return str(pipes)


NO_DAEMON = MpsLimits((), Path("/run/gpuvirt") / FOLDER / PIPES)
"""The `MpsLimits` of an agent that limits no shares."""


OWN_PROGRAM = Path("/proc/self/exe")
FILE = "ld.so.preload"
CONTENT = f"{LIBRARY}\n".encode()


class LimitFiles(msgspec.Struct, frozen=True):
    """The files as the agent sees them."""

    library: Path
    """The library on the host."""
    root: Path
    """The root folder of the host."""
    preload: Path
    """The list of the library, in a folder that has the same path for the agent and for the container runtime."""

    def ensure(self) -> LimitPaths:
        """Return the paths on the host, with the list written; raise AllocationRefusedError where one is missing."""
        try:
            why = _why_unusable(self.root / self.library.relative_to("/"))
        except OSError as error:
            why = str(error)
        if why is not None:
            raise AllocationRefusedError(sharing.limit_not_possible(self.library, NoLimit.LIBRARY, why))
        try:
            if not (self.preload.is_file() and self.preload.read_bytes() == CONTENT):  # unknown: written again
                replace_file(self.preload, CONTENT, durable=False, mode=0o644)
        except OSError as error:
            raise AllocationRefusedError(sharing.limit_not_possible(self.preload, NoLimit.LIST, str(error))) from error
        return LimitPaths(str(self.library), str(self.preload))


NO_LIBRARY = LimitFiles(Path(HamiCore().library), Path("/"), Path("/run/gpuvirt") / FILE)
"""The files of an agent that limits no shares."""


def _why_unusable(path: Path) -> str | None:
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):
        return "no regular file"
    if not mode & stat.S_IROTH:
        return "not readable by all users, as whom containers run"
    with path.open("rb") as file, OWN_PROGRAM.open("rb") as program:
        return why_unusable(file.read(HEADER), program.read(HEADER))
