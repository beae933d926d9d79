"""The gates of a host: one for each PCI slot, which whoever changes or allocates a device of the slot passes.

Each has two locks and a record in a folder that does not outlive a boot. Children of a change inherit `SLOT.lock` and
hold it for as long as the kernel blocks them; `SLOT.owner` ends with the process that makes the change. `SLOT.json` is
the record, which only the holder of the lock writes. `SLOT.lock` itself has a line for each allocation, written before
it is answered: for a while no account of the kubelet tells of it.
"""

import fcntl
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from time import monotonic, sleep  # noqa: TID251  for a lock that another process has for a moment

from gpuvirt.clock import RealClock
from gpuvirt.errors import GpuvirtError
from gpuvirt.model.isolation import Slots
from gpuvirt.node.change import gaterecord
from gpuvirt.node.change.gaterecord import SETTLED_S, Damaged, Found, GateRecord, GateState, Owner
from gpuvirt.node.files import replace_file

PATIENCE_S = 0.2
"""How long a change waits for a lock: an allocation has it for less than a millisecond."""
MOST_BYTES = 1 << 14
"""How long a lock's file may become before old allocations are taken out of it."""
MOST_TRIES = 5
"""How often the members of an isolation unit may change while its locks are taken."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class UnitBusyError(GpuvirtError):
    """Another process is changing this unit now."""


class UnitBlockedError(UnitBusyError):
    """The kernel blocks a change of this unit whose process has ended; `step` is the step that it was at."""

    def __init__(self, message: str, step: str) -> None:
        super().__init__(message)
        self.step = step


class UnitUnsettledError(UnitBusyError):
    """A device of this unit was allocated a moment ago, or it is unknown whether one was."""


@dataclass(frozen=True, slots=True)
class Gate:
    """The gates of one host, as this process passes them."""

    folder: Path
    ours: set[str] = field(default_factory=set)
    """The slots whose locks a change of this process has."""

    @contextmanager
    def change(self, unit: str, members: Callable[[], Slots]) -> Iterator["Pass"]:
        """Be the only one on this host who changes or allocates devices of a unit; raise UnitBusyError.

        `members` reads the slots of the unit. They are read again under the locks: other slots may have joined.
        """
        self._make_folder()
        for _ in range(MOST_TRIES):
            slots = members()
            with ExitStack() as stack:
                locks = [stack.enter_context(self._locked(unit, slot)) for slot in slots]
                if members() == slots:
                    for slot, lock in zip(slots, locks, strict=True):
                        self._refuse_unknown(unit, slot, lock)
                    passed = Pass(self, slots, tuple(locks))
                    passed.begin()
                    stack.callback(passed.end)
                    yield passed
                    return
        raise UnitBusyError(f"{unit}: its IOMMU groups change all the time")

    @contextmanager
    def allocation(self, devices: Mapping[str, Iterable[str]]) -> Iterator[None]:
        """Keep changes of other processes out of slots, and tell later ones that these devices of each are allocated.

        Raises UnitBusyError where a change is under way, at once: when it ends, the devices are no longer what the
        allocation has found them to be. A change of this process is no obstacle: it tells by itself which devices it
        may touch.
        """
        self._make_folder()
        with ExitStack() as stack:
            for slot in sorted(devices):
                lock = stack.enter_context(_opened(self._path(slot, "lock")))
                if not _locked(lock, fcntl.LOCK_SH, is_ours=partial(self._has, slot)):
                    raise self._taken(slot)
                _append(lock, devices[slot])
            yield

    def read(self, slot: str) -> Found:
        """Return the record of a slot."""
        try:
            content = self._path(slot, "json").read_bytes()
        except FileNotFoundError:
            content = None
        return gaterecord.decode(content, boot_id())

    def write(self, slot: str, record: GateRecord) -> None:
        """Write the record of a slot whose lock is ours."""
        replace_file(self._path(slot, "json"), gaterecord.encode(record), durable=False)

    def state(self, slot: str) -> GateState:
        """Return in which state a gate is; asks for its locks for a moment."""
        is_locked, has_owner = self._is_taken(slot, "lock"), self._is_taken(slot, "owner")
        if is_locked and not has_owner:  # unless the change has ended between the two
            is_locked = self._is_taken(slot, "lock")
        return gaterecord.state_of(self.read(slot), is_locked=is_locked, has_owner=has_owner)

    def _is_taken(self, slot: str, kind: str) -> bool:
        with _opened(self._path(slot, kind)) as fd:
            return not _locked(fd, fcntl.LOCK_SH)

    def blocked(self) -> Mapping[str, str]:
        """Return the slots of which the kernel blocks a change whose process has ended, with its step.

        Raises OSError where that can't be told.
        """
        try:
            slots = [path.stem for path in self.folder.iterdir() if path.suffix == ".lock"]
        except FileNotFoundError:
            return {}
        return {slot: self._step(slot) for slot in sorted(slots) if self.state(slot) is GateState.BLOCKED}

    def _refuse_unknown(self, unit: str, slot: str, lock: int) -> None:
        """Raise UnitUnsettledError where the kubelet's account may lack allocations, or a record was damaged lately."""
        content = os.pread(lock, os.fstat(lock).st_size, 0).decode(errors="replace")
        for device, age_s in gaterecord.unsettled(content, this_process(), monotonic()).items():
            if device != gaterecord.UNREADABLE or _was_just_written(self._path(slot, "lock")):
                raise UnitUnsettledError(
                    f"{unit}: {device} was allocated {age_s:.1f} s ago, which the kubelet's account may not show before"
                    f" {SETTLED_S:g} s ({self._path(slot, 'lock')})"
                )
        found, path = self.read(slot), self._path(slot, "json")
        if isinstance(found, Damaged) and _was_just_written(path):
            said = f"{unit}: {path} can't be read: {found.said}"
            raise UnitUnsettledError(f"{said}; it is ignored {SETTLED_S:g} s after it was written")

    @contextmanager
    def _locked(self, unit: str, slot: str) -> Iterator[int]:
        with _opened(self._path(slot, "owner")) as owner, _opened(self._path(slot, "lock")) as lock:
            if not _locked(owner, fcntl.LOCK_EX, PATIENCE_S):
                raise self._busy(unit, slot)
            if not _locked(lock, fcntl.LOCK_EX, PATIENCE_S):
                raise self._blocked(unit, slot)
            self.ours.add(slot)
            try:
                yield lock
            finally:
                self.ours.discard(slot)

    def _has(self, slot: str) -> bool:
        return slot in self.ours

    def _taken(self, slot: str) -> UnitBusyError:
        """Return who has the gate of a slot."""
        return self._blocked(slot, slot) if self.state(slot) is GateState.BLOCKED else self._busy(slot, slot)

    def _busy(self, unit: str, slot: str) -> UnitBusyError:
        step, path = self._step(slot), self._path(slot, "owner")
        return UnitBusyError(f"{unit}: another process is just changing these functions ({path}), step: {step}")

    def _blocked(self, unit: str, slot: str) -> UnitBlockedError:
        step, path = self._step(slot), self._path(slot, "lock")
        return UnitBlockedError(f"{unit}: the kernel blocks a change whose process has ended ({path}): {step}", step)

    def _step(self, slot: str) -> str:
        found = self.read(slot)
        return (found.intent if isinstance(found, GateRecord) else None) or "an unknown step"

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _path(self, slot: str, kind: str) -> Path:
        return self.folder / f"{slot}.{kind}"


@dataclass(frozen=True, slots=True)
class Pass:
    """A change that has passed the gates of its slots."""

    gate: Gate
    slots: Slots
    locks: Collection[int]
    """A process that has one of these descriptors open holds its lock."""

    def begin(self) -> None:
        """Begin a generation; what an earlier change has left is settled, since each change begins with a look."""
        for slot in self.slots:
            self.gate.write(slot, gaterecord.settled(self.gate.read(slot), boot_id()).begin(this_process()))

    def note(self, step: str) -> None:
        """Record a step before it is taken."""
        for slot in self.slots:
            found = self.gate.read(slot)
            if isinstance(found, GateRecord):
                safe = found.move(GateState.SAFE) if found.state is GateState.APPLYING else found
                self.gate.write(slot, safe.move(GateState.APPLYING, intent=step))

    def end(self) -> None:
        """Record that the change has ended, and what it leaves is planned from."""
        for slot in self.slots:
            self.gate.write(slot, gaterecord.settled(self.gate.read(slot), boot_id()))


@cache
def gate_at(folder: Path) -> Gate:
    """Return the one gate that this process has in a folder."""
    return Gate(folder)


@cache
def boot_id() -> str:
    """Return the boot that this process runs in."""
    return BOOT_ID.read_text().strip()


@cache
def this_process() -> Owner:
    """Return this process."""
    stat = Path("/proc/self/stat").read_bytes()
    return Owner(os.getpid(), int(stat.rpartition(b")")[2].split()[19]))


def _was_just_written(path: Path) -> bool:
    """Return whether what a damaged file no longer tells could be so recent that no account shows it."""
    return abs(RealClock().now().timestamp() - path.stat().st_mtime) < SETTLED_S


def _append(lock: int, devices: Iterable[str]) -> None:
    """Write that devices are allocated into the file of a lock; no other process writes there now."""
    owner, now_s = this_process(), monotonic()
    if (size := os.fstat(lock).st_size) > MOST_BYTES:
        kept = gaterecord.newest(os.pread(lock, size, 0).decode(errors="replace"), now_s)
        os.ftruncate(lock, 0)
        os.write(lock, kept.encode())
    os.write(lock, "".join(gaterecord.allocation(device, owner, now_s) for device in devices).encode())


def _locked(fd: int, kind: int, patience_s: float = 0.0, is_ours: Callable[[], bool] = lambda: False) -> bool:
    """Return whether a lock could be had in time, or is another of this process."""
    deadline_s = monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if is_ours():
                return True
            if monotonic() >= deadline_s:
                return False
            sleep(0.002)
        else:
            return True


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
