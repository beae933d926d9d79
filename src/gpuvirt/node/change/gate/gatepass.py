"""A change that has passed the gates of its slots, and the records that it keeps of how far it has come."""

import fcntl
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpuvirt.model.inventory.isolation import Slots
from gpuvirt.model.reasons import Reason
from gpuvirt.node.change.gate import gaterecord
from gpuvirt.node.change.gate.gatefiles import GateFiles, UnitBusyError, boot_id, this_process
from gpuvirt.node.change.gate.gatelock import try_lock
from gpuvirt.node.change.gate.gaterecord import GateRecord, GateState

MODULES = "modules"
"""The file of the host's lock."""
MODULES_S = 20.0
"""How long a step on a whole module waits for another: modprobe takes some seconds for NVIDIA's driver."""


@dataclass(slots=True)
class Pass:
    """A change that has passed the gates of its slots; only it writes their records meanwhile."""

    files: GateFiles
    slots: Slots
    locks: Collection[int]
    """A process that has one of these descriptors open holds its lock."""
    host: int | None = None
    """The file of the host's lock, which is open in the change's children, too."""
    held: tuple[Reason, str] | None = None
    """Why what is desired is not reached, with what that depends on, where somebody goes on to desire it."""
    _records: dict[str, GateRecord] = field(default_factory=dict)
    _writing: threading.Lock = field(default_factory=threading.Lock)
    """An event loop says that a step is blocked, and the step may end at that moment."""

    def begin(self) -> None:
        """Begin a generation; what an earlier change has left is settled, since each change begins with a look."""
        for slot in self.slots:
            found = self.files.read(slot)
            if isinstance(found, GateRecord) and found.is_drained_by(this_process()):
                self._records[slot] = found
            else:
                self._records[slot] = gaterecord.settled(found, boot_id())
        self._move(lambda record: record.begin(this_process()))

    def pause(self) -> None:
        """Record that the change is between two steps."""
        self._move(GateRecord.at_safe_point)

    def note(self, step: str) -> None:
        """Record a step before it is taken."""
        self._move(lambda record: record.at_safe_point().in_step(step))

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Be the only one on this host who changes a kernel module or its options; raise UnitBusyError.

        It is the last lock that a change takes, and kept for one step: modules are no unit's own.
        """
        if self.host is None:
            yield
            return
        if not try_lock(self.host, fcntl.LOCK_EX, MODULES_S):
            raise UnitBusyError(f"another process changes kernel modules ({self.files.folder / MODULES})")
        try:
            yield
        finally:
            fcntl.flock(self.host, fcntl.LOCK_UN)

    def block(self) -> None:
        """Record that the kernel blocks the step under way."""
        self._move(GateRecord.block)

    def unblock(self) -> None:
        """Record that the step under way has ended: one that was blocked is the last of its change."""
        self._move(GateRecord.unblock)

    def settle(self) -> None:
        """Record that the change stops: from now on it puts back what it has touched."""
        self._move(GateRecord.settle)

    def end(self) -> None:
        """Record that the change has ended: what it leaves is planned from, or held for a reason."""
        held = self.held
        if held is None:
            self._move(lambda record: record.settle().move(GateState.OPEN))
        else:
            self._move(lambda record: record.settle().hold(*held))

    def _move(self, move: Callable[[GateRecord], GateRecord]) -> None:
        with self._writing:
            for slot, record in self._records.items():
                if (moved := move(record)) is not record:
                    self.files.write(slot, moved)
                    self._records[slot] = moved
