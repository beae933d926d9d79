"""A change that has locked the gates of its slots, and the records of its progress."""

import fcntl
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import msgspec

from gpuvirt.agent.change.gate import gaterecord
from gpuvirt.agent.change.gate.gatefiles import GateFiles, boot_id, this_process
from gpuvirt.agent.change.gate.gatelock import GateFailedError, UnitBusyError, deleted, is_current, try_lock
from gpuvirt.agent.change.gate.gaterecord import GateRecord, GateState
from gpuvirt.model.inventory.isolation import Slots
from gpuvirt.model.reasons import Reason

log = logging.getLogger(__name__)

MODULES = "modules"
"""The name of the host's lock for kernel modules."""
MODULES_S = 20.0
"""How long a step on a kernel module waits for another one: modprobe takes some seconds for NVIDIA's driver."""


class Pass(msgspec.Struct):
    """A change that has locked the gates of its slots; only it writes their records meanwhile."""

    files: GateFiles
    slots: Slots
    own_locks: Sequence[int]
    """The descriptors of its locks. Every process that has one of them open keeps that lock."""
    host: int | None = None
    """The descriptor of the host's lock for kernel modules. It is open in the change's children, too."""
    held: tuple[Reason, str] | None = None
    """Why the change could not reach the desired state, and the fingerprint of its circumstances.

    None for a command: the command does not try again.
    """
    beside: "Sequence[Pass]" = ()
    """The passes of the same change through the gates in other folders. Their records follow this one's."""
    _records: dict[str, GateRecord] = msgspec.field(default_factory=dict)
    _writing: threading.Lock = msgspec.field(default_factory=threading.Lock)
    """The event loop records a blocked step while the thread of the change may record the step's end."""

    @property
    def locks(self) -> tuple[int, ...]:
        """The descriptors of all locks of the change, which its children inherit."""
        return (*self.own_locks, *chain.from_iterable(passed.locks for passed in self.beside))

    def begin(self) -> None:
        """Begin a generation. This settles earlier changes, since every change observes the host first."""
        for passed in (self, *self.beside):
            passed.read_records()
        self._move(lambda record: record.begin(this_process()), required=True)

    def read_records(self) -> None:
        """Read the records of this pass alone; those of earlier changes count as settled."""
        for slot in self.slots:
            found = self.files.read(slot)
            if isinstance(found, GateRecord) and found.is_drained_by(this_process()):
                self._records[slot] = found
            else:
                self._records[slot] = gaterecord.settled(found, boot_id())

    def hold(self, reason: Reason, circumstances: str) -> None:
        """Keep the gates held at the end: why the change failed, and the fingerprint of its circumstances."""
        self.held = reason, circumstances

    def pause(self) -> None:
        """Record that the change is between two steps; raise GateFailedError, but not during a rollback.

        Also raises GateFailedError if a lock's file was deleted: other processes pass the gate by a new file.
        """
        self._move(GateRecord.at_safe_point, required=True)
        for passed in (self, *self.beside):
            passed.verify()

    def verify(self) -> None:
        """Raise GateFailedError if the file of one of this pass's own locks was deleted, but not during a rollback."""
        for (slot, record), lock in zip(self._records.items(), self.own_locks, strict=False):
            path = self.files.path_of(slot, "lock")
            if record.state is not GateState.SETTLING and not is_current(lock, path):
                raise deleted(path)

    def note(self, step: str) -> None:
        """Record a step before the change takes it; raise GateFailedError, but not during a rollback."""
        self._move(lambda record: record.at_safe_point().in_step(step), required=True)

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Keep all other processes of the host from changing kernel modules or their options; raise UnitBusyError.

        A change takes this lock last and keeps it for one step only, since all units share the modules.
        """
        if self.host is None:
            yield
            return
        if not try_lock(self.host, fcntl.LOCK_EX, MODULES_S):
            raise UnitBusyError(f"another process is changing kernel modules ({self.files.folder / MODULES})")
        try:
            yield
        finally:
            fcntl.flock(self.host, fcntl.LOCK_UN)

    def block(self) -> None:
        """Record that the kernel blocks the step under way."""
        self._move(GateRecord.block)

    def unblock(self) -> None:
        """Record that the step under way has ended. After a blocked step the change takes no other."""
        self._move(GateRecord.unblock)

    def settle(self) -> None:
        """Record that the change has stopped and rolls back from now on."""
        self._move(GateRecord.settle)

    def end(self) -> None:
        """Record that the change has ended; its gates are open, or held with the reason of its failure."""
        held = self.held
        for passed in self.beside:
            passed.moved(lambda record: record.settle().move(GateState.OPEN))
        if held is None:
            self.moved(lambda record: record.settle().move(GateState.OPEN))
        else:
            self.moved(lambda record: record.settle().hold(*held))

    def _move(self, move: Callable[[GateRecord], GateRecord], *, required: bool = False) -> None:
        """Move all records, and write those that have changed; raise GateFailedError where that is `required`.

        It never is during a rollback, which must go on: the change has its locks, and without them a record that could
        not be written says `SETTLING`, so that nothing passes the gate until the host was observed.
        """
        failed = [*self.moved(move), *chain.from_iterable(passed.moved(move) for passed in self.beside)]
        if required and failed:
            raise failed[0]

    def moved(self, move: Callable[[GateRecord], GateRecord]) -> list[GateFailedError]:
        """Move the records of this pass alone; return the errors, but none of a rollback."""
        failed: list[GateFailedError] = []
        with self._writing:
            for slot, record in self._records.items():
                if (new := move(record)) is not record:
                    self._records[slot] = new
                    failed += self._write(slot, new)
        return failed

    def _write(self, slot: str, record: GateRecord) -> Iterator[GateFailedError]:
        """Write a record; yield the error unless the change rolls back."""
        try:
            self.files.write(slot, record)
        except GateFailedError as error:
            # unknown: the record stays that of a change under way
            log.warning("the gate's record can't be written: %s", error)
            if record.state is not GateState.SETTLING:
                yield error
