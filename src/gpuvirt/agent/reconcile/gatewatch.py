"""Follows the gates of the host for the agent: drains by commands, steps that the kernel blocks, killed changes."""

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.agent.change.gate.drainrequest import Membership
from gpuvirt.agent.change.gate.gatelock import GateFailedError
from gpuvirt.agent.change.gate.gaterecord import ALLOCATABLE, GateRecord, GateState
from gpuvirt.agent.known.state import NodeState
from gpuvirt.agent.reconcile.reports import Reports
from gpuvirt.agent.store import hostfiles
from gpuvirt.clock import Clock, until_tick_s
from gpuvirt.facts.ids import PciAddress, slot_of
from gpuvirt.facts.pci import FunctionKind
from gpuvirt.facts.snapshot import Facts
from gpuvirt.model.allocation.ledger import UNSETTLED
from gpuvirt.model.change.plan import Scope
from gpuvirt.model.reasons import refusals

log = logging.getLogger(__name__)


class GateWatch:
    """The gates of one host, as its agent follows them."""

    def __init__(
        self,
        membership: Membership,
        state: NodeState,
        reports: Reports,
        observe_soon: Callable[[str], None],
        changing: ChangeHost | None = None,
    ) -> None:
        """`observe_soon` has the host observed soon. `changing` is the host of an agent that changes GPUs."""
        self._membership = membership
        self._gate = membership.own
        self._state = state
        self._reports = reports
        self._observe_soon = observe_soon
        self._changing = changing
        self._facts: Facts | None = None
        self._states: Mapping[str, GateState] = {}
        self._blocked: Mapping[str, str] = {}
        """The slots in which the kernel blocks a step, with the step."""
        self._read()
        with suppress(GateFailedError, OSError):  # unknown: the lines stay, and refuse changes
            self._gate.find_lines()

    async def run(self, clock: Clock, interval_s: float) -> None:
        """Read the gates until cancelled; after a killed change the host is observed soon, which settles it."""
        while True:
            self._join()
            self._keep_lines()
            await clock.sleep(until_tick_s(clock.monotonic_s(), interval_s))
            if self._read(brief=True):
                if self._unsettled:
                    self._observe_soon("gate")
                if self._facts is not None and self._update_state(self._facts):
                    self._reports.decide_soon()
            self.answer_commands()

    def _join(self) -> None:
        """Take part in the gates, if the agent offers devices."""
        if not self._state.terms.vgpus_only:
            self._membership.join()
            self._reports.problem("gates", self._membership.problem)

    def _keep_lines(self) -> None:
        """Remove the lines of allocations that the kubelet's accounts show, or whose admission is over."""
        account = self._state.ledger.account
        is_whole = account is not None and account.recorded and account.partial is None
        admitting = frozenset(device for _, device in account.admitting) if account is not None else frozenset[str]()
        try:
            self._gate.keep_lines(account.settled_s if account is not None and is_whole else UNSETTLED, admitting)
        except (GateFailedError, OSError) as error:
            # unknown: the lines stay, and refuse changes
            log.debug("the lines of allocations in %s stay as they are: %s", self._gate.folder, error)

    @property
    def awaits_record(self) -> bool:
        """Whether the kubelet's accounts may not show an allocation that a file of a gate has."""
        return bool(self._gate.lines.kept)

    def observe_facts(self, facts: Facts) -> bool:
        """Settle killed changes, since the host was observed, and read the gates; return whether that is a change."""
        self._facts = facts
        if self._unsettled:
            self._settle(facts)
        self._read()
        return self._update_state(facts)

    def answer_commands(self) -> None:
        """Answer commands that wait for devices: the devices are drained, or the agent refuses to drain them."""
        try:
            self._answer_commands()
        except GateFailedError as error:
            # unknown: the command waits, and gives up
            log.debug("a command waits for an answer that can't be written: %s", error)

    def _answer_commands(self) -> None:
        for slot, record in self._requests().items():
            functions = frozenset(_functions_of(self._facts, {slot})) if self._facts is not None else frozenset()
            refusal = self._state.decisions.desired.why_kept(record.desires)
            if refusal is not None or self._state.counted.is_drained(functions):
                self._gate.answer(slot, record.generation, refusal)

    def leave(self) -> None:
        """Open the gates that the agent drains, and take no part in them any more, when the agent ends."""
        if self._changing is not None:
            self._changing.gates.stop_draining()
        self._membership.leave()

    @property
    def _elsewhere(self) -> frozenset[str]:
        """The slots that another process changes or is about to change, and those of killed changes."""
        ours = {*self._gate.lent.ours, *self._gate.draining}
        return frozenset(slot for slot, state in self._states.items() if state not in ALLOCATABLE and slot not in ours)

    @property
    def _unsettled(self) -> frozenset[str]:
        """The slots in which a change was killed, as last read."""
        return frozenset(slot for slot, state in self._states.items() if state is GateState.SETTLING)

    def _requests(self) -> Mapping[str, GateRecord]:
        """Return the records of the slots for which a command waits for an answer."""
        drained = (slot for slot in self._elsewhere if self._states[slot] is GateState.DRAINING)
        records = {slot: self._gate.read(slot) for slot in drained}
        return {slot: found for slot, found in records.items() if isinstance(found, GateRecord) and found.is_unanswered}

    def _read(self, *, brief: bool = False) -> bool:
        """Read the states of all gates; return whether they have changed.

        A brief read tries only the locks of gates whose records show a change under way.
        """
        before = self._states, self._blocked
        try:
            states = self._gate.states_by_record() if brief else self._gate.states()
            self._blocked = {slot: self._gate.step_of(slot) for slot in states if states[slot] is GateState.BLOCKED}
        except GateFailedError as error:  # unknown: no allocation or change passes an unreadable gate
            log.debug("the gates in %s can't be read, their last known states are kept: %s", self._gate.folder, error)
            return False
        self._states = states
        return before != (self._states, self._blocked)

    def _settle(self, facts: Facts) -> None:
        """Open the gates of killed changes, but not those of started driver changes: the reconciler finishes these."""
        started = self._started_changes(facts)
        for slot in sorted(self._unsettled - {slot_of(function) for function in started}):
            try:
                self._gate.settle(slot)
            except GateFailedError as error:
                # unknown: the gate stays closed
                log.debug("%s: the gate of a killed change can't be opened: %s", slot, error)

    def _started_changes(self, facts: Facts) -> Collection[PciAddress]:
        """Return the functions whose driver change is started in the driver journal."""
        if self._changing is None:
            return ()
        return hostfiles.journal(self._changing.original_drivers).value.of_boot(facts.platform.boot_id).changes

    def _update_state(self, facts: Facts) -> bool:
        """Update the agent's state and notes by the gates; return whether that is a change."""
        drained = Scope(frozenset(_functions_of(facts, self._elsewhere)))
        blocked = {function: self._blocked[slot] for function, slot in _functions_of(facts, self._blocked).items()}
        before = self._state.picture.gates.blocked
        is_change = self._state.observe_gates(drained, blocked)
        if blocked == before:
            return is_change
        for address in {*blocked, *before} & {*facts.functions}:
            if facts.functions[address].kind is FunctionKind.GPU and facts.functions[address].physfn is None:
                problem = refusals.blocked(address, blocked[address]) if address in blocked else None
                self._reports.problem(f"gate {address}", problem)
        return True


def _functions_of(facts: Facts, slots: Collection[str]) -> Mapping[PciAddress, str]:
    """Return the functions of slots, VFs included, with their slots."""
    if not slots:
        return {}
    found = {address: slot_of(function.physfn or address) for address, function in facts.functions.items()}
    return {address: slot for address, slot in found.items() if slot in slots}
