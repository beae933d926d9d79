"""What the gates of a host tell an agent: the steps that the kernel blocks, and the changes that were killed."""

import logging
from collections.abc import Collection, Mapping

from gpuvirt.facts.ids import PciAddress, slot_of
from gpuvirt.facts.snapshot import Facts
from gpuvirt.model.reasons import Reason
from gpuvirt.node.change.gate.gate import Gate
from gpuvirt.node.change.gate.gaterecord import ALLOCATABLE, GateRecord, GateState

log = logging.getLogger(__name__)


class GateWatch:
    """The gates of one host, as its agent follows them."""

    def __init__(self, gate: Gate | None) -> None:
        """`gate`: None where no process changes what is offered here."""
        self._gate = gate
        self._states: Mapping[str, GateState] = {}
        self._blocked: Mapping[str, str] = {}

    @property
    def are_there(self) -> bool:
        """Whether there are gates to look at."""
        return self._gate is not None

    @property
    def elsewhere(self) -> frozenset[str]:
        """The slots that another process changes or is about to change, or that it left when it was killed."""
        if self._gate is None:
            return frozenset()
        ours = {*self._gate.ours, *self._gate.draining}
        return frozenset(slot for slot, state in self._states.items() if state not in ALLOCATABLE and slot not in ours)

    def requests(self) -> Mapping[str, GateRecord]:
        """Return the records of the slots that commands wait for, by slot; those of no answer yet."""
        if self._gate is None:
            return {}
        drained = (slot for slot in self.elsewhere if self._states[slot] is GateState.DRAINING)
        records = {slot: self._gate.read(slot) for slot in drained}
        return {slot: one for slot, one in records.items() if isinstance(one, GateRecord) and one.is_unanswered}

    def answer(self, slot: str, generation: int, refusal: Reason | None) -> None:
        """Answer a command."""
        if self._gate is not None:
            self._gate.answer(slot, generation, refusal)

    @property
    def unsettled(self) -> frozenset[str]:
        """The slots in which a change was killed, as they were last read."""
        return frozenset(slot for slot, state in self._states.items() if state is GateState.SETTLING)

    def look(self, *, whole: bool = True) -> bool:
        """Read the states of gates; return whether that is news.

        A brief look asks for the locks of those gates alone whose records say that a change is under way.
        """
        if self._gate is None:
            return False
        before = self._states, self._blocked
        try:
            states = self._gate.states() if whole else self._gate.states_by_record()
            self._blocked = {one: self._gate.step_of(one) for one in states if states[one] is GateState.BLOCKED}
        except OSError as error:  # no change can begin there either, and says so; what was blocked still may be
            log.debug("the gates can't be read: %s", error)
            return False
        self._states = states
        return before != (self._states, self._blocked)

    def settle(self, changing: Collection[PciAddress]) -> None:
        """Open the gates of changes that were killed, since the host was observed after they were seen.

        Not those of functions that are recorded as `changing`: another change ends what was begun there.
        """
        if self._gate is None:
            return
        for slot in sorted(self.unsettled - {slot_of(one) for one in changing}):
            try:
                self._gate.settle(slot)
            except OSError as error:
                log.debug("the gate of %s can't be opened: %s", slot, error)

    def stop_draining(self) -> None:
        """Open the gates that the agent drains, at its end."""
        if self._gate is not None:
            self._gate.stop_draining(tuple(self._gate.draining))

    def blocked(self, facts: Facts) -> Mapping[PciAddress, str]:
        """Return the functions in whose slots the kernel blocks a step, with that step."""
        return {one: self._blocked[slot] for one, slot in _slots(facts, self._blocked).items()}

    def functions_of(self, slots: Collection[str], facts: Facts | None) -> frozenset[PciAddress]:
        """Return the functions of slots, VFs too."""
        return frozenset(_slots(facts, slots)) if facts is not None else frozenset()


def _slots(facts: Facts, chosen: Collection[str]) -> Mapping[PciAddress, str]:
    """Return the functions of the slots that are chosen, with their slots."""
    found = {one: slot_of(function.physfn or one) for one, function in facts.functions.items()} if chosen else {}
    return {one: slot for one, slot in found.items() if slot in chosen}
