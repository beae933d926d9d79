"""The programs of a guest, in which nothing of NVIDIA's is installed, and no modprobe."""

import errno
from collections.abc import Sequence
from pathlib import Path

from gpuvirt.hardware.tools import Ended, HostTools


def _not_there(command: Sequence[str], timeout_s: float | None) -> Ended:  # noqa: ARG001
    raise FileNotFoundError(errno.ENOENT, "No such file or directory", command[0])


NO_TOOLS = HostTools(Path("/"), run=_not_there, has=lambda _: False)
"""Refuses whatever is asked of them, as missing."""
