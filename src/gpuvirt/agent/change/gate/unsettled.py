"""Refuses a slot whose allocations are not known completely: the accounts may lack one, or its record is damaged."""

import os
from collections.abc import Callable, Sequence
from time import monotonic  # noqa: TID251  the gate's

from gpuvirt.agent.change.gate import gaterecord
from gpuvirt.agent.change.gate.damageage import NEW_S, is_new, seen_damaged_s
from gpuvirt.agent.change.gate.gateerrors import GateFailedError, UnitUnsettledError
from gpuvirt.agent.change.gate.gatefiles import GateFiles, this_process
from gpuvirt.agent.change.gate.gaterecord import AccountReading, Damaged

Read = Callable[[], Sequence[AccountReading]]
"""Returns the newest readings of the kubelet's two accounts; empty while one of them is unknown."""


def no_readings() -> Sequence[AccountReading]:
    """Return no readings, for a host whose kubelet is not asked."""
    return ()


def refuse_unsettled(gates: GateFiles, unit: str, slot: str, lock: int, readings: Read) -> None:
    """Raise UnitUnsettledError if the kubelet's accounts may lack an allocation, or if a new record is damaged.

    `lock` is the descriptor of the slot's lock, whose file has the allocations. Raises GateFailedError if that file
    can't be read.
    """
    lines = gaterecord.lines_of(content := _lines(gates, slot, lock), 0.0)
    path, owner = gates.path_of(slot, "lock"), this_process()
    if any(line.device == gaterecord.UNREADABLE for line in lines):
        lines = gaterecord.lines_of(content, seen_damaged_s(path))
    read = readings() if gaterecord.unsettled(lines, owner, ()) else ()
    for line in gaterecord.unsettled(lines, owner, read):
        raise UnitUnsettledError(
            f"{unit}: {line.device} was allocated {monotonic() - line.at_s:.1f} s ago by process {line.owner.pid}"
            f" ({path}), and the kubelet may be admitting the pod",
            again_soon=any(reading.settled_s > line.at_s for reading in read),
        )
    refuse_damaged(gates, unit, slot)


def refuse_damaged(gates: GateFiles, unit: str, slot: str) -> None:
    """Raise UnitUnsettledError if the record of a slot is damaged since a short time."""
    found, path = gates.read(slot), gates.path_of(slot, "json")
    if isinstance(found, Damaged) and is_new(path):
        problem = f"{unit}: the gate's record {path} can't be decoded: {found.error}"
        raise UnitUnsettledError(f"{problem}; gpuvirt ignores it {NEW_S:g} s after it was first seen")


def _lines(gates: GateFiles, slot: str, lock: int) -> str:
    try:
        return os.pread(lock, os.fstat(lock).st_size, 0).decode(errors="replace")
    except OSError as error:
        raise GateFailedError(gates.path_of(slot, "lock"), error) from error
