"""The programs of a guest, which has neither NVIDIA's programs nor modprobe."""

import errno
from collections.abc import Sequence
from pathlib import Path

from gpuvirt.hardware.access.tools import Ended, HostTools


def _fail_as_missing(command: Sequence[str], timeout_s: float | None) -> Ended:  # noqa: ARG001
    raise FileNotFoundError(errno.ENOENT, "No such file or directory", command[0])


NO_TOOLS = HostTools(Path("/"), run=_fail_as_missing, has=lambda _: False)
"""Fails every call as if the program were missing."""
