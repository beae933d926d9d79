"""The lock of a change that no deletion of the gates' files can end: a byte of `/dev/null` for each slot.

A gate's files can be deleted while a change has locked them. The change finds that before its next step, but another
one could lock new files meanwhile. All processes that change GPUs see the host's `/dev`, in which `/dev/null` is one
file for all of them, and stays. A lock writes nothing. It belongs to the open file, which a change's children inherit.
"""

import errno
import fcntl
import os
import struct
from contextlib import ExitStack
from pathlib import Path

import msgspec

from gpuvirt.agent.change.gate.gateerrors import GateFailedError, UnitBusyError
from gpuvirt.model.inventory.isolation import Slots

FLOCK = "hhqqi4x"
"""struct flock of 64-bit Linux: type, whence, start, length, pid."""


class Anchor(msgspec.Struct, frozen=True):
    """The file whose bytes stand for the slots of a host."""

    path: Path

    def lock(self, stack: ExitStack, unit: str, slots: Slots) -> int:
        """Lock the bytes of slots until the end of a stack; return the descriptor. Raises UnitBusyError."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise GateFailedError(self.path, error) from error
        stack.callback(os.close, fd)
        for slot in slots:
            try:
                # F_SETLK would end with any other descriptor of the file that this process closes.
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, _byte_of(slot), 1, 0))
            except OSError as error:
                if error.errno not in {errno.EAGAIN, errno.EACCES}:
                    raise GateFailedError(self.path, error) from error
                raise UnitBusyError(
                    f"{unit}: another process is changing the functions of {slot}, and its gate's files were deleted"
                ) from error
        return fd


def _byte_of(slot: str) -> int:
    """Return the byte of a slot (`0000:65:00`): its PCI domain, bus and device as one number."""
    domain, bus, device = (int(part, 16) for part in slot.split(":"))
    return domain << 16 | bus << 8 | device
