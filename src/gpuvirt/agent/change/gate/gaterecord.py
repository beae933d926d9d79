"""The record of one gate: the progress of a change of a PCI slot, for all processes of the host.

Everything here is pure. `gatefiles` reads and writes the record.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache

import msgspec
from msgspec.structs import replace

from gpuvirt.errors import GpuvirtError
from gpuvirt.model.allocation.ledger import UNSETTLED, SettledAt
from gpuvirt.model.reasons import Reason


class GateState(StrEnum):
    """The states of a gate."""

    OPEN = "Open"
    """Devices of the slot may be allocated, and a change may begin."""
    DRAINING = "Draining"
    """Allocate refuses the slot's devices: a change waits until the kubelet no longer counts them."""
    APPLYING = "Applying"
    """A change observes the host or takes a step, under the lock."""
    SAFE = "Safe"
    """A change is between two steps, under the lock: it checks whether its plan is still up to date."""
    BLOCKED = "Blocked"
    """The kernel blocks a step. The process of the step keeps the lock, and the change takes no other step."""
    SETTLING = "Settling"
    """A change has stopped half-way: it is rolled back, and the host is observed."""
    HELD = "Held"
    """The last change could not reach the desired state. Offered devices may be allocated."""


NEXT: Mapping[GateState, frozenset[GateState]] = {
    GateState.OPEN: frozenset({GateState.DRAINING, GateState.APPLYING}),
    GateState.DRAINING: frozenset({GateState.APPLYING, GateState.OPEN, GateState.SETTLING}),
    GateState.APPLYING: frozenset({GateState.SAFE, GateState.BLOCKED, GateState.SETTLING}),
    GateState.SAFE: frozenset({GateState.APPLYING, GateState.SETTLING}),
    GateState.BLOCKED: frozenset({GateState.SETTLING}),
    GateState.SETTLING: frozenset({GateState.OPEN, GateState.HELD, GateState.BLOCKED}),
    GateState.HELD: frozenset({GateState.SETTLING}),
}
"""The states that may follow each state. Every change is settled before the next one begins."""

ALLOCATABLE = frozenset({GateState.OPEN, GateState.HELD})
"""The states in which offered devices may be allocated."""


class IllegalMoveError(GpuvirtError):
    """The state of a gate can't follow its present state."""


class GateOwner(msgspec.Struct, frozen=True):
    """A process that makes a change or an allocation."""

    pid: int
    started: int
    """The start time of the process in the kernel's ticks since boot; it tells reused pids apart."""


class GateRecord(msgspec.Struct, frozen=True):
    """The content of a gate's record."""

    boot_id: str
    generation: int = 0
    """How many changes have begun since boot."""
    state: GateState = GateState.OPEN
    owner: GateOwner | None = None
    intent: str | None = None
    """The purpose of the drain, or the last step that was begun."""
    reason: Reason | None = None
    """Why the gate is `HELD`, or why the agent refuses to drain the slot for a command."""
    held_on: str | None = None
    """The fingerprint of the circumstances of the failed change. The gate is `HELD` until that changes."""
    desires: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """The desired state that a command asks for, by GPU; empty where the agent itself drains."""
    acknowledged: int = 0
    """The last generation that the agent has drained for a command."""

    def move(self, state: GateState, *, intent: str | None = None) -> "GateRecord":
        """Return the record in its next state; raise IllegalMoveError."""
        if state not in NEXT[self.state]:
            expected = " or ".join(sorted(NEXT[self.state]))
            raise IllegalMoveError(f"a gate goes from {self.state} to {expected}, not to {state}")
        return replace(
            self,
            state=state,
            owner=None if state in ALLOCATABLE else self.owner,
            intent=intent or self.intent,
            reason=None,
            held_on=None,
            desires={},
        )

    def hold(self, reason: Reason, held_on: str) -> "GateRecord":
        """Return the record of a change that has stopped and could not reach the desired state."""
        return replace(self.move(GateState.HELD), reason=reason, held_on=held_on)

    def drain(self, owner: GateOwner, intent: str, desires: Mapping[str, tuple[str, ...]]) -> "GateRecord":
        """Return the record of a slot that is drained for a change; raise IllegalMoveError unless the gate is open."""
        draining = self.move(GateState.DRAINING, intent=intent)
        return replace(draining, owner=owner, generation=self.generation + 1, desires=desires)

    @property
    def is_acknowledged(self) -> bool:
        """Whether the agent has drained the slot for the waiting command."""
        return self.acknowledged == self.generation

    @property
    def is_unanswered(self) -> bool:
        """Whether a command waits for the agent's answer."""
        return self.state is GateState.DRAINING and self.reason is None and not self.is_acknowledged

    def answer(self, refusal: Reason | None) -> "GateRecord":
        """Return the record with the agent's answer."""
        if refusal is not None:
            return replace(self, reason=refusal)
        return replace(self, acknowledged=self.generation)

    def begin(self, owner: GateOwner) -> "GateRecord":
        """Return the record of the change that begins now; raise IllegalMoveError unless the gate is open.

        A change that has drained the slot keeps the generation of the drain.
        """
        applying = self.move(GateState.APPLYING)
        return replace(applying, owner=owner, generation=self.generation + (not self.is_drained_by(owner)))

    def at_safe_point(self) -> "GateRecord":
        """Return the record between two steps; a change that rolls back stays `SETTLING`."""
        return self.move(GateState.SAFE) if self.state is GateState.APPLYING else self

    def in_step(self, intent: str) -> "GateRecord":
        """Return the record of a step that begins now."""
        return self.move(GateState.APPLYING, intent=intent) if self.state is GateState.SAFE else self._noted(intent)

    def _noted(self, intent: str) -> "GateRecord":
        if self.state is not GateState.SETTLING:
            expected = f"{GateState.SAFE} or {GateState.SETTLING}"
            raise IllegalMoveError(f"a step can begin in the gate's state {expected}, not in {self.state}: {intent}")
        return replace(self, intent=intent)

    def block(self) -> "GateRecord":
        """Return the record of a step that the kernel blocks."""
        is_under_way = self.state in {GateState.APPLYING, GateState.SETTLING}
        return self.move(GateState.BLOCKED) if is_under_way else self

    def unblock(self) -> "GateRecord":
        """Return the record after a step that may have been blocked."""
        return self.move(GateState.SETTLING) if self.state is GateState.BLOCKED else self

    def is_drained_by(self, process: GateOwner) -> bool:
        """Return whether a process has drained the slot for its next change."""
        return self.state is GateState.DRAINING and self.owner == process

    def settle(self) -> "GateRecord":
        """Return the record of a change that stops, from any state."""
        return self if self.state in {GateState.SETTLING, GateState.OPEN} else self.move(GateState.SETTLING)


class Damaged(msgspec.Struct, frozen=True):
    """A record that can't be decoded: the state of the gate is unknown."""

    error: str
    """The error of the decoder."""


Found = GateRecord | Damaged


def decode(content: bytes | None, boot_id: str) -> Found:
    """Return the record in a file. A missing file, or one of another boot, means that no change was made since boot."""
    if content is None:
        return _unrecorded(boot_id)
    try:
        record = _DECODER.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Damaged(f"{type(error).__name__}: {error}")
    return record if record.boot_id == boot_id else _unrecorded(boot_id)


_DECODER = msgspec.json.Decoder(GateRecord)


@cache
def _unrecorded(boot_id: str) -> GateRecord:
    """Return the record of a gate that no change has passed since boot."""
    return GateRecord(boot_id)


def encode(record: GateRecord) -> bytes:
    """Return the content of a record's file."""
    return msgspec.json.encode(record)


def state_of(found: Found, *, is_locked: bool, has_owner: bool) -> GateState:
    """Return the state of a gate, as seen by another process.

    `is_locked`: a process has locked `SLOT.lock`. `has_owner`: the process that makes the change is alive. A lock
    without an owner means that the kernel blocks a step. A record of a change without lock and owner means that the
    change was killed: its result is unknown until the host is observed.
    """
    if is_locked and not has_owner:
        return GateState.BLOCKED
    if isinstance(found, Damaged):
        return GateState.APPLYING if is_locked else GateState.SETTLING
    if is_locked or found.state in ALLOCATABLE:
        return found.state
    return GateState.DRAINING if has_owner and found.state is GateState.DRAINING else GateState.SETTLING


def settled(found: Found, boot_id: str) -> GateRecord:
    """Return the open record of a gate that this process has locked, after the host was observed."""
    if isinstance(found, Damaged):
        return GateRecord(boot_id)
    return found if found.state is GateState.OPEN else found.settle().move(GateState.OPEN)


APART_S = 2.0
"""The time between two readings that both lack an allocation, before it counts as ended."""


class AccountReading(msgspec.Struct, frozen=True):
    """The devices of pods in both of the kubelet's accounts, neither of which was unknown."""

    at_s: float
    """Seconds since boot."""
    devices: frozenset[str]
    settled_s: SettledAt = UNSETTLED
    """An answer to Allocate from before this time is in the accounts, or the kubelet does not have it any more."""


UNREADABLE = "an unreadable entry"


class AllocationLine(msgspec.Struct, frozen=True):
    """One line of a lock's file: an allocation that the kubelet's accounts need not show yet."""

    at_s: float
    """Seconds since boot."""
    owner: GateOwner
    device: str


def allocation(device: str, owner: GateOwner, now_s: float) -> str:
    """Return the line that records an allocation; `now_s` is in seconds since boot."""
    return f"{now_s:.3f} {owner.pid} {owner.started} {device}\n"


def lines_of(content: str, damaged_s: float) -> tuple[AllocationLine, ...]:
    """Return the allocations of a file, the last one of each device; lines that can't be parsed are of `damaged_s`."""
    found: dict[str, AllocationLine] = {}
    for line in content.splitlines():
        try:
            at_s, pid, started, device = line.split(" ", 3)
            found[device] = AllocationLine(float(at_s), GateOwner(int(pid), int(started)), device)
        except ValueError:
            # unknown: an open line of an unknown device, which refuses
            found[UNREADABLE] = AllocationLine(damaged_s, GateOwner(0, 0), UNREADABLE)
    return tuple(found.values())


def newest(content: str) -> str:
    """Return the last line of each device, and all lines that can't be parsed."""
    return "".join({line.split(" ", 3)[-1]: line for line in content.splitlines(keepends=True)}.values())


def unsettled(
    lines: Iterable[AllocationLine], owner: GateOwner | None, readings: Sequence[AccountReading]
) -> tuple[AllocationLine, ...]:
    """Return the allocations by processes other than `owner` that the kubelet's accounts may not show yet."""
    return tuple(line for line in lines if line.owner != owner and not _is_settled(line, readings))


def _is_settled(line: AllocationLine, readings: Sequence[AccountReading]) -> bool:
    """Return whether the accounts show an allocation, or lack it in two readings that must show it."""
    if readings and readings[-1].at_s >= line.at_s and line.device in readings[-1].devices:
        return True
    later = [reading for reading in readings if reading.settled_s > line.at_s]
    lacking = [reading.at_s for reading in later if line.device not in reading.devices]
    return len(lacking) >= 2 and lacking[-1] - lacking[0] >= APART_S


def with_reading(readings: Sequence[AccountReading], new: AccountReading) -> tuple[AccountReading, ...]:
    """Return the last `MOST_READINGS` readings with a new one. A reading that follows fast replaces the one before."""
    *before, last = readings or (new,)
    is_fast = bool(before) and new.at_s - before[-1].at_s < APART_S
    return (*before, new) if is_fast or last is new else (*before, last, new)[-MOST_READINGS:]


MOST_READINGS = 4
