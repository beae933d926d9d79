"""The cdev keeper: a process that holds VFIO devices open until the kernel wants them, or until nobody needs them held.

`devicelease` starts this file by its path and hands the open devices over. A device that is open keeps the kernel from
taking it from its driver, so its keeper must not be the process that sleeps in that write: killed there, it could not
close the device any more, and the kernel would wait for ever.
"""

import os
import select
import sys

NEEDED = 0
"""A pipe that others hold open for as long as the devices are to be held."""
POLL_S = 0.01
"""How soon a device that the kernel wants is closed; a lease lasts for moments."""


def keep(present: str, held: dict[str, int]) -> None:
    """Hold devices by their open nodes, each until it is no longer in the folder `present`."""
    while held and not select.select([NEEDED], [], [], POLL_S)[0]:
        for name in [name for name in held if not _is_present(f"{present}/{name}")]:
            os.close(held.pop(name))
    select.select([NEEDED], [], [])


def _is_present(link: str) -> bool:
    try:
        os.readlink(link)  # noqa: PTH115  pathlib would take longer to import than all else here
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def number_in(proc: str) -> str:
    """Return this process's number in that `/proc`: in a container the host's has another than the container's."""
    try:
        return os.readlink(f"{proc}/self")  # noqa: PTH115  as above
    except OSError:  # a simulated host's
        return str(os.getpid())


if __name__ == "__main__":
    os.write(1, number_in(sys.argv[1]).encode())
    os.close(1)
    keep(sys.argv[2], {name: int(number) for name, number in (entry.split("=") for entry in sys.argv[3:])})
