"""The files of the host that limit shares: the library, which an admin has put there, and the linker's list of it."""

import stat
from pathlib import Path

import msgspec

from gpuvirt.agent.shares.refusals import ShareRefusedError
from gpuvirt.agent.store.files import replace_file
from gpuvirt.model.desired.settings import HamiCore
from gpuvirt.model.reasons import sharing
from gpuvirt.model.reasons.sharing import NoLimit
from gpuvirt.model.shares.node.hamicore import HEADER, LIBRARY, why_unusable
from gpuvirt.model.shares.node.limits import LimitPaths

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
        """Return the paths on the host, with the list written; raise ShareRefusedError where a container lacks one."""
        try:
            why = _why_unusable(self.root / self.library.relative_to("/"))
        except OSError as error:
            why = str(error)
        if why is not None:
            raise ShareRefusedError(sharing.limit_not_possible(self.library, NoLimit.LIBRARY, why))
        try:
            if not (self.preload.is_file() and self.preload.read_bytes() == CONTENT):  # unknown: written again
                replace_file(self.preload, CONTENT, durable=False, mode=0o644)
        except OSError as error:
            raise ShareRefusedError(sharing.limit_not_possible(self.preload, NoLimit.LIST, str(error))) from error
        return LimitPaths(str(self.library), str(self.preload))


NO_LIBRARY = LimitFiles(Path(HamiCore().library), Path("/"), Path("/run/gpuvirt") / FILE)
"""The files of an agent that limits no shares."""


def _why_unusable(path: Path) -> str | None:
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):
        return "no regular file"
    if not mode & stat.S_IROTH:
        return "not readable by all users, as whom containers run"
    with path.open("rb") as file:
        return why_unusable(file.read(HEADER))
