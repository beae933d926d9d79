"""Changes the drivers of a unit's functions, and rolls back the functions that a failed change has touched."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from msgspec.structs import replace

from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.agent.change.steps.changerecord import ChangeRecord
from gpuvirt.agent.change.steps.changes import StalePlanError
from gpuvirt.agent.change.steps.driverexecutor import execute
from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.agent.change.steps.vgpusteps import Run
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.driverplanning import plan_return
from gpuvirt.model.change.plan import DriverPlan
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.change.steps import DriverStep, LoadModule, RollBack, Unbind
from gpuvirt.model.reasons import Reason, Seen, refusals

log = logging.getLogger(__name__)

Observe = Callable[[], UnitState]


def take(
    change_host: ChangeHost,
    state: UnitState,
    plan: DriverPlan,
    observe: Observe,
    run: Run,
    concerned: Iterable[PciAddress],
) -> tuple[Reason, ...]:
    """Take the steps of a plan; return why that failed, and why the rollback failed.

    `observe` observes the unit before a rollback. `concerned` are the functions that have their desired drivers once
    the plan is done.
    """
    record = _record(change_host, state)
    try:
        record.begin(plan)
    except OSError as error:
        return (_unrecorded(change_host, plan, error),)
    touched: set[PciAddress] = set()

    def begin(step: DriverStep) -> None:
        if not isinstance(step, LoadModule):
            touched.add(step.address)
        _record_return(change_host, state, step)
        run.report(step)

    failed = _carry_out(change_host, state, plan, begin, run)
    if failed is None:
        try:
            record.settle(plan, concerned)
        except OSError as error:  # the drivers are as desired; the next attempt records that
            return (_unrecorded(change_host, plan, error),)
        return ()
    before = _to_put_back(state, touched, failed)
    reasons: tuple[Reason, ...] = ()
    if before:
        run.report(RollBack(plan.unit))
        reasons = _put_back(change_host, plan, before, observe, run)
    with _despite_errors():
        record.keep(plan, touched)
    return (failed.reason, *reasons)


def _record_return(change_host: ChangeHost, state: UnitState, step: DriverStep) -> None:
    """Record that a GPU leaves its VFIO driver, which has reset it if the kernel can reset it.

    vfio-pci resets a GPU when a VM closes it, and the lease of its group proves that no VM has it open. Without this
    record the last VM counts as the GPU's tenant, whose memory may still be there.
    """
    inventory = state.inventory
    if not isinstance(step, Unbind) or step.address not in inventory.gpus:
        return
    functions, boot_id = inventory.facts.functions, inventory.facts.platform.boot_id
    if functions[step.address].on_vfio:
        try:
            change_host.tenancies.update(lambda found: found.of_boot(boot_id).returned(functions, [step.address]))
        except OSError as error:
            log.warning(  # unknown: its last tenant stays recorded
                "%s: its last tenant counts as present: %s: %s", step.address, change_host.tenancies.path, error
            )


def settle(change_host: ChangeHost, state: UnitState, plan: DriverPlan, concerned: Iterable[PciAddress]) -> None:
    """Record that functions have their desired drivers, so that started changes of killed processes are done."""
    _record(change_host, state).settle(plan, concerned)


def _to_put_back(state: UnitState, touched: Iterable[PciAddress], failed: RefusedError) -> Mapping[PciAddress, bool]:
    """Return the functions that get their former driver back, with whether that is a VFIO driver.

    A function that had no driver is left out: its change stays recorded, and the next plan follows the desired state.
    """
    had = {address: state.inventory.facts.functions[address] for address in touched}
    before = {address: function.on_vfio for address, function in had.items() if not function.is_idle}
    if isinstance(failed, StalePlanError):
        return before
    # A GPU that leaves its VFIO driver is not bound to it again: the next change would fail in the same way.
    return {address: on_vfio for address, on_vfio in before.items() if not on_vfio}


def _carry_out(
    change_host: ChangeHost, state: UnitState, plan: DriverPlan, report: Callable[[DriverStep], None], run: Run
) -> RefusedError | None:
    try:
        execute(change_host.kernel, change_host.tools, state.inventory.facts.functions, plan, report, run.change)
    except RefusedError as error:
        return error
    return None


def _put_back(
    change_host: ChangeHost, plan: DriverPlan, before: Mapping[PciAddress, bool], observe: Observe, run: Run
) -> tuple[Reason, ...]:
    """Roll back the functions that a change has touched; `before` says which of them were on VFIO drivers."""
    run.change.roll_back()
    state = observe()
    state = replace(state, pods=run.change.allocations(state.pods))
    back = plan_return(state, plan.unit, before)
    if back.refusals or not back.steps:
        return back.refusals
    record = _record(change_host, state)
    with _despite_errors():
        record.begin(back)
    failed = _carry_out(change_host, state, back, run.report, run)
    if failed is None:
        with _despite_errors():
            record.settle(back)
        return ()
    return (failed.reason,)


def _unrecorded(change_host: ChangeHost, plan: DriverPlan, error: OSError) -> Reason:
    return refusals.failed("write the driver journal", plan.unit, Seen(str(change_host.original_drivers), str(error)))


@contextmanager
def _despite_errors() -> Iterator[None]:
    """Roll back even if the journal can't be written: it has had the change as started since before its first step.

    So the next agent, or the next change, completes or undoes steps that were not recorded as done.
    """
    try:
        yield
    except OSError as error:
        # unknown: the change stays recorded as started
        log.warning("the driver journal can't be written, so the change stays recorded as started: %s", error)


def _record(change_host: ChangeHost, state: UnitState) -> ChangeRecord:
    return ChangeRecord(
        change_host.kernel, change_host.original_drivers, state.inventory.facts.functions, state.journal
    )
