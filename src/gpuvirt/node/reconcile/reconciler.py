"""Brings the GPUs of a node to their desired state, one isolation unit at a time, and keeps them there.

The reconciler is level-triggered: it acts on the difference between the desired and the last observed state, after any
crash and in any order. Without a difference it does nothing, so a restart changes no device. A change that is refused
or fails is tried again when its circumstances change, and after growing pauses. Until then its reasons are notes of the
node. Devices that will be removed or returned to the host are withdrawn at once. They are changed once the kubelet has
answered after that, and no pod has them.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cache

from gpuvirt.clock import Signal
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.change.desired import DesiredUnit, desired_drivers
from gpuvirt.model.change.drivers import unmet
from gpuvirt.model.change.outcome import Outcome
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.node import progress
from gpuvirt.model.node.desiredunits import DesiredUnits
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import Reason
from gpuvirt.node.change.attempts import Attempts, ChangeWorker
from gpuvirt.node.change.observation import observe
from gpuvirt.node.change.site import Site
from gpuvirt.node.change.steps.changes import Change
from gpuvirt.node.change.steps.vgpusteps import Run
from gpuvirt.node.change.unitchange import apply, foresee
from gpuvirt.node.change.unitgates import UnitGates, fingerprint
from gpuvirt.node.known.state import NodeState
from gpuvirt.node.loops.cell import Cell
from gpuvirt.node.loops.serialworker import SerialWorker
from gpuvirt.node.options import NodeOptions
from gpuvirt.node.reconcile.circumstances import Surroundings, circumstances_of, intent_of, why_waiting
from gpuvirt.node.reconcile.operands import Operands, PendingChange, ReportWait
from gpuvirt.node.reconcile.podaccount import PodAccount
from gpuvirt.node.reconcile.reports import Reports
from gpuvirt.node.reconcile.schedulers import Schedulers
from gpuvirt.node.reconcile.smiquestions import SmiQuestions
from gpuvirt.node.store import originaldrivers

log = logging.getLogger(__name__)


class Reconciler:
    """Changes the GPUs of one node."""

    def __init__(
        self,
        state: NodeState,
        account: PodAccount,
        reports: Reports,
        site: Site,
        options: NodeOptions,
        *,
        operands: Operands | None = None,
    ) -> None:
        """`site` is the host to change. `operands` is the device plugin of another project that offers this node's
        devices; None if the agent offers them itself.
        """
        self._state = state
        self._account = account
        self._reports = reports
        self._operands = operands
        self._site = site
        self._workers = workers = cache(options.workers)
        self._clock = clock = options.clock
        self._intervals = intervals = options.intervals
        self._attempts: dict[UnitId, Attempts] = {}
        self._outcomes: dict[UnitId, Outcome] = {}
        """The outcome of the last attempt at each unit."""
        self._differing: frozenset[UnitId] = frozenset()
        """The units in which a GPU does not have its desired driver."""
        self._observations: dict[UnitId, int] = {}
        """The number of the host's observations when each unit was last changed: older observations are outdated."""
        self._gates = UnitGates(site.gates)
        self._questions = SmiQuestions(site.tools, workers, clock, intervals)
        self._schedulers = Schedulers(site.tools, workers, clock, intervals)

    async def run(self, decided: Cell[NodeView]) -> None:
        """Compare the desired with the observed state and act, for ever: after each decision, and at intervals.

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

    def _plan_of(self, gpu: PciAddress) -> VgpuPlan:
        """Return the plan for the vGPUs of a GPU, as observed last."""
        return self._desired.vgpus.plan_of(gpu)

    def _act(self, group: asyncio.TaskGroup) -> None:
        """Start the changes and questions that are due, and report the progress."""
        self._questions.ask(self._state, self._reports.decide_soon, group, self._observe_blocked)
        for unit, desired in self._due().items():
            self._gates.begin(unit)
            group.create_task(self._change(unit, desired, self._following(unit, desired)))
        if not self._is_busy():
            self._schedulers.ask_next(self._state, self._reports.decide_soon, group)
        self._report_progress()

    def _following(self, unit: UnitId, gpus: Iterable[PciAddress]) -> Change:
        """Return the change that brings GPUs of a unit to their present desired state, and stops if that changes."""
        state, plan, gpus = self._state, self._desired, tuple(gpus)
        tried_on = self._attempts[unit].tried_on

        def is_desired() -> bool:
            return state.decisions.desired.allows(plan, gpus)

        circumstances = fingerprint(tried_on) if tried_on is not None else None
        return Change(state.changes, unit, is_desired, self._account.newest, circumstances)

    def _due(self) -> Mapping[UnitId, DesiredUnit]:
        """Return the units to change now; note why other units can't be changed."""
        inventory = self._state.inventory
        if inventory is None:
            return {}
        journal = originaldrivers.read(self._site.original_drivers).of_boot(inventory.facts.platform.boot_id)
        self._reports.problem("drivers", originaldrivers.lost(self._site.original_drivers) if journal.damaged else None)
        units = self._desired.with_interrupted(inventory, journal)
        drivers = {unit: desired_drivers(desired) for unit, desired in units.items()}
        self._differing = frozenset(unit for unit, target in drivers.items() if unmet(inventory, target, journal))
        is_open = {unit: desired for unit, desired in units.items() if self._is_open(unit, desired)}
        self._gates.release_found((unit for unit in inventory.units if unit not in is_open), inventory)
        for unit, attempts in self._attempts.items():
            if unit not in is_open and not attempts.running:
                self._gates.release([unit], inventory)
                self._conclude(unit, Outcome())
                attempts.forget(units.get(unit))
        self._attempts = {
            unit: attempts for unit, attempts in self._attempts.items() if unit in inventory.units or attempts.running
        }
        self._outcomes = {unit: outcome for unit, outcome in self._outcomes.items() if unit in is_open}
        self._observations = {
            unit: observations for unit, observations in self._observations.items() if unit in inventory.units
        }
        return {unit: desired for unit, desired in is_open.items() if self._is_due(inventory, unit, desired)}

    def _is_open(self, unit: UnitId, desired: DesiredUnit) -> bool:
        """Return whether a unit is not in its desired state."""
        questions = self._desired.vgpus.questions
        return unit in self._differing or any(gpu in questions or not self._plan_of(gpu).met for gpu in desired)

    def _is_due(self, inventory: Inventory, unit: UnitId, desired: DesiredUnit) -> bool:
        """Return whether to change an open unit now; if it can't be changed, note why."""
        attempts = self._attempts.setdefault(unit, Attempts())
        differ = unit in self._differing
        plans = [self._plan_of(gpu) for gpu in desired]
        if not differ and not any(plan.steps for plan in plans):
            if not attempts.running:
                self._rest(unit, desired)
            return False
        if not differ and self._observations.get(unit) == self._state.observations:
            return False
        surroundings = Surroundings(inventory, self._account.read(), self._state.counted, self._desired.vgpus)
        waits = why_waiting(surroundings, unit, desired, differ=differ)
        if waits is not None and not attempts.running:
            self._gates.drain(unit, inventory, intent_of(surroundings.vgpus, desired, differ=differ))
        if waits is not None and waits.vgpus:
            if not (attempts.running or attempts.rolled_back or attempts.blocked_at):
                self._conclude(unit, waits)
            return False
        now_s = self._clock.monotonic_s()
        circumstances = circumstances_of(surroundings, unit, desired, drivers=differ)
        if waits is None and (held := self._gates.held(unit, inventory, circumstances)) is not None:
            attempts.resume(circumstances, now_s)
            self._conclude(unit, Outcome.everywhere(held, desired))
        if not attempts.begin(circumstances, now_s):
            return False
        if waits is not None:
            self._conclude(unit, waits)
            attempts.end(now_s)
            return False
        return True

    def _rest(self, unit: UnitId, desired: DesiredUnit) -> None:
        """Note that no change of a unit is planned. While nvidia-smi is asked there is no plan yet: nothing is new."""
        self._gates.stop_draining(unit)
        if not any(gpu in self._desired.vgpus.questions for gpu in desired):
            plans = (self._plan_of(gpu) for gpu in desired)
            self._conclude(unit, Outcome(vgpus={plan.gpu: (*plan.refusals, *plan.pending) for plan in plans}))
            self._attempts[unit].forget(desired)

    def _is_busy(self) -> bool:
        """Return whether a unit is being changed or soon will be: questions for display only must wait then."""
        if self._questions.asking or any(attempts.running for attempts in self._attempts.values()):
            return True
        plans = (
            self._plan_of(gpu) for desired in self._desired.by_unit(self._state.inventory).values() for gpu in desired
        )
        return isinstance(self._account.pods(), Unknown) and any(plan.steps for plan in plans)

    def _report_progress(self) -> None:
        differ, picture, decided = bool(self._differing), self._state.picture, self._state.decisions
        self._reports.workload.set(progress.of_workload(picture, decided, self._outcomes, drivers_differ=differ))
        self._reports.vgpus.set(progress.of_vgpus(picture, decided, self._outcomes))

    async def _change(self, unit: UnitId, desired: DesiredUnit, change: Change) -> None:
        attempts, what = self._attempts[unit], self._what(unit, desired)
        try:
            outcome = await self._refused(unit, desired) if self._operands is not None else Outcome()
            if not outcome.reasons:
                gpus = tuple(desired)

                def wait(reason: Reason) -> None:
                    self._conclude(unit, Outcome(vgpus={gpus[0]: (reason,)}))

                async with self._operands_stopped(gpus, wait) as obstacle:
                    if obstacle is None:
                        outcome = await self._applied(unit, desired, change)
                    else:
                        outcome = Outcome(vgpus={gpus[0]: (obstacle,)})
            self._observations[unit] = self._state.observations
            for gpu, target in desired.items():
                if target.vgpus is not None:
                    self._state.forget_smi(gpu)
            self._reports.changed(what, str(outcome.reasons[0].code) if outcome.reasons else "done")
            self._conclude(unit, outcome)
        finally:
            attempts.end(self._clock.monotonic_s())

    def _what(self, unit: UnitId, desired: DesiredUnit) -> tuple[str, ...]:
        """Return the kinds of a change, as metrics name them."""
        drivers = sorted(set(desired_drivers(desired).values())) if unit in self._differing else ()
        vgpus = any(self._plan_of(gpu).steps for gpu in desired)
        return (*drivers, "vgpus") if vgpus else tuple(drivers)

    async def _refused(self, unit: UnitId, desired: DesiredUnit) -> Outcome:
        """Return why a change would be refused, before another project's device plugin is stopped for it."""
        inputs = self._account.inputs(offered=False)

        def job() -> Outcome:
            return foresee(observe(self._site, inputs, desired), unit, desired)

        return await self._run(unit, desired, job, (), self._workers(unit), self._intervals.vgpu_change_s)

    async def _applied(self, unit: UnitId, desired: DesiredUnit, change: Change) -> Outcome:
        inventory, inputs = self._state.inventory, self._account.inputs()
        taken: list[str] = []

        def report(step: Step | RollBack) -> None:
            attempts = self._attempts[unit]
            if isinstance(step, RollBack):
                attempts.roll_back()
            taken.append(step.text)
            cause = "a failed change of" if attempts.rolled_back else "the desired state of"
            log.info("%s (because of %s isolation unit %s)", step.text, cause, unit, extra={"unit": unit})

        def job() -> Outcome:
            return apply(self._site, unit, desired, inputs, Run(report, change), inventory)

        vgpus = any(self._plan_of(gpu).steps or self._plan_of(gpu).follows for gpu in desired)
        timeout_s = self._intervals.vgpu_change_s if vgpus else self._intervals.move_s
        return await self._run(unit, desired, job, taken, ChangeWorker(self._workers(unit), change), timeout_s)

    async def _run(
        self,
        unit: UnitId,
        desired: DesiredUnit,
        job: Callable[[], Outcome],
        taken: Sequence[str],
        worker: SerialWorker,
        timeout_s: float,
    ) -> Outcome:
        found = await self._attempts[unit].run(unit, job, taken, worker=worker, name="change", timeout_s=timeout_s)
        return Outcome.everywhere(found, desired) if isinstance(found, Reason) else found

    def _observe_blocked(self, unit: UnitId, gpu: PciAddress, reason: Reason) -> None:
        self._attempts.setdefault(unit, Attempts())
        self._conclude(unit, Outcome(vgpus={gpu: (reason,)}))

    def _conclude(self, unit: UnitId, outcome: Outcome) -> None:
        """Report the outcome of an attempt; it replaces that of the attempt before."""
        self._outcomes[unit] = outcome
        self._attempts[unit].note(f"change {unit}", outcome.reasons, self._reports.problem)

    def _operands_stopped(
        self, gpus: Sequence[PciAddress], report: ReportWait
    ) -> AbstractAsyncContextManager[Reason | None]:
        """Keep another project's device plugin stopped while the context lasts; it gives why that failed.

        `report` is called with what the change waits for. Devices that the agent itself offers are withdrawn already.
        """
        if self._operands is None:
            return nullcontext()

        def why_unsettled(since_s: float) -> Reason | None:
            reasons = (self._account.why_unsettled(gpu, since_s) for gpu in gpus)
            return next((reason for reason in reasons if reason is not None), None)

        change = PendingChange(lambda: any(self._plan_of(gpu).steps for gpu in gpus), why_unsettled)
        return self._operands.away(gpus[0], change, report)
