"""A process of the guest that makes one write as an agent does: under the agent's locks, by a writer process.

Its arguments are the agent's folder, the folder of the gates, the unit, the path, the data. It prints its progress, a
word a line: `agent` and `unit` when it has these locks, then `written`, or the failure.
"""

import sys
from pathlib import Path

from gpuvirt.agent.change.gate.agentlock import only_agent
from gpuvirt.agent.change.gate.gate import UnitBlockedError, UnitBusyError, gate_at
from gpuvirt.errors import AlreadyRunningError
from gpuvirt.facts.ids import PciAddress, slot_of
from gpuvirt.hardware.access.tools import HostTools
from gpuvirt.hardware.access.writerkernel import writing
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.paths import HostPath, HostRoots


def change(own: Path, gates: Path, unit: UnitId, path: HostPath, data: bytes) -> None:
    """Make the write."""
    roots = HostRoots.under(Path("/"))
    with only_agent(own):
        say("agent")
        with gate_at(gates).change(unit, lambda: (slot_of(PciAddress(unit)),)) as passed:
            say("unit")
            passed.note(f"write {path}")
            with writing(roots, HostTools(Path("/")), tuple(passed.locks)) as (kernel, _):
                kernel.write(path, data)
            say("written")


def say(word: str) -> None:
    """Print a line, and flush it."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    """Make the write, and print its result."""
    own, gates, unit, path, data = sys.argv[1:]
    try:
        change(Path(own), Path(gates), UnitId(unit), HostPath(path), data.encode())
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
