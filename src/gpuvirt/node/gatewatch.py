"""What the gates of a host tell an agent: the steps that the kernel blocks, and the changes that were killed."""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from gpuvirt.facts.ids import PciAddress, slot_of
from gpuvirt.facts.snapshot import Facts
from gpuvirt.node.change.gate import Gate
from gpuvirt.node.change.gaterecord import GateState

log = logging.getLogger(__name__)


class GateWatch:
    """The gates of one host, as its agent follows them."""

    def __init__(self, gate: Gate | None) -> None:
        """`gate`: None where no process changes what is offered here."""
        self._gate = gate
        self._states: Mapping[str, GateState] = {}
        self._folder_changed_ns = 0
        self._blocked: Mapping[str, str] = {}

    @property
    def unsettled(self) -> frozenset[str]:
        """The slots in which a change was killed, as they were last read."""
        return frozenset(slot for slot, state in self._states.items() if state is GateState.SETTLING)

    def look(self) -> bool:
        """Read the states of all gates; return whether that is news.

        Gates at rest are read again only when a record was written: no process comes or goes there.
        """
        if self._gate is None:
            return False
        try:
            changed_ns = _changed_ns(self._gate.folder)
            if changed_ns == self._folder_changed_ns and all(state in AT_REST for state in self._states.values()):
                return False
            states, blocked = self._gate.states(), self._gate.blocked()
        except OSError as error:  # no change can begin there either, and says so; what was blocked still may be
            log.debug("the gates can't be read: %s", error)
            return False
        before = self._states, self._blocked
        # What is written within a tick of the file system's clock is seen by the next look alone.
        self._folder_changed_ns = changed_ns if states == self._states else 0
        self._states, self._blocked = states, blocked
        return before != (states, blocked)

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
        blocked = self._blocked
        slots = {one: slot_of(function.physfn or one) for one, function in facts.functions.items()} if blocked else {}
        return {one: blocked[slot] for one, slot in slots.items() if slot in blocked}


AT_REST = frozenset({GateState.OPEN, GateState.HELD})


def _changed_ns(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
