"""The record of one gate: how far the change of a PCI slot has come, as any process of the host finds it.

Everything here is pure. `gate` reads and writes the record.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from gpuvirt.errors import GpuvirtError


class GateState(StrEnum):
    """What may be done to the devices of a slot."""

    OPEN = "Open"
    """They may be allocated, and a change may begin."""
    DRAINING = "Draining"
    """They are not allocated any more: a change waits until the kubelet no longer counts them."""
    APPLYING = "Applying"
    """A change takes a step, under the lock."""
    SAFE = "Safe"
    """A change is between two steps, under the lock."""
    BLOCKED = "Blocked"
    """The kernel blocks a step; the process that made it keeps the lock, and the change has ended."""
    SETTLING = "Settling"
    """A change has ended before its end: the host is observed before anything else is done."""
    HELD = "Held"
    """A change can't be completed nor undone, for a reason."""


NEXT: Mapping[GateState, frozenset[GateState]] = {
    GateState.OPEN: frozenset({GateState.DRAINING, GateState.APPLYING}),
    GateState.DRAINING: frozenset({GateState.APPLYING, GateState.OPEN, GateState.SETTLING}),
    GateState.APPLYING: frozenset({GateState.SAFE, GateState.BLOCKED, GateState.SETTLING}),
    GateState.SAFE: frozenset({GateState.APPLYING, GateState.SETTLING}),
    GateState.BLOCKED: frozenset({GateState.SETTLING}),
    GateState.SETTLING: frozenset({GateState.OPEN, GateState.HELD}),
    GateState.HELD: frozenset({GateState.SETTLING}),
}
"""The states that may follow each; a change that has ended in whatever way is settled before the next one begins."""


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
    """The step that was begun last."""
    reason: str | None = None
    """Why it is `HELD`."""

    def move(self, state: GateState, *, intent: str | None = None, reason: str | None = None) -> "GateRecord":
        """Return the record in its next state; raise IllegalMoveError."""
        if state not in NEXT[self.state]:
            expected = " or ".join(sorted(NEXT[self.state]))
            raise IllegalMoveError(f"a gate goes from {self.state} to {expected}, not to {state}")
        kept = state not in {GateState.OPEN, GateState.HELD}
        return replace(
            self,
            state=state,
            owner=self.owner if kept else None,
            intent=intent or self.intent,
            reason=reason,
        )

    def begin(self, owner: Owner) -> "GateRecord":
        """Return the record of the change that begins now; raise IllegalMoveError unless the gate is open."""
        applying = self.move(GateState.APPLYING)
        return replace(applying, owner=owner, generation=self.generation + 1)


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
        record = _record(json.loads(content))
    except (ValueError, TypeError, KeyError) as error:
        return Damaged(f"{type(error).__name__}: {error}")
    return record if record.boot_id == boot_id else GateRecord(boot_id)


def _record(fields: dict[str, object]) -> GateRecord:
    """Return the record of a file; raise ValueError, TypeError or KeyError where it is none."""
    owner = fields["owner"]
    return GateRecord(
        boot_id=_text(fields["boot_id"]),
        generation=_number(fields["generation"]),
        state=GateState(_text(fields["state"])),
        owner=Owner(_number(owner["pid"]), _number(owner["started"])) if isinstance(owner, dict) else None,
        intent=None if fields["intent"] is None else _text(fields["intent"]),
        reason=None if fields["reason"] is None else _text(fields["reason"]),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, found {value!r}")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"expected a number, found {value!r}")
    return value


def encode(record: GateRecord) -> bytes:
    """Return the content of a record's file."""
    return json.dumps(asdict(record)).encode()


def state_of(found: Found, *, is_locked: bool, has_owner: bool) -> GateState:
    """Return the state of a gate as another process finds it.

    `is_locked` and `has_owner` say whether somebody has its lock, and whether the process that made the change is
    there. A lock without that process is a step that the kernel blocks. A change without a lock has lost its process.
    """
    if is_locked and not has_owner:
        return GateState.BLOCKED
    if isinstance(found, Damaged):
        return GateState.APPLYING if is_locked else GateState.SETTLING
    if is_locked or found.state in {GateState.OPEN, GateState.HELD}:
        return found.state
    return GateState.SETTLING


def settled(found: Found, boot_id: str) -> GateRecord:
    """Return the open record of a gate whose lock is ours, after the host was observed."""
    if isinstance(found, Damaged):
        return GateRecord(boot_id)
    if found.state is GateState.OPEN:
        return found
    settling = found if found.state is GateState.SETTLING else found.move(GateState.SETTLING)
    return settling.move(GateState.OPEN)


SETTLED_S = 10.0
"""How old an allocation is once the accounts of the kubelet and of the agent's ledger tell of it."""
UNREADABLE = "an unreadable entry"


def allocation(device: str, owner: Owner, now_s: float) -> str:
    """Return the line that tells of an allocation before it is answered; `now_s` are seconds since boot."""
    return f"{now_s:.3f} {owner.pid} {owner.started} {device}\n"


def newest(content: str, now_s: float) -> str:
    """Return the last line of each device that is unsettled, and lines that can't be read."""
    lines = {line.split(" ", 3)[-1]: line for line in content.splitlines(keepends=True)}
    return "".join(line for line in lines.values() if unsettled(line, None, now_s))


def unsettled(content: str, owner: Owner | None, now_s: float) -> Mapping[str, float]:
    """Return the devices that processes other than `owner` have allocated lately, with how long ago that was.

    A line that can't be read counts as one that has just been written.
    """
    found: dict[str, float] = {}
    for line in content.splitlines():
        try:
            at_s, pid, started, device = line.split(" ", 3)
            age_s, other = now_s - float(at_s), Owner(int(pid), int(started))
        except ValueError:
            age_s, other, device = 0.0, Owner(0, 0), UNREADABLE
        if age_s < SETTLED_S and other != owner:
            found[device] = age_s
    return found
