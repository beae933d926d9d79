"""The record of one gate: how far the change of a PCI slot has come, as any process of the host finds it.

Everything here is pure. `gate` reads and writes the record.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from gpuvirt.errors import GpuvirtError
from gpuvirt.model.reasons import Reason


class GateState(StrEnum):
    """What may be done to the devices of a slot."""

    OPEN = "Open"
    """They may be allocated, and a change may begin."""
    DRAINING = "Draining"
    """They are not allocated any more: a change waits until the kubelet no longer counts them."""
    APPLYING = "Applying"
    """A change observes the host or takes a step, under the lock."""
    SAFE = "Safe"
    """A change is between two steps, under the lock: it asks whether its plan still holds."""
    BLOCKED = "Blocked"
    """The kernel blocks a step; the process that made it keeps the lock, and its change takes no other step."""
    SETTLING = "Settling"
    """A change has stopped before its end: what it has touched is put back, and the host is observed."""
    HELD = "Held"
    """The last change could not reach what is desired, for a reason. Devices that are offered may be allocated."""


NEXT: Mapping[GateState, frozenset[GateState]] = {
    GateState.OPEN: frozenset({GateState.DRAINING, GateState.APPLYING}),
    GateState.DRAINING: frozenset({GateState.APPLYING, GateState.OPEN, GateState.SETTLING}),
    GateState.APPLYING: frozenset({GateState.SAFE, GateState.BLOCKED, GateState.SETTLING}),
    GateState.SAFE: frozenset({GateState.APPLYING, GateState.SETTLING}),
    GateState.BLOCKED: frozenset({GateState.SETTLING}),
    GateState.SETTLING: frozenset({GateState.OPEN, GateState.HELD, GateState.BLOCKED}),
    GateState.HELD: frozenset({GateState.SETTLING}),
}
"""The states that may follow each; a change that has ended in whatever way is settled before the next one begins."""

ALLOCATABLE = frozenset({GateState.OPEN, GateState.HELD})
"""The states in which offered devices are given to pods."""


class IllegalMoveError(GpuvirtError):
    """A gate can't go from its state to another."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that makes a change."""

    pid: int
    started: int
    """When it was started, in the kernel's ticks since boot: process numbers are used again."""


@dataclass(frozen=True, slots=True)
class GateRecord:
    """What is kept of a gate."""

    boot_id: str
    generation: int = 0
    """How many changes have begun since boot."""
    state: GateState = GateState.OPEN
    owner: Owner | None = None
    intent: str | None = None
    """What a draining change is about to do, or the step that was begun last."""
    reason: Reason | None = None
    """Why it is `HELD`; or why the agent does not drain it for a command."""
    held_on: str | None = None
    """What the failed change depended on: it is `HELD` for as long as that is so."""
    desires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What a command that drains desires of each GPU; empty where the agent itself drains."""
    acknowledged: int = 0
    """The generation that the agent has drained for a command."""

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
        """Return the record of a change that has stopped and could not reach what is desired."""
        return replace(self.move(GateState.HELD), reason=reason, held_on=held_on)

    def drain(self, owner: Owner, intent: str, desires: Mapping[str, tuple[str, ...]]) -> "GateRecord":
        """Return the record of the change that waits from now on; raise IllegalMoveError unless the gate is open."""
        draining = self.move(GateState.DRAINING, intent=intent)
        return replace(draining, owner=owner, generation=self.generation + 1, desires=desires)

    @property
    def is_acknowledged(self) -> bool:
        """Whether the agent has drained what a command waits for."""
        return self.acknowledged == self.generation

    @property
    def is_unanswered(self) -> bool:
        """Whether a command waits for the agent."""
        return self.state is GateState.DRAINING and self.reason is None and not self.is_acknowledged

    def answer(self, refusal: Reason | None) -> "GateRecord":
        """Return the record with the agent's answer."""
        if refusal is not None:
            return replace(self, reason=refusal)
        return replace(self, acknowledged=self.generation)

    def begin(self, owner: Owner) -> "GateRecord":
        """Return the record of the change that begins now; raise IllegalMoveError unless the gate is open.

        A change that has drained is of the generation that it began then.
        """
        applying = self.move(GateState.APPLYING)
        return replace(applying, owner=owner, generation=self.generation + (not self.is_drained_by(owner)))

    def at_safe_point(self) -> "GateRecord":
        """Return the record between two steps; a change that puts back what it has touched stays settling."""
        return self.move(GateState.SAFE) if self.state is GateState.APPLYING else self

    def in_step(self, intent: str) -> "GateRecord":
        """Return the record of a step that begins now."""
        return self.move(GateState.APPLYING, intent=intent) if self.state is GateState.SAFE else self._noted(intent)

    def _noted(self, intent: str) -> "GateRecord":
        if self.state is not GateState.SETTLING:
            raise IllegalMoveError(f"a step begins in the state {GateState.SAFE} or {GateState.SETTLING}")
        return replace(self, intent=intent)

    def block(self) -> "GateRecord":
        """Return the record of a step that the kernel blocks."""
        is_under_way = self.state in {GateState.APPLYING, GateState.SETTLING}
        return self.move(GateState.BLOCKED) if is_under_way else self

    def unblock(self) -> "GateRecord":
        """Return the record after a step that may have been blocked."""
        return self.move(GateState.SETTLING) if self.state is GateState.BLOCKED else self

    def is_drained_by(self, process: Owner) -> bool:
        """Return whether a process has drained the slot for the change that it begins now."""
        return self.state is GateState.DRAINING and self.owner == process

    def settle(self) -> "GateRecord":
        """Return the record of a change that stops, whatever it was doing."""
        return self if self.state in {GateState.SETTLING, GateState.OPEN} else self.move(GateState.SETTLING)


@dataclass(frozen=True, slots=True)
class Damaged:
    """A record that could not be read: what is under way, or was, is unknown."""

    said: str


Found = GateRecord | Damaged


def decode(content: bytes | None, boot_id: str) -> Found:
    """Return what the file of a record says; without one, or with one of another boot, nothing was done since boot."""
    if content is None:
        return GateRecord(boot_id)
    try:
        record = msgspec.json.decode(content, type=GateRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Damaged(f"{type(error).__name__}: {error}")
    return record if record.boot_id == boot_id else GateRecord(boot_id)


def encode(record: GateRecord) -> bytes:
    """Return the content of a record's file."""
    return msgspec.json.encode(record)


def state_of(found: Found, *, is_locked: bool, has_owner: bool) -> GateState:
    """Return the state of a gate as another process finds it.

    `is_locked` and `has_owner` say whether a process has its lock, and whether the process that made the change is
    there. A lock without that process is a step that the kernel blocks. A change without its process is over: it left
    its lock, and what it left is unknown until the host was observed.
    """
    if is_locked and not has_owner:
        return GateState.BLOCKED
    if isinstance(found, Damaged):
        return GateState.APPLYING if is_locked else GateState.SETTLING
    if is_locked or found.state in ALLOCATABLE:
        return found.state
    return GateState.DRAINING if has_owner and found.state is GateState.DRAINING else GateState.SETTLING


def settled(found: Found, boot_id: str) -> GateRecord:
    """Return the open record of a gate whose lock is ours, after the host was observed."""
    if isinstance(found, Damaged):
        return GateRecord(boot_id)
    return found if found.state is GateState.OPEN else found.settle().move(GateState.OPEN)


SETTLED_S = 10.0
"""How old an allocation is once the accounts of the kubelet must tell of it."""
APART_S = 2.0
"""How far apart two readings of these accounts are which both lack it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What both accounts of the kubelet said that pods have; neither was unknown."""

    at_s: float
    """Seconds since boot."""
    devices: frozenset[str]


UNREADABLE = "an unreadable entry"


def allocation(device: str, owner: Owner, now_s: float) -> str:
    """Return the line that tells of an allocation before it is answered; `now_s` are seconds since boot."""
    return f"{now_s:.3f} {owner.pid} {owner.started} {device}\n"


def newest(content: str) -> str:
    """Return the last line of each device, and lines that can't be read."""
    return "".join({line.split(" ", 3)[-1]: line for line in content.splitlines(keepends=True)}.values())


def unsettled(content: str, owner: Owner | None, now_s: float, readings: Sequence[Reading]) -> Mapping[str, float]:
    """Return the devices that processes other than `owner` have allocated, and that no account need show yet.

    Each has how long ago that was. A line that can't be read counts as one that has just been written.
    """
    found: dict[str, float] = {}
    for line in content.splitlines():
        try:
            at_s, pid, started, device = line.split(" ", 3)
            age_s, other = now_s - float(at_s), Owner(int(pid), int(started))
        except ValueError:
            age_s, other, device = 0.0, Owner(0, 0), UNREADABLE
        if other != owner and (age_s < SETTLED_S or not _is_settled(device, now_s - age_s, readings)):
            found[device] = age_s
    return found


def _is_settled(device: str, at_s: float, readings: Sequence[Reading]) -> bool:
    """Return whether the accounts tell of an allocation, or lack it twice though they must know of it."""
    later = [one for one in readings if one.at_s >= at_s + SETTLED_S]
    if later and device in later[-1].devices:
        return True
    lacking = [one.at_s for one in later if device not in one.devices]
    return len(lacking) >= 2 and lacking[-1] - lacking[0] >= APART_S


def with_reading(readings: Sequence[Reading], new: Reading) -> tuple[Reading, ...]:
    """Return the readings that can still tell, with a new one: those that follow each other fast count as the last."""
    *before, last = readings or (new,)
    is_fast = bool(before) and new.at_s - before[-1].at_s < APART_S
    return (*before, new) if is_fast or last is new else (*before, last, new)[-MOST_READINGS:]


MOST_READINGS = 4
