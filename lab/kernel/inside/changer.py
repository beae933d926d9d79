"""A process of the guest that makes one write as an agent does: under its locks, by a process that can be left behind.

Its arguments are the agent's folder, the folder of units' locks, the unit, the path, the data. It prints what became of
that, a word a line: `agent` and `unit` when it has the locks, then `written`, or why not.
"""

import sys
from pathlib import Path

from gpuvirt.errors import AlreadyRunningError
from gpuvirt.hardware.tools import HostTools
from gpuvirt.hardware.writerkernel import writing
from gpuvirt.model.isolation import UnitId
from gpuvirt.node.guard import UnitBlockedError, UnitBusyError, only_agent, unit_locked
from gpuvirt.paths import HostPath, HostRoots


def change(own: Path, locks: Path, unit: UnitId, path: HostPath, data: bytes) -> None:
    """Make the write."""
    roots = HostRoots.under(Path("/"))
    with only_agent(own):
        say("agent")
        with unit_locked(locks, unit) as lock, writing(roots, HostTools(Path("/")), (lock.fd,)) as (kernel, _):
            say("unit")
            lock.note(f"write {path}")
            kernel.write(path, data)
            say("written")


def say(word: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    """Say how it ends."""
    own, locks, unit, path, data = sys.argv[1:]
    try:
        change(Path(own), Path(locks), UnitId(unit), HostPath(path), data.encode())
    except UnitBlockedError as error:
        say(f"blocked: {error.step}")
    except UnitBusyError:
        say("busy")
    except AlreadyRunningError:
        say("another agent")
    except OSError as error:
        say(f"errno {error.errno}")


if __name__ == "__main__":
    main()
