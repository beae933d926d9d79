"""The gates of a host: one for each PCI slot, which whoever changes or allocates a device of the slot passes.

Each has two locks and a record in a folder that does not outlive a boot. Children of a change inherit `SLOT.lock` and
hold it for as long as the kernel blocks them; `SLOT.owner` ends with the process that makes the change. `SLOT.json` is
the record, which only the holder of the lock writes. `SLOT.lock` itself has a line for each allocation, written before
it is answered: for a while no account of the kubelet tells of it.
"""

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from time import monotonic  # noqa: TID251  the lines of allocations carry it, since processes share it
from types import MappingProxyType

from gpuvirt.clock import RealClock
from gpuvirt.model.inventory.isolation import Slots
from gpuvirt.model.reasons import Reason
from gpuvirt.node.change.gate import gaterecord
from gpuvirt.node.change.gate.gatefiles import (
    GateFiles,
    UnitBlockedError,
    UnitBusyError,
    UnitUnsettledError,
    boot_id,
    this_process,
)
from gpuvirt.node.change.gate.gatelock import open_file, opened, try_lock
from gpuvirt.node.change.gate.gatepass import MODULES, Pass
from gpuvirt.node.change.gate.gaterecord import ALLOCATABLE, SETTLED_S, Damaged, GateRecord, GateState, Reading

Read = Callable[[], Sequence[Reading]]
"""Reads what the kubelet's two accounts say; nothing where one of them is unknown."""


def no_readings() -> Sequence[Reading]:
    """Return that the kubelet's accounts were not read."""
    return ()


PATIENCE_S = 0.2
"""How long a change waits for a lock: an allocation has it for less than a millisecond."""
MOST_BYTES = 1 << 14
"""How long a lock's file may become before old allocations are taken out of it."""
MOST_TRIES = 5
"""How often the members of an isolation unit may change while its locks are taken."""


@dataclass(frozen=True, slots=True)
class Gate(GateFiles):
    """The gates of one host, as this process passes them."""

    ours: set[str] = field(default_factory=set)
    """The slots whose locks a change of this process has."""
    draining: dict[str, int] = field(default_factory=dict)
    """The slots that this process drains, with the open file of the lock that says so."""

    @contextmanager
    def change(self, unit: str, members: Callable[[], Slots], readings: Read = no_readings) -> Iterator[Pass]:
        """Be the only one on this host who changes or allocates devices of a unit; raise UnitBusyError.

        `members` reads the slots of the unit. They are read again under the locks: other slots may have joined.
        `readings` returns what the kubelet's accounts said lately, the newest last.
        """
        for _ in range(MOST_TRIES):
            slots = members()
            with ExitStack() as stack:
                locks = [stack.enter_context(self._locked(unit, slot))[1] for slot in slots]
                if members() == slots:
                    for slot, lock in zip(slots, locks, strict=True):
                        self._refuse_unknown(unit, slot, lock, readings)
                    host = stack.enter_context(opened(self.folder / MODULES))
                    with self._passed(Pass(self, slots, (*locks, host), host)) as passed:
                        yield passed
                    return
        raise UnitBusyError(f"{unit}: its IOMMU groups change all the time")

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Be the only one on this host who changes the options of kernel modules; raise UnitBusyError."""
        with opened(self.folder / MODULES) as host, Pass(self, (), (), host).modules():
            yield

    @contextmanager
    def _passed(self, passed: Pass) -> Iterator[Pass]:
        passed.begin()
        try:
            yield passed
        except Exception:
            passed.settle()  # it ended before its end: the host is to be observed
            raise
        passed.end()

    @contextmanager
    def allocation(self, devices: Mapping[str, Iterable[str]]) -> Iterator[None]:
        """Keep changes of other processes out of slots, and tell later ones that these devices of each are allocated.

        Raises UnitBusyError where a change is under way, or is about to be, or where one was killed; at once, since the
        devices are no longer what the allocation has found them to be when that change ends. One of this process is no
        obstacle: it tells by itself which devices it may touch.
        """
        locks: list[int] = []
        try:
            for slot in sorted(devices):
                locks.append(lock := open_file(self.path_of(slot, "lock")))
                if not try_lock(lock, fcntl.LOCK_SH, is_ours=partial(self._has, slot)):
                    raise self._taken(slot)
                self._refuse_unless_allocatable(slot)
                _append(lock, devices[slot])
            yield
        finally:
            for lock in locks:
                os.close(lock)

    def _refuse_unless_allocatable(self, slot: str) -> None:
        """Raise UnitBusyError where another process drains a slot, or where a change was killed and is not settled."""
        found = self.read(slot)
        if isinstance(found, GateRecord) and (found.state in ALLOCATABLE or slot in self.draining):
            return
        if not self._has(slot):
            raise self._taken(slot)
        if isinstance(found, GateRecord) and found.state is GateState.BLOCKED:
            raise self.blocked_by_kernel(slot, slot)

    def drain(
        self,
        unit: str,
        slots: Slots,
        intent: str,
        *,
        desires: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Have no device of these slots allocated from now on, until `stop_draining` or the change that comes next.

        Raises UnitBusyError. What this process drains already stays as it is. `desires`: what a command wants.
        """
        new = [slot for slot in slots if slot not in self.draining]
        try:
            for slot in new:
                with self._locked(unit, slot, patience_s) as (owner, _):
                    opened_record = gaterecord.settled(self.read(slot), boot_id())
                    self.write(slot, opened_record.drain(this_process(), intent, dict(desires)))
                    self.draining[slot] = os.dup(owner)
        except UnitBusyError:
            self.stop_draining(new)
            raise

    def stop_draining(self, slots: Iterable[str]) -> None:
        """Let devices of these slots be allocated again, as far as this process drains them."""
        for slot in slots:
            if slot in self.draining:
                self._open(slot)

    def answer(self, slot: str, generation: int, refusal: Reason | None) -> None:
        """Tell the command that drains a slot that its devices are drained, or why they are not going to be."""
        with opened(self.path_of(slot, "lock")) as lock:
            if not try_lock(lock, fcntl.LOCK_EX):
                return
            found = self.read(slot)
            if isinstance(found, GateRecord) and found.generation == generation and found.is_unanswered:
                self.write(slot, found.answer(refusal))

    def settle(self, slot: str) -> None:
        """Open the gate of a change whose process has ended, after the host was observed."""
        if self.state(slot) is GateState.SETTLING:
            self._open(slot)

    def release(self, slots: Iterable[str]) -> None:
        """Open the gates that are held: what is desired has changed, or is reached."""
        for slot in slots:
            if self.state(slot) is GateState.HELD:
                self._open(slot)

    def _open(self, slot: str) -> None:
        """Open a gate that no other process has now; else that process opens it, or who finds its record later."""
        with suppress(UnitBusyError), self._locked(slot, slot, 0.0):
            self._refuse_damaged(slot, slot)
            self.write(slot, gaterecord.settled(self.read(slot), boot_id()))

    def _refuse_unknown(self, unit: str, slot: str, lock: int, readings: Read) -> None:
        """Raise UnitUnsettledError where the kubelet's account may lack allocations, or a record was damaged lately."""
        content = os.pread(lock, os.fstat(lock).st_size, 0).decode(errors="replace")
        if not gaterecord.unsettled(content, this_process(), monotonic(), ()):
            self._refuse_damaged(unit, slot)
            return
        for device, age_s in gaterecord.unsettled(content, this_process(), monotonic(), readings()).items():
            if device == gaterecord.UNREADABLE and not _was_just_written(self.path_of(slot, "lock")):
                continue
            raise UnitUnsettledError(
                f"{unit}: {device} was allocated {age_s:.1f} s ago; the kubelet's two accounts must show it, or both"
                f" lack it twice after {SETTLED_S:g} s ({self.path_of(slot, 'lock')})",
                again_soon=age_s >= SETTLED_S,
            )
        self._refuse_damaged(unit, slot)

    def _refuse_damaged(self, unit: str, slot: str) -> None:
        found, path = self.read(slot), self.path_of(slot, "json")
        if isinstance(found, Damaged) and _was_just_written(path):
            said = f"{unit}: {path} can't be read: {found.said}"
            raise UnitUnsettledError(f"{said}; it is ignored {SETTLED_S:g} s after it was written")

    @contextmanager
    def _locked(self, unit: str, slot: str, patience_s: float = PATIENCE_S) -> Iterator[tuple[int, int]]:
        """Have the two locks of a slot; raise UnitBusyError. What was drained for this is drained no more."""
        if self._has(slot):
            raise self.busy(unit, slot)
        with ExitStack() as stack:
            drained = self.draining.pop(slot, None)
            owner = open_file(self.path_of(slot, "owner")) if drained is None else drained
            stack.callback(os.close, owner)
            lock = stack.enter_context(opened(self.path_of(slot, "lock")))
            if drained is None and not try_lock(owner, fcntl.LOCK_EX, patience_s):
                raise self.busy(unit, slot)
            if not try_lock(lock, fcntl.LOCK_EX, patience_s):
                raise self.blocked_by_kernel(unit, slot)
            self.ours.add(slot)
            stack.callback(self.ours.discard, slot)
            if drained is not None:
                stack.callback(self._end_drain, slot)
            yield owner, lock

    def _end_drain(self, slot: str) -> None:
        """Open a gate that was drained for a change which has not begun."""
        found = self.read(slot)
        if isinstance(found, GateRecord) and found.is_drained_by(this_process()):
            self.write(slot, gaterecord.settled(found, boot_id()))

    def _has(self, slot: str) -> bool:
        return slot in self.ours

    def _taken(self, slot: str) -> UnitBusyError:
        """Return why devices of a slot are not given."""
        match self.state(slot):
            case GateState.BLOCKED:
                return self.blocked_by_kernel(slot, slot)
            case GateState.SETTLING:
                step, path = self.step_of(slot), self.path_of(slot, "json")
                return UnitBusyError(f"{slot}: a change has ended before its end ({path}), step: {step}")
            case _:
                return self.busy(slot, slot)


@cache
def gate_at(folder: Path) -> Gate:
    """Return the one gate that this process has in a folder."""
    return Gate(folder)


def _was_just_written(path: Path) -> bool:
    """Return whether what a damaged file no longer tells could be so recent that no account shows it."""
    return abs(RealClock().now().timestamp() - path.stat().st_mtime) < SETTLED_S


def _append(lock: int, devices: Iterable[str]) -> None:
    """Write that devices are allocated into the file of a lock; no other process writes there now."""
    owner, now_s = this_process(), monotonic()
    if (size := os.fstat(lock).st_size) > MOST_BYTES:
        kept = gaterecord.newest(os.pread(lock, size, 0).decode(errors="replace"))
        os.ftruncate(lock, 0)
        os.write(lock, kept.encode())
    os.write(lock, "".join(gaterecord.allocation(device, owner, now_s) for device in devices).encode())


__all__ = [
    "Gate",
    "Pass",
    "UnitBlockedError",
    "UnitBusyError",
    "UnitUnsettledError",
    "boot_id",
    "gate_at",
    "this_process",
]
