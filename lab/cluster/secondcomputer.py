"""The second computer that the script `second-computer` makes, as seen by programs that run on it."""

import ctypes
import os
from pathlib import Path

COMMAND = Path(__file__).parent / "second-computer"
"""The script."""
_NETWORK = "GPUVIRT_LAB_NETWORK"
_CGROUP = "gpuvirt-second"
_CLONE_NEWNET = 0x40000000


def is_this() -> bool:
    """Return whether this program runs on the second computer."""
    return _NETWORK in os.environ


def remove_cgroups() -> None:
    """Remove the empty cgroups that are the roots of the second computer; raise OSError where processes are left."""
    hierarchies = Path("/sys/fs/cgroup")
    for cgroup in (hierarchies / _CGROUP, *hierarchies.glob(f"*/{_CGROUP}")):
        if cgroup.exists():
            cgroup.rmdir()


def join_network() -> None:
    """Give this thread, and programs that it starts, the first computer's network, which builds need; raise OSError."""
    if not is_this():
        return
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is in Python 3.12
    with Path(os.environ[_NETWORK]).open("rb") as network:
        if libc.setns(network.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", os.environ[_NETWORK])
