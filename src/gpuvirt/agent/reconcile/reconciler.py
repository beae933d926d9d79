"""Brings the GPUs of a node to their desired state, one isolation unit at a time, and keeps them there.

The reconciler is level-triggered: it acts on the difference between the desired and the last observed state, after any
crash and in any order. Without a difference it does nothing, so a restart changes no device. A change that is refused
or fails is tried again when its circumstances change, and after growing pauses. Until then its reasons are notes of the
node. Devices that will be removed or returned to the host are withdrawn at once. They are changed once the kubelet has
answered after that, and no pod has them.

`model.node.duechanges` decides all of that. Here are the attempts so far, which only the event loop replaces; the
threads of changes report their rollbacks by a queue.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.agent.change.steps.changes import Change
from gpuvirt.agent.known.state import NodeState
from gpuvirt.agent.options import NodeOptions
from gpuvirt.agent.reconcile.operands import Operands
from gpuvirt.agent.reconcile.podaccount import PodAccount
from gpuvirt.agent.reconcile.reports import Reports
from gpuvirt.agent.reconcile.smiquestions import Schedulers, SmiQuestions
from gpuvirt.agent.reconcile.unitchanges import ChangeRequest, UnitChanges, UnitGates
from gpuvirt.agent.store import hostfiles
from gpuvirt.clock import Signal
from gpuvirt.facts.ids import PciAddress
from gpuvirt.loops.cell import Cell
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.change.attempts import Attempts, fingerprint
from gpuvirt.model.change.desired import DesiredUnit, desired_drivers
from gpuvirt.model.change.plan import Outcome
from gpuvirt.model.change.state import Account
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.node import progress
from gpuvirt.model.node.desiredunits import DesiredUnits
from gpuvirt.model.node.duechanges import Difference, Surroundings, attempts_after, compare, decide_changes
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, nodeproblems


class Reconciler:
    """Changes the GPUs of one node."""

    def __init__(
        self,
        state: NodeState,
        account: PodAccount,
        reports: Reports,
        change_host: ChangeHost,
        options: NodeOptions,
        *,
        operands: Operands | None = None,
    ) -> None:
        """`operands` is the device plugin of another project that offers this node's devices, None if the agent offers
        them itself.
        """
        self._state = state
        self._account = account
        self._reports = reports
        self._change_host = change_host
        self._clock = clock = options.clock
        self._intervals = intervals = options.intervals
        workers = options.workers
        self._attempts: dict[UnitId, Attempts] = {}
        self._difference = Difference()
        self._rolling_back: deque[UnitId] = deque()
        """The units whose changes have begun to roll back, from the threads of these changes."""
        self._gates = UnitGates(change_host.gates)
        self._questions = SmiQuestions(change_host.tools, workers, clock, intervals)
        self._schedulers = Schedulers(change_host.tools, workers, clock, intervals)
        self._changes = UnitChanges(change_host, state, account, workers, intervals, operands)

    async def run(self, decided: Cell[NodeView]) -> None:
        """Compare the desired with the observed state and act, until cancelled: after each decision, and at intervals.

        `decided` is replaced at each decision.
        """
        again = Signal()
        async with asyncio.TaskGroup() as group:
            with decided.notifying(again):
                while True:
                    self._act(group)
                    await again.wait_for(self._clock, self._intervals.reconcile_s)

    @property
    def _desired(self) -> DesiredUnits:
        """The desired state of the isolation units, as last decided."""
        return self._state.decisions.desired

    def _act(self, group: asyncio.TaskGroup) -> None:
        """Start the changes and questions that are due, and report the progress."""
        self._questions.ask(self._state, self._reports.decide_soon, group, self._observe_blocked)
        if (inventory := self._state.inventory) is not None:
            for unit, desired in self._due(inventory).items():
                group.create_task(self._change(unit, desired, self._following(unit, desired)))
        if not self._is_busy():
            self._schedulers.ask_next(self._state, self._reports.decide_soon, group)
        self._report_progress()

    def _due(self, inventory: Inventory) -> Mapping[UnitId, DesiredUnit]:
        """Decide, and return the units whose changes begin now; the gates and the notes follow."""
        recorded = self._change_host.original_drivers
        journal = hostfiles.journal(recorded).value.of_boot(inventory.facts.platform.boot_id)
        self._reports.problem("drivers", _lost(recorded) if journal.damaged else None)
        self._difference = difference = compare(inventory, self._desired, journal)
        self._take_rollbacks()
        decided = decide_changes(difference, self._surroundings(inventory), self._attempts, self._clock.monotonic_s())
        for unit, decision in decided.items():
            self._gates.follow(unit, decision, inventory)
        for unit, decision in decided.items():
            self._remember(unit, decision.attempts)
        self._attempts = dict(attempts_after(decided, inventory))
        return {unit: difference.open[unit] for unit, decision in decided.items() if decision.begins}

    def _surroundings(self, inventory: Inventory) -> Surroundings:
        """Return what changes meet. The account is read only for units that are not in their desired state."""
        account = self._account.read() if self._difference.open else Account(Unknown())
        return Surroundings(
            inventory,
            account,
            self._state.counted,
            self._desired.vgpus,
            self._gates.read_failed(inventory),
            self._state.observations,
        )

    def _following(self, unit: UnitId, gpus: Iterable[PciAddress]) -> Change:
        """Return the change that brings GPUs of a unit to their present desired state, and stops if that changes."""
        state, plan, gpus = self._state, self._desired, tuple(gpus)
        tried_on = self._attempts[unit].tried_on

        def is_desired() -> bool:
            return state.decisions.desired.allows(plan, gpus)

        circumstances = fingerprint(tried_on) if tried_on is not None else None
        return Change(state.changes, unit, is_desired, self._account.newest, circumstances)

    def _is_busy(self) -> bool:
        """Return whether a unit is being changed or soon will be: questions for display only must wait then."""
        if self._questions.asking or any(attempts.running for attempts in self._attempts.values()):
            return True
        vgpus, units = self._desired.vgpus, self._desired.by_unit(self._state.inventory)
        plans = (vgpus.plan_of(gpu) for desired in units.values() for gpu in desired)
        return isinstance(self._account.pods(), Unknown) and any(plan.steps for plan in plans)

    def _report_progress(self) -> None:
        differ, picture, decided = bool(self._difference.drivers), self._state.picture, self._state.decisions
        found = {unit: attempts.outcome for unit, attempts in self._attempts.items()}
        outcomes = {unit: outcome for unit, outcome in found.items() if outcome is not None}
        self._reports.workload.set(progress.of_workload(picture, decided, outcomes, drivers_differ=differ))
        self._reports.vgpus.set(progress.of_vgpus(picture, decided, outcomes))

    async def _change(self, unit: UnitId, desired: DesiredUnit, following: Change) -> None:
        kinds, blocked_at = self._kinds(unit, desired), self._attempts[unit].blocked_at
        waits, rolls_back = partial(self._conclude, unit), partial(self._rolling_back.append, unit)
        try:
            result = await self._changes.run(ChangeRequest(unit, desired, following, blocked_at, rolls_back, waits))
            for gpu, target in desired.items():
                if target.vgpus is not None:
                    self._state.forget_smi(gpu)
            outcome = result.outcome
            self._state.observe_vgpus(outcome.changed, self._clock.monotonic_s())
            self._reports.changed(kinds, str(outcome.reasons[0].code) if outcome.reasons else "done")
            self._conclude(unit, outcome)
            self._attempts[unit] = self._attempts[unit].changed(self._state.observations, result.blocked_at)
        finally:
            self._take_rollbacks()
            self._attempts[unit] = self._attempts[unit].ended(self._clock.monotonic_s())

    def _kinds(self, unit: UnitId, desired: DesiredUnit) -> tuple[str, ...]:
        """Return the kinds of a change, as metrics name them."""
        drivers = sorted(set(desired_drivers(desired).values())) if unit in self._difference.drivers else ()
        vgpus = any(self._desired.vgpus.plan_of(gpu).steps for gpu in desired)
        return (*drivers, "vgpus") if vgpus else tuple(drivers)

    def _take_rollbacks(self) -> None:
        """Record the rollbacks that the threads of changes have begun since; a blocked change may begin one late."""
        while self._rolling_back:
            unit = self._rolling_back.popleft()
            if (attempts := self._attempts.get(unit)) is not None:
                self._attempts[unit] = attempts.rolling_back()

    def _observe_blocked(self, unit: UnitId, gpu: PciAddress, reason: Reason) -> None:
        self._conclude(unit, Outcome(vgpus={gpu: (reason,)}))

    def _conclude(self, unit: UnitId, outcome: Outcome) -> None:
        """Record the outcome of an attempt, or the reason why it waits; it replaces the previous record."""
        self._remember(unit, self._attempts.get(unit, Attempts()).concluded(outcome))

    def _remember(self, unit: UnitId, attempts: Attempts) -> None:
        """Record the next state of the attempts at a unit; its reasons are problems of the node."""
        before = self._attempts.get(unit, Attempts()).noted
        for number in range(len(attempts.noted), len(before)):
            self._reports.problem(f"change {unit} {number}", None)
        for number, reason in enumerate(attempts.noted):
            self._reports.problem(f"change {unit} {number}", reason)
        self._attempts[unit] = attempts


def _lost(recorded: Path) -> Reason:
    return nodeproblems.lost(
        ReasonCode.DRIVERS_LOST,
        recorded,
        "was damaged or can't be read; the drivers and overrides that it recorded are unknown",
        "GPUs return to the driver that modules.alias names; the next boot clears all overrides",
        Seen("", f"a damaged file is kept beside it, as {recorded.name}.damaged"),
    )
