"""The gates of isolation units between changes: drained while a change waits, held after a failure, else open."""

from collections.abc import Mapping
from contextlib import suppress

from gpuvirt.agent.change.gate.gateerrors import UnitBusyError
from gpuvirt.agent.change.gate.gaterecord import GateRecord, GateState
from gpuvirt.agent.change.gate.gates import Gates
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import Slots, UnitId, slots_of
from gpuvirt.model.node.circumstances import EarlierFailure
from gpuvirt.model.node.duechanges import GateUse, UnitDecision


class UnitGates:
    """The gates of one host, as a reconciler leaves them between changes.

    Errors of a gate's files are ignored here: a change of that unit can't begin then, and reports the error.
    """

    def __init__(self, gates: Gates) -> None:
        self._gates, self._gate = gates, gates.host
        self._drained: dict[UnitId, Slots] = {}
        self._failed: dict[UnitId, EarlierFailure | None] = {}
        """The failure that an earlier agent has left in the gate of each unit, as read once; None if there is none."""

    def read_failed(self, inventory: Inventory) -> Mapping[UnitId, EarlierFailure]:
        """Return the failed changes that an earlier agent has left and that were not compared yet."""
        for unit in inventory.units:
            if unit not in self._failed:
                with suppress(UnitBusyError):  # unknown: read again at the next round; a change can't begin meanwhile
                    self._failed[unit] = self._read(slots_in(inventory, unit))
        return {unit: failed for unit, failed in self._failed.items() if failed is not None}

    def _read(self, slots: Slots) -> EarlierFailure | None:
        records = (self._gate.read(slot) for slot in slots)
        held = (found for found in records if isinstance(found, GateRecord) and found.state is GateState.HELD)
        return next((EarlierFailure(found.reason, found.held_on) for found in held), None)

    def follow(self, unit: UnitId, decision: UnitDecision, inventory: Inventory) -> None:
        """Use the gate of a unit as decided."""
        if decision.is_compared or decision.begins:  # later failures are this agent's own
            self._failed[unit] = None
        if decision.begins:
            self._drained.pop(unit, None)  # the change takes over the drained gates
        elif decision.gate is GateUse.DRAINED:
            self._drain(unit, inventory, decision.intent)
        elif decision.gate is GateUse.UNDRAINED:
            self._stop_draining(unit)
        elif decision.gate is GateUse.OPEN:
            self._stop_draining(unit)
            with suppress(UnitBusyError):  # unknown: the gate stays closed
                self._gate.release(slots_in(inventory, unit))

    def _drain(self, unit: UnitId, inventory: Inventory, intent: str) -> None:
        slots = slots_in(inventory, unit)
        if self._drained.get(unit) == slots or unit not in self._failed:  # its gate can't be read
            return
        with suppress(UnitBusyError):  # unknown: tried again at the next round
            self._gates.drain(unit, slots, intent, patience_s=0.0)
            self._drained[unit] = slots

    def _stop_draining(self, unit: UnitId) -> None:
        with suppress(UnitBusyError):  # unknown: the devices stay drained
            self._gates.stop_draining(self._drained.pop(unit, ()))


def slots_in(inventory: Inventory, unit: UnitId) -> Slots:
    """Return the slots of a unit, as observed last."""
    return slots_of(inventory.facts.functions, inventory.units.get(unit, ()))
