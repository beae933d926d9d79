"""Carries out the change of one isolation unit: in its serial worker, with another project's device plugin stopped.

Between changes the gates of a unit are drained while a change waits, held after a failure, and else open.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.agent.change.gate.gate import Gates
from gpuvirt.agent.change.gate.gatelock import UnitBusyError, why_not_passed
from gpuvirt.agent.change.gate.gaterecord import GateRecord, GateState
from gpuvirt.agent.change.observation import observe
from gpuvirt.agent.change.steps.changes import Change
from gpuvirt.agent.change.steps.vgpusteps import Run
from gpuvirt.agent.change.unitchange import apply, foresee
from gpuvirt.agent.known.state import NodeState
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.reconcile.operands import Operands, PendingChange
from gpuvirt.agent.reconcile.podaccount import PodAccount
from gpuvirt.loops.serialworker import SerialWorker, WorkerBlockedError
from gpuvirt.model.change.desired import DesiredUnit
from gpuvirt.model.change.plan import Outcome
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import Slots, UnitId, slots_of
from gpuvirt.model.node.duechanges import EarlierFailure, GateUse, UnitDecision
from gpuvirt.model.reasons import Reason, Seen, refusals


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


log = logging.getLogger(__name__)

T = TypeVar("T")


class ChangeRequest(msgspec.Struct, frozen=True):
    """One change of a unit."""

    unit: UnitId
    desired: DesiredUnit
    change: Change
    blocked_at: str | None
    """The step of an earlier change that the kernel blocks."""
    rolls_back: Callable[[], None]
    """Called when the change begins to roll back its steps, by the thread that takes them."""
    waits: Callable[[Outcome], None]
    """Called with the reason why the change waits before its first step."""

    def everywhere(self, reason: Reason) -> Outcome:
        """Return the outcome in which a reason keeps all GPUs from their desired state."""
        return Outcome.everywhere(reason, self.desired)

    def at_first(self, reason: Reason) -> Outcome:
        """Return the outcome in which a reason keeps the vGPUs of the unit from their desired state."""
        return Outcome(vgpus={next(iter(self.desired)): (reason,)})


class ChangeResult(msgspec.Struct, frozen=True):
    """The result of a change."""

    outcome: Outcome
    blocked_at: str | None = None
    """The step that the kernel blocks."""


class ChangeWorker(msgspec.Struct, frozen=True):
    """The serial worker of a change. A step that the kernel blocks makes the plan outdated and is its last step."""

    worker: SerialWorker
    change: Change

    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        """Return what `job` returns; raise WorkerBlockedError if the kernel blocks it."""
        try:
            return await self.worker.run(job, name=name, timeout_s=timeout_s)
        except WorkerBlockedError:
            self.change.expire()
            raise


async def attempt(
    change: ChangeRequest, job: Callable[[], Outcome], taken: Sequence[str], worker: SerialWorker, timeout_s: float
) -> ChangeResult:
    """Return the result of a change's job, or why the job has none.

    `taken` are the steps that the job has begun. The kernel may block the last one.
    """
    try:
        return ChangeResult(await worker.run(job, name="change", timeout_s=timeout_s))
    except WorkerBlockedError as error:
        step = taken[-1] if taken else change.blocked_at or str(error)
        return ChangeResult(change.everywhere(refusals.blocked(change.unit, step)), step)
    except UnitBusyError as error:
        return ChangeResult(change.everywhere(why_not_passed(change.unit, error)), change.blocked_at)
    except OSError as error:
        reason = refusals.failed("observe the host", change.unit, Seen("", str(error)))
        return ChangeResult(change.everywhere(reason), change.blocked_at)


class UnitChanges:
    """The changes of the units of one host."""

    def __init__(
        self,
        change_host: ChangeHost,
        state: NodeState,
        account: PodAccount,
        workers: Callable[[str], SerialWorker],
        intervals: Intervals,
        operands: Operands | None,
    ) -> None:
        self._change_host = change_host
        self._state = state
        self._account = account
        self._workers = workers
        self._intervals = intervals
        self._operands = operands

    async def run(self, change: ChangeRequest) -> ChangeResult:
        """Make a change. It is not begun if it would be refused, before another device plugin is stopped for it."""
        if self._operands is None:
            return await self._applied(change)
        foreseen = await self._foreseen(change)
        if foreseen.outcome.reasons:
            return foreseen
        change = replace(change, blocked_at=foreseen.blocked_at)
        async with self._stopped(self._operands, change) as obstacle:
            if obstacle is not None:
                return ChangeResult(change.at_first(obstacle), change.blocked_at)
            return await self._applied(change)

    async def _foreseen(self, change: ChangeRequest) -> ChangeResult:
        inputs = self._account.inputs(offered=False)

        def job() -> Outcome:
            return foresee(observe(self._change_host, inputs, change.desired), change.unit, change.desired)

        return await attempt(change, job, (), self._workers(change.unit), self._intervals.vgpu_change_s)

    async def _applied(self, change: ChangeRequest) -> ChangeResult:
        unit, desired = change.unit, change.desired
        inventory, inputs = self._state.inventory, self._account.inputs()
        taken: list[str] = []
        is_rollback = False

        def report(step: Step | RollBack) -> None:
            nonlocal is_rollback
            if isinstance(step, RollBack):
                is_rollback = True
                change.rolls_back()
            taken.append(step.text)
            cause = "a failed change of" if is_rollback else "the desired state of"
            log.info("%s (because of %s isolation unit %s)", step.text, cause, unit, extra={"unit": unit})

        def job() -> Outcome:
            return apply(self._change_host, unit, desired, inputs, Run(report, change.change), inventory)

        plans = [self._state.decisions.desired.vgpus.plan_of(gpu) for gpu in desired]
        vgpus = any(plan.steps or plan.follows for plan in plans)
        timeout_s = self._intervals.vgpu_change_s if vgpus else self._intervals.driver_change_s
        worker = ChangeWorker(self._workers(unit), change.change)
        return await attempt(change, job, taken, worker, timeout_s)

    def _stopped(self, operands: Operands, change: ChangeRequest) -> AbstractAsyncContextManager[Reason | None]:
        """Keep another project's device plugin stopped while the context lasts; it gives why that failed.

        Devices that the agent itself offers are withdrawn already.
        """
        gpus = tuple(change.desired)

        def why_unsettled(since_s: float) -> Reason | None:
            reasons = (self._account.why_unsettled(gpu, since_s) for gpu in gpus)
            return next((reason for reason in reasons if reason is not None), None)

        def is_needed() -> bool:
            return any(self._state.decisions.desired.vgpus.plan_of(gpu).steps for gpu in gpus)

        def report(reason: Reason) -> None:
            change.waits(change.at_first(reason))

        return operands.away(gpus[0], PendingChange(is_needed, why_unsettled), report)
