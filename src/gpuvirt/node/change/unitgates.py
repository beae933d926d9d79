"""The gates of isolation units between changes: drained while a change waits, held after a failure, else open."""

import hashlib
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import Slots, UnitId, slots_of
from gpuvirt.model.reasons import Reason
from gpuvirt.node.change.attempts import Circumstances
from gpuvirt.node.change.gate.gateerrors import GateFailedError, UnitBusyError
from gpuvirt.node.change.gate.gaterecord import GateRecord, GateState
from gpuvirt.node.change.gate.gates import Gates


class UnitGates:
    """The gates of one host, as a reconciler leaves them between changes.

    Errors of a gate's files are ignored here: a change of that unit can't begin then, and reports the error.
    """

    def __init__(self, gates: Gates) -> None:
        self._gates, self._gate = gates, gates.host
        self._drained: dict[UnitId, Slots] = {}
        self._found: dict[UnitId, GateRecord | None] = {}
        """The records of failed changes that an earlier agent has left, by unit; None if there is none."""

    def drain(self, unit: UnitId, inventory: Inventory, intent: str) -> None:
        """Drain a unit whose change waits for the kubelet, visible for other processes."""
        slots = slots_in(inventory, unit)
        if self._drained.get(unit) == slots:
            return
        with suppress(UnitBusyError):
            self._find(unit, slots)
            if self._found[unit] is not None:  # `held` must compare the circumstances with this record first
                return
            self._gates.drain(unit, slots, intent, patience_s=0.0)
            self._drained[unit] = slots

    def stop_draining(self, unit: UnitId) -> None:
        """Open the gates of a unit whose change no longer waits."""
        with suppress(UnitBusyError):
            self._gates.stop_draining(self._drained.pop(unit, ()))

    def begin(self, unit: UnitId) -> None:
        """Record that a change of a unit begins; it takes over the drained gates."""
        self._drained.pop(unit, None)

    def release(self, units: Iterable[UnitId], inventory: Inventory) -> None:
        """Open the gates of units that are in their desired state, or that have none any more."""
        for unit in units:
            self.stop_draining(unit)
            with suppress(UnitBusyError):
                self._gate.release(slots_in(inventory, unit))

    def release_found(self, units: Iterable[UnitId], inventory: Inventory) -> None:
        """Open the gates of such units that an earlier agent has left held."""
        for unit in units:
            with suppress(UnitBusyError):
                self._find(unit, slots_in(inventory, unit))
            if self._found.pop(unit, None) is not None:
                self.release([unit], inventory)
            self._found[unit] = None

    def held(self, unit: UnitId, inventory: Inventory, circumstances: Circumstances) -> Reason | None:
        """Return why an earlier agent could not complete the change of a unit, if the circumstances are the same.

        The answer is given once for each unit: later failures are this agent's own.
        """
        try:
            self._find(unit, slots_in(inventory, unit))
        except GateFailedError:
            return None
        found, self._found[unit] = self._found[unit], None
        return found.reason if found is not None and found.held_on == fingerprint(circumstances) else None

    def _find(self, unit: UnitId, slots: Slots) -> None:
        if unit not in self._found:
            records = (self._gate.read(slot) for slot in slots)
            held = (found for found in records if isinstance(found, GateRecord) and found.state is GateState.HELD)
            self._found[unit] = next(held, None)


def slots_in(inventory: Inventory, unit: UnitId) -> Slots:
    """Return the slots of a unit, as observed last."""
    return slots_of(inventory.facts.functions, inventory.units.get(unit, ()))


def fingerprint(circumstances: Circumstances) -> str:
    """Return a digest of circumstances, which other processes can compare."""
    return hashlib.sha256(msgspec.json.encode(circumstances, order="deterministic", enc_hook=repr)).hexdigest()
