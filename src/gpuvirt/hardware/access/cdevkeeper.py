"""The cdev keeper: a process that holds VFIO devices open until the kernel unregisters them, or until the lease ends.

`devicelease` starts this file by its path and passes the open devices to it. The kernel cannot unbind a device from its
driver while the device is open. So the keeper must not be the process that sleeps in that write: a process that is
killed there could no longer close the device, and the kernel would wait for ever.
"""

import os
import select
import sys

NEEDED = 0
"""The end of a pipe, on standard input, whose other end stays open for as long as the lease lasts."""
POLL_S = 0.01
"""The longest time until the keeper closes a device that the kernel unregisters; a lease lasts only moments."""


def keep(present: str, held: dict[str, int]) -> None:
    """Hold devices (file descriptors by name) open, each until the folder `present` no longer lists it."""
    while held and not select.select([NEEDED], [], [], POLL_S)[0]:
        for name in [name for name in held if not _is_present(f"{present}/{name}")]:
            os.close(held.pop(name))
    select.select([NEEDED], [], [])


def _is_present(link: str) -> bool:
    try:
        os.readlink(link)  # noqa: PTH115  pathlib would take longer to import than all else here
    except FileNotFoundError:
        return False  # unknown: nothing, the kernel has removed the device
    except OSError:
        return True  # unknown: the lease is kept
    return True


def pid_in(proc: str) -> str:
    """Return this process's pid in a `/proc`: the host's pid differs from the one in a container's PID namespace."""
    try:
        return os.readlink(f"{proc}/self")  # noqa: PTH115  as above
    except OSError:  # unknown: the `/proc` of a simulated host
        return str(os.getpid())


if __name__ == "__main__":
    os.write(1, pid_in(sys.argv[1]).encode())
    os.close(1)
    keep(sys.argv[2], {name: int(number) for name, number in (entry.split("=") for entry in sys.argv[3:])})
