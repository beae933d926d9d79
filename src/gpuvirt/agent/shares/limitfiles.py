"""The limits of shares: HAMi-core's library, the MPS daemon, and the program that sets limits in NVIDIA's driver."""

import errno
import stat
from collections.abc import Sequence
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
from gpuvirt.model.shares.node.driverlimit import LIBRARY as NVML
from gpuvirt.model.shares.node.driverlimit import PROGRAM, LimitProgram, library_in
from gpuvirt.model.shares.node.hamicore import HEADER, LIBRARY, why_unusable
from gpuvirt.model.shares.node.limits import LimitPaths
from gpuvirt.model.shares.node.nvidiacdi import Fields
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
        if (clients := self.ask().clients_of(gpu)) >= mps.MOST_CLIENTS:
            raise AllocationRefusedError(sharing.limit_not_possible(gpu, NoLimit.CLIENTS, f"ps: {clients} clients"))
        return str(self.pipes)

    def ask(self) -> mps.MpsDaemonState:
        """Return what the daemon answers; raise AllocationRefusedError where it does not."""
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
        return daemon


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


SOURCE = Path("/usr/local/lib/gpuvirt") / PROGRAM
"""The program in gpuvirt's image."""
CGROUPS = Path("/sys/fs/cgroup")
LOADERS = (Path("/lib64/ld-linux-x86-64.so.2"), Path("/lib/ld-linux-aarch64.so.1"))
LIBRARIES = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")
"""The C library, beside its loader, as far as the program and NVIDIA's library need it."""


class DriverLimits:
    """The program that sets limits in NVIDIA's driver, with its C library, in a folder that the host has, too."""

    def __init__(
        self, folder: Path, source: Path = SOURCE, cgroups: Path = CGROUPS, loaders: Sequence[Path] = LOADERS
    ) -> None:
        self._source = source
        self._folder = folder
        self._cgroups = cgroups
        self._loaders = loaders
        self._loader = ""
        """Its name; empty before this process has compared the folder with its own files."""

    def ensure(self, gpu: str, edits: Fields) -> LimitProgram:
        """Return the program for NVML as a GPU's CDI edits mount it, with its folder complete.

        Raises AllocationRefusedError where no limit could be set.
        """
        if (library := library_in(edits)) is None:
            raise AllocationRefusedError(sharing.limit_not_possible(gpu, NoLimit.NVML, f"no mount of {NVML}*"))
        # unknown: copied again
        if not self._loader or not all((self._folder / name).exists() for name in (PROGRAM, *LIBRARIES)):
            try:
                self._loader = self._copied()
            except OSError as error:
                subject = error.filename or self._folder
                reason = sharing.limit_not_possible(subject, NoLimit.PROGRAM, str(error))
                raise AllocationRefusedError(reason) from error
        return LimitProgram(self._folder, self._loader, self._cgroups, library)

    def _copied(self) -> str:
        """Copy what differs, each file as a whole since a container may start by it, and return the loader's name."""
        found = (path for path in self._loaders if path.is_file())  # unknown: as a computer without one
        if (loader := next(found, None)) is None:
            raise FileNotFoundError(errno.ENOENT, "no loader of the GNU C library", str(self._loaders[0]))
        loader = loader.resolve(strict=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        files = {PROGRAM: self._source, loader.name: loader, **{name: loader.with_name(name) for name in LIBRARIES}}
        for name, source in files.items():
            content, path = source.read_bytes(), self._folder / name
            if not (path.is_file() and path.read_bytes() == content):  # unknown: written again
                replace_file(path, content, durable=False, mode=0o755)
        return loader.name


NO_PROGRAM = DriverLimits(Path("/var/lib/gpuvirt") / PROGRAM)
"""The `DriverLimits` of an agent that limits no shares."""
