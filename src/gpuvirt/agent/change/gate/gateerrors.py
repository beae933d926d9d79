"""The errors of gates: why an allocation or a change does not pass."""

import errno
import os
from pathlib import Path

from gpuvirt.errors import GpuvirtError
from gpuvirt.model.reasons import Reason, refusals


class UnitBusyError(GpuvirtError):
    """Another process is changing this unit."""


class UnitBlockedError(UnitBusyError):
    """The kernel blocks a change of this unit whose process has ended; `step` is the blocked step."""

    def __init__(self, message: str, step: str) -> None:
        super().__init__(message)
        self.step = step


class UnitAllocatingError(UnitBusyError):
    """A device of this unit is being allocated now: allocations share the lock of its slot, and no change has it."""

    def __init__(self, unit: str, path: str | Path) -> None:
        """`path` is the file of the lock."""
        self.path = str(path)
        super().__init__(f"{unit}: a device of its PCI slot is being allocated now ({self.path}); try again")


class UnitUnsettledError(UnitBusyError):
    """A device of this unit was allocated a moment ago, or may have been."""

    def __init__(self, message: str, *, again_soon: bool = False) -> None:
        """`again_soon`: one more reading of the kubelet's accounts may settle it."""
        super().__init__(message)
        self.again_soon = again_soon


class GateFailedError(UnitBusyError):
    """A gate's file can't be opened, locked, read or written, so that nothing passes the gate.

    The error may be that of this process alone (EMFILE, EACCES): other processes may pass the gate meanwhile.
    """

    def __init__(self, path: str | Path, error: OSError) -> None:
        number = error.errno or 0
        self.path = str(path)
        self.problem = f"{errno.errorcode.get(number, 'an unknown error')} ({os.strerror(number)})"
        super().__init__(f"{self.path}: {self.problem}")


def why_not_passed(subject: str, error: UnitBusyError) -> Reason:
    """Return why an allocation or a change of `subject` did not pass a gate."""
    match error:
        case UnitBlockedError():
            return refusals.blocked(subject, error.step)
        case UnitAllocatingError():
            return refusals.changing(subject, f"{error.path}: shared by an allocation", is_allocated=True)
        case UnitUnsettledError():
            return refusals.unsettled(subject, str(error))
        case GateFailedError():
            return refusals.gate_failed(subject, error.path, error.problem)
        case _:
            return refusals.changing(subject, str(error))
