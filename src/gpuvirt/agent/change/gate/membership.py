"""An agent's part in the gates of its folder: commands see by a lock that it drains devices when they ask for it.

An agent that runs has the lock on the file `agent` in the folder. A device plugin without that lock (an older one, or
one that may not write there) can't be asked, so commands go by what its sockets list.
"""

import fcntl
import os

import msgspec

from gpuvirt.agent.change.gate.gate import PATIENCE_S, Gate
from gpuvirt.agent.change.gate.gatelock import GateFailedError, is_current, open_file, try_lock
from gpuvirt.model.reasons import Reason, refusals

AGENT = "agent"
"""The name of the file that the agent of a folder has locked."""


class NoGate(msgspec.Struct, frozen=True):
    """The part of an agent that allocates without a gate, and of which every command knows that."""

    why: Reason
    """Why the agent has no gate."""


class Membership(msgspec.Struct):
    """One agent's part in the gates of a folder."""

    own: Gate
    may_lack: bool = False
    """Whether the agent allocates although it can't take part, as a drop-in for a plugin that has no gates does."""
    _lock: int | None = None
    _problem: GateFailedError | None = msgspec.field(default=None)

    @property
    def gate(self) -> Gate | NoGate:
        """The gate that each allocation of the agent passes."""
        if self._lock is None and self.may_lack and self._problem is not None:
            return NoGate(self._reason(self._problem))
        return self.own

    @property
    def problem(self) -> Reason | None:
        """Why the agent does not take part, None if it does."""
        return self._reason(self._problem) if self._problem is not None else None

    def join(self) -> None:
        """Take part from now on; try again where that failed, and where the file was deleted."""
        path = self.own.folder / AGENT
        try:
            if self._lock is not None and is_current(self._lock, path):
                return
            self.leave()
            lock = open_file(path)
            try:
                if try_lock(lock, fcntl.LOCK_EX, PATIENCE_S):  # a command tries the lock for a moment
                    self._lock, lock = lock, -1
            finally:
                if lock >= 0:
                    os.close(lock)
            self._problem = None
        except GateFailedError as error:
            self._problem = error

    def leave(self) -> None:
        """Take no part any more."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _reason(self, error: GateFailedError) -> Reason:
        if self.may_lack:
            return refusals.gate_failed("the device plugin", error.path, error.problem, is_plugins=True)
        return refusals.gate_failed("the agent", error.path, error.problem)


def has_member(gate: Gate) -> bool:
    """Return whether an agent takes part in the gates of a folder; raise GateFailedError."""
    path = gate.folder / AGENT
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # unknown: nothing, no agent takes part
    except OSError as error:
        raise GateFailedError(path, error) from error
    try:
        return not try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)
