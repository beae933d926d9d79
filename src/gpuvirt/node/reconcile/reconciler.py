"""Brings the GPUs of a node to their desired state, one isolation unit at a time, and keeps them there.

It is level-triggered: it acts on the difference between what is desired and what was last observed, after any crash and
in any order; where there is none it does nothing, so a restart changes no device. A change that is refused or fails is
tried again when something that it depends on has changed, and now and then; its reasons are notes of the node until
then. What is to be removed or given back to the host is offered no more at once, and changed when the kubelet was heard
since and no pod has it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from datetime import datetime

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu, DesiredUnit, desired_drivers
from gpuvirt.model.change.driverjournal import DriverJournal
from gpuvirt.model.change.drivers import interrupted, unmet
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import Reason, refusals
from gpuvirt.node.change.attempts import Attempts, ChangeWorker, Circumstances
from gpuvirt.node.change.changes import Change
from gpuvirt.node.change.observation import observe
from gpuvirt.node.change.site import Site
from gpuvirt.node.change.unitchange import Outcome, apply, foresee
from gpuvirt.node.change.unitgates import UnitGates, fingerprint
from gpuvirt.node.change.vgpusteps import Run
from gpuvirt.node.loops.intervals import Intervals
from gpuvirt.node.loops.serialworker import SerialWorker
from gpuvirt.node.reconcile import progress
from gpuvirt.node.reconcile.dependencies import Dependencies
from gpuvirt.node.reconcile.operands import Tell, Way
from gpuvirt.node.reconcile.schedulers import Schedulers
from gpuvirt.node.reconcile.smiquestions import SmiQuestions
from gpuvirt.node.store import originaldrivers

log = logging.getLogger(__name__)


class Reconciler:
    """Changes the GPUs of one node."""

    def __init__(self, site: Site, workers: Callable[[str], SerialWorker], clock: Clock, intervals: Intervals) -> None:
        """`lanes` returns the one lane of a unit."""
        self._site = site
        self._workers = workers
        self._clock = clock
        self._intervals = intervals
        self._attempts: dict[UnitId, Attempts] = {}
        self._outcomes: dict[UnitId, Outcome] = {}
        """What the last try of each unit has come to."""
        self._differing: frozenset[UnitId] = frozenset()
        """The units in which a GPU has another driver than the one that is desired."""
        self._looks: dict[UnitId, int] = {}
        """How often the host had been observed when each unit was last changed: what was observed before is old."""
        self._gates = UnitGates(site.locks)
        self._questions = SmiQuestions(site.tools, workers, clock, intervals)
        self._schedulers = Schedulers(site.tools, workers, clock, intervals)

    async def run(self, agent: Dependencies) -> None:
        """Compare and act, for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._questions.ask(agent, group, self._observe_blocked)
                for unit, desired in self._due(agent).items():
                    self._gates.begin(unit)
                    tried_on = self._attempts[unit].tried_on
                    circumstances = fingerprint(tried_on) if tried_on is not None else None
                    change = agent.desired.changing(unit, desired, circumstances)
                    group.create_task(self._change(agent, unit, desired, change))
                if not self._is_busy(agent):
                    self._schedulers.ask_next(agent.state, agent.callbacks.conclude_soon, group)
                self._tell_progress(agent)
                await agent.concluded.wait_for(self._clock, self._intervals.reconcile_s)

    def _due(self, agent: Dependencies) -> Mapping[UnitId, DesiredUnit]:
        """Return the units that are to be changed now; where one can't be, note why."""
        inventory = agent.state.inventory
        if inventory is None:
            return {}
        journal = originaldrivers.read(self._site.original_drivers).of_boot(inventory.facts.platform.boot_id)
        agent.callbacks.report_problem(
            "drivers", originaldrivers.lost(self._site.original_drivers) if journal.damaged else None
        )
        units = _units(agent, inventory, journal)
        drivers = {unit: desired_drivers(desired) for unit, desired in units.items()}
        self._differing = frozenset(unit for unit, target in drivers.items() if unmet(inventory, target, journal))
        is_open = {unit: desired for unit, desired in units.items() if self._is_open(agent, unit, desired)}
        self._gates.release_found((unit for unit in inventory.units if unit not in is_open), inventory)
        for unit, attempts in self._attempts.items():
            if unit not in is_open and not attempts.running:
                self._gates.release([unit], inventory)
                self._conclude(agent, unit, Outcome())
                attempts.forget(units.get(unit))
        self._attempts = {
            one: tries for one, tries in self._attempts.items() if one in inventory.units or tries.running
        }
        self._outcomes = {unit: outcome for unit, outcome in self._outcomes.items() if unit in is_open}
        self._looks = {unit: looks for unit, looks in self._looks.items() if unit in inventory.units}
        return {unit: desired for unit, desired in is_open.items() if self._is_due(agent, inventory, unit, desired)}

    def _is_open(self, agent: Dependencies, unit: UnitId, desired: DesiredUnit) -> bool:
        """Return whether a unit is not as desired."""
        return unit in self._differing or any(gpu in agent.questions or not agent.plan_of(gpu).met for gpu in desired)

    def _is_due(self, agent: Dependencies, inventory: Inventory, unit: UnitId, desired: DesiredUnit) -> bool:
        """Return whether an open unit is to be changed now; where it can't be, let it be seen why."""
        attempts = self._attempts.setdefault(unit, Attempts())
        differ = unit in self._differing
        plans = [agent.plan_of(gpu) for gpu in desired]
        if not differ and not any(plan.steps for plan in plans):
            if not attempts.running:
                against = {plan.gpu: (*plan.refusals, *plan.pending) for plan in plans}
                self._gates.stop_draining(unit)
                self._conclude(agent, unit, Outcome(vgpus=against))
                attempts.forget(desired)
            return False
        if not differ and self._looks.get(unit) == agent.state.looks:
            return False
        waits = self._waits_for_kubelet(agent, unit, desired, differ=differ)
        if waits is not None and not attempts.running:
            self._gates.drain(unit, inventory, _intent(agent, desired, differ=differ))
        if waits is not None and waits.vgpus:
            if not (attempts.running or attempts.rolled_back or attempts.asleep_at):
                self._conclude(agent, unit, waits)
            return False
        now_s = self._clock.monotonic_s()
        circumstances = _circumstances(agent, inventory, unit, desired, drivers=differ)
        if waits is None and (held := self._gates.held(unit, inventory, circumstances)) is not None:
            attempts.resume(circumstances, now_s)
            self._conclude(agent, unit, Outcome.everywhere(held, desired))
        if not attempts.begin(circumstances, now_s):
            return False
        if waits is not None:
            self._conclude(agent, unit, waits)
            attempts.end(now_s)
            return False
        return True

    def _waits_for_kubelet(
        self, agent: Dependencies, unit: UnitId, desired: DesiredUnit, *, differ: bool
    ) -> Outcome | None:
        """Return why a unit waits until the kubelet was heard, None where it does not."""
        drivers: tuple[Reason, ...] = ()
        pods, vgpus = agent.account.pods(), dict[PciAddress, tuple[Reason, ...]]()
        if differ and isinstance(pods, Unknown) and DesiredDriver.NATIVE in desired_drivers(desired).values():
            drivers = (pods.reason_for(unit) or refusals.allocations_unknown(unit),)
        elif differ and (counted := _counted(agent, unit)):
            drivers = tuple(refusals.still_counted(one, names) for one, names in counted)
        if isinstance(pods, Unknown):
            destroyed = [gpu for gpu in desired if agent.plan_of(gpu).destroys]
            vgpus = {gpu: (pods.reason_for(gpu) or refusals.allocations_unknown(gpu),) for gpu in destroyed}
        return Outcome(drivers, vgpus) if drivers or vgpus else None

    def _is_busy(self, agent: Dependencies) -> bool:
        """Return whether a unit is being changed, or soon will be: what is only shown can wait."""
        if self._questions.asking or any(attempts.running for attempts in self._attempts.values()):
            return True
        plans = (agent.plan_of(gpu) for desired in agent.desired.units.values() for gpu in desired)
        return isinstance(agent.account.pods(), Unknown) and any(plan.steps for plan in plans)

    def _tell_progress(self, agent: Dependencies) -> None:
        differ = bool(self._differing)
        agent.workload_states.set(progress.of_workload(agent, self._outcomes, drivers_differ=differ))
        agent.vgpu_states.set(progress.of_vgpus(agent, self._outcomes))

    async def _change(self, agent: Dependencies, unit: UnitId, desired: DesiredUnit, change: Change) -> None:
        attempts, what = self._attempts[unit], self._what(agent, unit, desired)
        try:
            outcome = await self._refused(agent, unit, desired) if agent.operands is not None else Outcome()
            if not outcome.reasons:
                gpus = tuple(desired)

                def wait(reason: Reason) -> None:
                    self._conclude(agent, unit, Outcome(vgpus={gpus[0]: (reason,)}))

                async with _way_cleared(agent, gpus, wait) as obstacle:
                    if obstacle is None:
                        outcome = await self._applied(agent, unit, desired, change)
                    else:
                        outcome = Outcome(vgpus={gpus[0]: (obstacle,)})
            self._looks[unit] = agent.state.looks
            for gpu, target in desired.items():
                if target.vgpus is not None:
                    agent.state.vgpu_plans.forget_smi(gpu)
            agent.callbacks.changed(what, str(outcome.reasons[0].code) if outcome.reasons else "done")
            self._conclude(agent, unit, outcome)
        finally:
            attempts.end(self._clock.monotonic_s())

    def _what(self, agent: Dependencies, unit: UnitId, desired: DesiredUnit) -> tuple[str, ...]:
        """Return what a change is about, as metrics name it."""
        drivers = sorted(set(desired_drivers(desired).values())) if unit in self._differing else ()
        vgpus = any(agent.plan_of(gpu).steps for gpu in desired)
        return (*drivers, "vgpus") if vgpus else tuple(drivers)

    async def _refused(self, agent: Dependencies, unit: UnitId, desired: DesiredUnit) -> Outcome:
        """Return why a change would be refused, before others' programs are taken away for it."""
        inputs = agent.account.inputs(offered=False)

        def job() -> Outcome:
            return foresee(observe(self._site, inputs, desired), unit, desired)

        return await self._run(unit, desired, job, (), self._workers(unit), self._intervals.vgpu_change_s)

    async def _applied(self, agent: Dependencies, unit: UnitId, desired: DesiredUnit, change: Change) -> Outcome:
        inventory, inputs = agent.state.inventory, agent.account.inputs()
        taken: list[str] = []

        def tell(step: Step | RollBack) -> None:
            if isinstance(step, RollBack):
                self._attempts[unit].roll_back()
            taken.append(step.text)
            log.info("%s", step.text, extra={"unit": unit})

        def job() -> Outcome:
            return apply(self._site, unit, desired, inputs, Run(tell, change), inventory)

        vgpus = any(agent.plan_of(gpu).steps or agent.plan_of(gpu).follows for gpu in desired)
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

    def _observe_blocked(self, agent: Dependencies, unit: UnitId, gpu: PciAddress, reason: Reason) -> None:
        self._attempts.setdefault(unit, Attempts())
        self._conclude(agent, unit, Outcome(vgpus={gpu: (reason,)}))

    def _conclude(self, agent: Dependencies, unit: UnitId, outcome: Outcome) -> None:
        """Let what a try came to be seen, and what the one before came to no more."""
        self._outcomes[unit] = outcome
        self._attempts[unit].note(f"change {unit}", outcome.reasons, agent.callbacks.report_problem)


def _way_cleared(
    agent: Dependencies, gpus: Sequence[PciAddress], tell: Tell
) -> AbstractAsyncContextManager[Reason | None]:
    """Have nobody else offer what is to be removed from GPUs while the context lasts; it gives why that can't be.

    `tell` takes what is being waited for. What the agent itself offers is withdrawn already.
    """
    if agent.operands is None:
        return nullcontext()

    def why_unsettled(since: datetime) -> Reason | None:
        reasons = (agent.account.why_unsettled(gpu, since) for gpu in gpus)
        return next((reason for reason in reasons if reason is not None), None)

    way = Way(lambda: any(agent.plan_of(gpu).steps for gpu in gpus), why_unsettled)
    return agent.operands.away(gpus[0], way, tell)


def _units(agent: Dependencies, inventory: Inventory, journal: DriverJournal) -> Mapping[UnitId, DesiredUnit]:
    """Return what is desired of each unit, with the drivers of GPUs at which a change was killed.

    Such a change is ended though nothing is desired of its GPU.
    """
    units = {unit: dict(desired) for unit, desired in agent.desired.units.items()}
    gpus = {gpu: target for desired in units.values() for gpu, target in desired.items()}
    drivers = desired_drivers(gpus)
    for gpu, driver in interrupted(inventory, drivers, journal).items():
        unit = units.setdefault(inventory.gpus[gpu].unit, {})
        unit[gpu] = replace(unit.get(gpu, DesiredGpu()), driver=driver)
    return units


def _intent(agent: Dependencies, desired: DesiredUnit, *, differ: bool) -> str:
    """Return in words what a change of a unit waits to do."""
    driver = next((gpu for gpu, one in desired_drivers(desired).items() if one is DesiredDriver.NATIVE), None)
    if differ and driver is not None:
        return f"return {driver} to its native driver"
    steps = (step.text for gpu in desired for step in agent.plan_of(gpu).steps)
    return next(steps, f"change {', '.join(desired)}")


def _counted(agent: Dependencies, unit: UnitId) -> tuple[tuple[PciAddress, tuple[str, ...]], ...]:
    """Return the functions of a unit that are offered no more and that the kubelet still counts, with its names."""
    inventory = agent.state.inventory
    members = inventory.units.get(unit, ()) if inventory is not None else ()
    return tuple((one, names) for one, names in sorted(agent.state.still_counted.items()) if one in members)


def _circumstances(
    agent: Dependencies, inventory: Inventory, unit: UnitId, desired: DesiredUnit, *, drivers: bool
) -> Circumstances:
    """Return what a change of a unit depends on, as far as it is known without a look at the host."""
    account, pods = agent.account.read(), agent.account.pods()
    plans = [agent.plan_of(gpu) for gpu in desired]
    ours = frozenset(vgpu for vgpu in account.offered if inventory.vgpus[vgpu].gpu in desired)
    users: list[object] = [[plan.pending for plan in plans], pods if isinstance(pods, Unknown) else None]
    observed: list[object] = [plans, ours, account.allocations.unmapped]
    if drivers:
        users += _users(inventory, unit)
        users.append({} if isinstance(pods, Unknown) else {gpu: pods[gpu] for gpu in desired if gpu in pods})
        observed.append([inventory.facts.functions[one] for one in inventory.units[unit]])
        observed.append(sorted(one for one, vgpu in inventory.vgpus.items() if vgpu.gpu in desired))
        observed.append(_counted(agent, unit))
    return Circumstances(dict(desired), users, observed)


def _users(inventory: Inventory, unit: UnitId) -> Iterator[object]:
    groups = {inventory.facts.functions[one].iommu_group for one in inventory.units[unit]}
    yield from ((group, used) for group, used in (inventory.facts.users or {}).items() if group in groups)
