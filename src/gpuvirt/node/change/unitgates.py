"""The gates of isolation units between changes: drained while one waits, held after one that failed, open otherwise."""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import Slots, UnitId, slots_of
from gpuvirt.model.reasons import Reason
from gpuvirt.node.change.attempts import Circumstances
from gpuvirt.node.change.gate.gate import UnitBusyError, gate_at
from gpuvirt.node.change.gate.gaterecord import GateRecord, GateState


class UnitGates:
    """The gates of one host, as a reconciler leaves them between changes.

    Where a gate's file can't be written, nothing happens here: no change can begin there either, and says so.
    """

    def __init__(self, folder: Path) -> None:
        self._gate = gate_at(folder)
        self._drained: dict[UnitId, Slots] = {}
        self._found: dict[UnitId, GateRecord | None] = {}
        """The record that an agent before has left of each unit whose change it could not complete."""

    def drain(self, unit: UnitId, inventory: Inventory, intent: str) -> None:
        """Have other processes see that a change of a unit waits for the kubelet."""
        slots = slots_in(inventory, unit)
        if self._drained.get(unit) == slots:
            return
        with suppress(UnitBusyError, OSError):
            self._find(unit, slots)
            if self._found[unit] is not None:  # it is not known yet whether anything has changed since
                return
            self._gate.drain(unit, slots, intent, patience_s=0.0)
            self._drained[unit] = slots

    def stop_draining(self, unit: UnitId) -> None:
        """Open the gates of a unit of which no change waits any more."""
        with suppress(OSError):
            self._gate.stop_draining(self._drained.pop(unit, ()))

    def begin(self, unit: UnitId) -> None:
        """Take that a change of a unit begins, which goes on with what was drained."""
        self._drained.pop(unit, None)

    def release(self, units: Iterable[UnitId], inventory: Inventory) -> None:
        """Open the gates of units that are as desired, or of which nothing is desired any more."""
        for unit in units:
            self.stop_draining(unit)
            with suppress(OSError):
                self._gate.release(slots_in(inventory, unit))

    def release_found(self, units: Iterable[UnitId], inventory: Inventory) -> None:
        """Open the gates of such units that an agent before has left held."""
        for unit in units:
            with suppress(OSError):
                self._find(unit, slots_in(inventory, unit))
            if self._found.pop(unit, None) is not None:
                self.release([unit], inventory)
            self._found[unit] = None

    def held(self, unit: UnitId, inventory: Inventory, circumstances: Circumstances) -> Reason | None:
        """Return why an agent before could not complete the change of a unit, if nothing has changed since.

        It is asked once for each unit: what this agent does later is its own.
        """
        try:
            self._find(unit, slots_in(inventory, unit))
        except OSError:
            return None
        found, self._found[unit] = self._found[unit], None
        return found.reason if found is not None and found.held_on == fingerprint(circumstances) else None

    def _find(self, unit: UnitId, slots: Slots) -> None:
        if unit not in self._found:
            records = (self._gate.read(slot) for slot in slots)
            held = (one for one in records if isinstance(one, GateRecord) and one.state is GateState.HELD)
            self._found[unit] = next(held, None)


def slots_in(inventory: Inventory, unit: UnitId) -> Slots:
    """Return the slots of a unit as it was last observed."""
    return slots_of(inventory.facts.functions, inventory.units.get(unit, ()))


def fingerprint(circumstances: Circumstances) -> str:
    """Return what tells circumstances apart, in another process, too."""
    return hashlib.sha256(msgspec.json.encode(circumstances, order="deterministic", enc_hook=repr)).hexdigest()
