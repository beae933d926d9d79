"""A driver change that can't be recorded does not begin, and one that can't be rolled back reports both failures."""

import errno
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.agent.change.changehost import Inputs
from gpuvirt.agent.change.steps.changerecord import ChangeRecord
from gpuvirt.agent.store import hostfiles
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.sysfs import DRIVERS_PROBE, driver_path
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.change.plan import DriverPlan
from gpuvirt.model.change.state import Account, DriverJournal, StartedChange
from gpuvirt.model.change.steps import ClearOverride, Probe, RollBack, Step
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import HostPath
from tests.agent.change.changes import NOBODY, change_drivers, driver_state
from tests.agent.change.hostunit import A10, HostUnit
from tests.agent.node.diskfaults import failing

GPU: PciAddress = A10


@pytest.fixture
def unit(tmp_path: Path) -> HostUnit:
    return HostUnit("2xA10-vgpu", GPU, tmp_path)


def refuse_writes(unit: HostUnit, *paths: str) -> None:
    for path in paths:
        unit.kernel.faults.refuse(HostPath(path), errno.EIO)


def to_passthrough(unit: HostUnit, known: Inputs = NOBODY) -> tuple[Reason, ...]:
    return change_drivers(unit.change_host, unit.id, {GPU: DesiredDriver.PASSTHROUGH}, known, unit.taken.append)


@pytest.mark.parametrize(
    ("number", "error"), [(errno.EROFS, "Read-only file system"), (errno.ENOSPC, "No space left on device")]
)
def test_a_change_that_cannot_be_recorded_does_not_begin(
    unit: HostUnit, tmp_path: Path, number: int, error: str
) -> None:
    journal = unit.change_host.original_drivers
    with failing(tmp_path, number) as disk:
        disk.only = journal.name
        (reason,) = to_passthrough(unit)
    assert (reason.code, "driver journal" in reason.text) == (ReasonCode.STEP_FAILED, True)
    assert [(seen.path, seen.value.startswith(error)) for seen in reason.places] == [(str(journal), True)]
    folder = journal.parent
    assert reason.fix == f"free space on the file system of {folder} (df {folder}), or mount it writable"
    assert (unit.kernel.writes, unit.taken) == ([], [])
    assert to_passthrough(unit) == ()


def test_a_rollback_that_is_refused_is_reported(unit: HostUnit) -> None:
    """The GPU stays without a driver, and its change stays recorded as started."""
    refuse_writes(unit, DRIVERS_PROBE)

    def report(step: Step | RollBack) -> None:
        if isinstance(step, Probe):
            unit.kernel.fall_off_bus(GPU)

    reasons = change_drivers(unit.change_host, unit.id, {GPU: DesiredDriver.PASSTHROUGH}, NOBODY, report)
    assert [reason.code for reason in reasons] == [ReasonCode.STEP_FAILED, ReasonCode.FELL_OFF_BUS]
    assert unit.driver is None
    assert GPU in hostfiles.journal(unit.change_host.original_drivers).value.changes


def test_a_rollback_that_fails_is_reported(unit: HostUnit) -> None:
    refuse_writes(unit, DRIVERS_PROBE, driver_path("nvidia", "bind"))
    reasons = to_passthrough(unit)
    assert [reason.code for reason in reasons] == [ReasonCode.STEP_FAILED] * 2
    assert len({reason.text for reason in reasons}) == 2
    assert unit.driver is None
    assert GPU in hostfiles.journal(unit.change_host.original_drivers).value.changes


def test_a_rollback_goes_on_while_the_allocations_are_unknown(unit: HostUnit) -> None:
    """Without its driver the GPU is of no use to a pod."""
    refuse_writes(unit, DRIVERS_PROBE)

    def account(inventory: Inventory) -> Account:
        known = NOBODY.account(inventory)
        begun = any(isinstance(step, RollBack) for step in unit.taken)
        return Account(Unknown(), known.allocations, known.holdings) if begun else known

    (reason,) = to_passthrough(unit, Inputs(account))
    assert reason.code is ReasonCode.STEP_FAILED
    assert unit.driver == "nvidia"


def test_a_gpu_that_keeps_its_vfio_driver_has_no_started_change(unit: HostUnit) -> None:
    assert to_passthrough(unit) == ()
    refuse_writes(unit, driver_path("vfio-pci", "unbind"))
    (reason,) = change_drivers(unit.change_host, unit.id, {GPU: DesiredDriver.NATIVE})
    assert (reason.code, unit.driver) == (ReasonCode.STEP_FAILED, "vfio-pci")
    assert hostfiles.journal(unit.change_host.original_drivers).value.changes == {}


def test_a_gpu_that_had_no_driver_is_not_rolled_back(unit: HostUnit) -> None:
    unit.kernel.rebind(GPU, None)
    refuse_writes(unit, DRIVERS_PROBE)
    (reason,) = to_passthrough(unit)
    assert (reason.code, unit.driver) == (ReasonCode.STEP_FAILED, None)
    assert not any(isinstance(step, RollBack) for step in unit.taken)
    assert GPU in hostfiles.journal(unit.change_host.original_drivers).value.changes


def recorded(unit: HostUnit) -> tuple[ChangeRecord, DriverJournal]:
    """Return the record of a change, and a journal with the GPU's driver and a started change of it."""
    state = driver_state(unit.change_host)
    journal = DriverJournal({GPU: "nvidia"}, {}, {GPU: StartedChange(True, "nvidia")}, state.journal.boot_id)
    path = unit.change_host.original_drivers
    hostfiles.journal(path).update(lambda _: journal)
    return ChangeRecord(unit.kernel, path, state.inventory.facts.functions, journal), journal


def test_a_started_change_of_a_function_without_a_driver_stays_recorded(unit: HostUnit) -> None:
    record, journal = recorded(unit)
    unit.kernel.rebind(GPU, None)
    record.settle(DriverPlan(unit.id), [GPU])
    assert hostfiles.journal(record.path).value == journal
    unit.kernel.rebind(GPU, "vfio-pci")
    record.settle(DriverPlan(unit.id), [GPU])
    assert hostfiles.journal(record.path).value == replace(journal, changes={})


def test_the_native_driver_of_a_function_on_vfio_stays_recorded_without_its_override(unit: HostUnit) -> None:
    unit.kernel.rebind(GPU, "vfio-pci")
    record, journal = recorded(unit)
    record.settle(DriverPlan(unit.id, steps=(ClearOverride(GPU, ours=frozenset({"vfio-pci"})),)))
    assert hostfiles.journal(record.path).value.drivers == journal.drivers


def test_a_failed_change_does_not_record_again_what_other_units_have_finished(unit: HostUnit) -> None:
    record, _ = recorded(unit)
    hostfiles.journal(record.path).update(lambda journal: replace(journal, changes={}))
    record.keep(DriverPlan(unit.id), ())
    assert hostfiles.journal(record.path).value.changes == {}
