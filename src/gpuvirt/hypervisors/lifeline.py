"""What ends a child: the death of the process that started it, and the end of that process's lease.

The kernel does both, so that nothing in either process has to run for it: neither Python while a library holds its
lock, nor a parent that is stopped. The death closes the child's connections, which `resets` makes a reset.
"""

import ctypes
import os
import signal
from time import monotonic  # noqa: TID251  the kernel's clock, by which the parent names the end of the lease

PR_SET_PDEATHSIG = 1
"""include/uapi/linux/prctl.h. The signal is sent when the thread that started the child ends: the parent's main one."""


def tie_to(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; end it now if that has happened already."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        end()


def live_until(until_s: float | None) -> None:
    """Let the kernel end this process at a monotonic second; None: no end. A later call replaces the time."""
    left_s = 0.0 if until_s is None else until_s - monotonic()
    if until_s is not None and left_s <= 0:
        end()
    signal.setitimer(signal.ITIMER_REAL, left_s)


def end() -> None:
    """End this process at once, without cleaning up: its connections are reset."""
    os.kill(os.getpid(), signal.SIGKILL)
