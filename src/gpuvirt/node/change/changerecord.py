"""Keeps the driver journal of one change: what is to be done before it is done, what is left of it afterwards."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from gpuvirt.facts.ids import BootId, PciAddress
from gpuvirt.facts.pci import STUB_DRIVERS, PciFunction
from gpuvirt.hardware import modules
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.model.change.driverjournal import DriverJournal, StartedChange
from gpuvirt.model.change.plan import DriverPlan
from gpuvirt.model.change.steps import (
    ClearOverride,
    LoadModule,
    Override,
    Probe,
    Return,
    Unbind,
)
from gpuvirt.node.store import originaldrivers

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChangeRecord:
    """The record of one change."""

    kernel: Kernel
    path: Path
    """Of the journal."""
    functions: Mapping[PciAddress, PciFunction]
    """As they were seen before the change."""
    before: DriverJournal
    """What was recorded before the change."""

    def begin(self, plan: DriverPlan) -> None:
        """Record what the plan is about to do."""
        to_vfio = {step.address: step.driver for step in plan.steps if isinstance(step, Override)}
        moved = {step.address for step in plan.steps if isinstance(step, Override | Unbind | Probe | Return)}
        has = {one: driver for one in to_vfio if (driver := self._native_driver(one)) is not None}
        started = {one: StartedChange(one in to_vfio, self._driver(one)) for one in moved}
        # A function that a killed change has left without a driver had the one of that record.
        started |= {one: replace(started[one], driver=self.before.changes[one].driver) for one in self._left(moved)}
        self._update(
            lambda journal: replace(
                journal,
                drivers={**journal.drivers, **has},
                overrides={**journal.overrides, **to_vfio},
                changes={**journal.changes, **started},
            )
        )

    def settle(self, plan: DriverPlan, concerned: Iterable[PciAddress] = ()) -> None:
        """Record that the plan is done, and that what was begun at those of the `concerned` that have a driver is."""
        done = {step.address for step in plan.steps if not isinstance(step, LoadModule)}
        done |= {one for one in concerned if self._has_driver(one)}
        cleared = {step.address for step in plan.steps if isinstance(step, ClearOverride)}
        returned = {step.address for step in plan.steps if isinstance(step, Return)}
        returned |= {one for one in cleared if self._native_driver(one) is not None}
        self._update(
            lambda journal: replace(
                journal,
                drivers=_without(journal.drivers, returned),
                overrides=_without(journal.overrides, cleared),
                changes=_without(journal.changes, done),
            )
        )

    def keep(self, plan: DriverPlan, touched: Collection[PciAddress]) -> None:
        """Record that the plan has failed: untouched functions are as before, those without a driver stay open."""
        untouched = {step.address for step in plan.steps if not isinstance(step, LoadModule)} - set(touched)
        ended = {one for one in touched if one not in self.before.changes and self._has_driver(one)}
        self._update(
            lambda journal: replace(
                journal,
                overrides=_restored(journal.overrides, self.before.overrides, untouched),
                changes=_without(_restored(journal.changes, self.before.changes, untouched), ended),
            )
        )

    def _update(self, change: Callable[[DriverJournal], DriverJournal]) -> None:
        boot_id = self.before.boot_id
        originaldrivers.update(self.path, lambda journal: change(journal.of_boot(boot_id)))

    def _driver(self, address: PciAddress) -> str | None:
        driver = self.functions[address].driver
        return driver if isinstance(driver, str) else None

    def _native_driver(self, address: PciAddress) -> str | None:
        function = self.functions[address]
        return None if function.on_vfio or function.is_idle else self._driver(address)

    def _left(self, addresses: Iterable[PciAddress]) -> Iterator[PciAddress]:
        return (one for one in addresses if one in self.before.changes and self._driver(one) is None)

    def _has_driver(self, address: PciAddress) -> bool:
        return modules.driver_of(self.kernel, address) not in {None, *STUB_DRIVERS}


def _without(entries: Mapping[PciAddress, T], gone: Collection[PciAddress]) -> dict[PciAddress, T]:
    return {address: entry for address, entry in entries.items() if address not in gone}


def _restored(
    entries: Mapping[PciAddress, T], before: Mapping[PciAddress, T], addresses: Iterable[PciAddress]
) -> dict[PciAddress, T]:
    again = set(addresses)
    return {**_without(entries, again), **{one: entry for one, entry in before.items() if one in again}}


@contextmanager
def recorded_unbind(kernel: Kernel, path: Path, address: PciAddress, boot_id: BootId | None) -> Iterator[None]:
    """Have it recorded that a program takes a function from its native driver for a moment, until it has one again."""
    driver = modules.driver_of(kernel, address)
    had = driver if isinstance(driver, str) else None

    def begun(journal: DriverJournal) -> DriverJournal:
        journal = journal.of_boot(boot_id)
        drivers = {**journal.drivers, address: had} if had is not None else journal.drivers
        return replace(journal, drivers=drivers, changes={**journal.changes, address: StartedChange(False, had)})

    def ended(journal: DriverJournal) -> DriverJournal:
        gone = {address} if modules.driver_of(kernel, address) not in {None, *STUB_DRIVERS} else set()
        return replace(journal, drivers=_without(journal.drivers, gone), changes=_without(journal.changes, gone))

    originaldrivers.update(path, begun)
    try:
        yield
    finally:
        originaldrivers.update(path, ended)
