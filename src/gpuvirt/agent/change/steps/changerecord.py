"""Records one driver change in the driver journal: its intent before the change, and the result after it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.store import hostfiles
from gpuvirt.facts.ids import BootId, PciAddress
from gpuvirt.facts.pci import STUB_DRIVERS, PciFunction
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions import modules
from gpuvirt.model.change.plan import DriverPlan
from gpuvirt.model.change.state import DriverJournal, StartedChange
from gpuvirt.model.change.steps import (
    ClearOverride,
    LoadModule,
    Override,
    Probe,
    Return,
    Unbind,
)

T = TypeVar("T")


class ChangeRecord(msgspec.Struct, frozen=True):
    """One driver change, as the driver journal records it."""

    kernel: Kernel
    path: Path
    """The path of the driver journal."""
    functions: Mapping[PciAddress, PciFunction]
    """The functions as observed before the change."""
    before: DriverJournal
    """The driver journal before the change."""

    def begin(self, plan: DriverPlan) -> None:
        """Record the driver change that the plan is about to make."""
        to_vfio = {step.address: step.driver for step in plan.steps if isinstance(step, Override)}
        moved = {step.address for step in plan.steps if isinstance(step, Override | Unbind | Probe | Return)}
        has = {address: driver for address in to_vfio if (driver := self._native_driver(address)) is not None}
        started = {address: StartedChange(address in to_vfio, self._driver(address)) for address in moved}
        # A killed change has left these functions without a driver; the journal has the driver they had before it.
        for address in self._driverless(moved):
            started[address] = replace(started[address], driver=self.before.changes[address].driver)
        self._update(
            lambda journal: replace(
                journal,
                drivers={**journal.drivers, **has},
                overrides={**journal.overrides, **to_vfio},
                changes={**journal.changes, **started},
            )
        )

    def settle(self, plan: DriverPlan, concerned: Iterable[PciAddress] = ()) -> None:
        """Record that the plan is done. Started changes of `concerned` functions that have a driver are done, too."""
        done = {step.address for step in plan.steps if not isinstance(step, LoadModule)}
        done |= {address for address in concerned if self._has_driver(address)}
        cleared = {step.address for step in plan.steps if isinstance(step, ClearOverride)}
        returned = {step.address for step in plan.steps if isinstance(step, Return)}
        returned |= {address for address in cleared if self._native_driver(address) is not None}
        self._update(
            lambda journal: replace(
                journal,
                drivers=_without(journal.drivers, returned),
                overrides=_without(journal.overrides, cleared),
                changes=_without(journal.changes, done),
            )
        )

    def keep(self, plan: DriverPlan, touched: Collection[PciAddress]) -> None:
        """Record that the plan has failed.

        Untouched functions get back their earlier record. The changes of functions without a driver stay started.
        """
        untouched = {step.address for step in plan.steps if not isinstance(step, LoadModule)} - set(touched)
        ended = {address for address in touched if address not in self.before.changes and self._has_driver(address)}
        self._update(
            lambda journal: replace(
                journal,
                overrides=_restored(journal.overrides, self.before.overrides, untouched),
                changes=_without(_restored(journal.changes, self.before.changes, untouched), ended),
            )
        )

    def _update(self, change: Callable[[DriverJournal], DriverJournal]) -> None:
        boot_id = self.before.boot_id
        hostfiles.journal(self.path).update(lambda journal: change(journal.of_boot(boot_id)))

    def _driver(self, address: PciAddress) -> str | None:
        driver = self.functions[address].driver
        return driver if isinstance(driver, str) else None

    def _native_driver(self, address: PciAddress) -> str | None:
        function = self.functions[address]
        return None if function.on_vfio or function.is_idle else self._driver(address)

    def _driverless(self, addresses: Iterable[PciAddress]) -> Iterator[PciAddress]:
        return (address for address in addresses if address in self.before.changes and self._driver(address) is None)

    def _has_driver(self, address: PciAddress) -> bool:
        return modules.driver_of(self.kernel, address) not in {None, *STUB_DRIVERS}


def _without(entries: Mapping[PciAddress, T], gone: Collection[PciAddress]) -> dict[PciAddress, T]:
    return {address: entry for address, entry in entries.items() if address not in gone}


def _restored(
    entries: Mapping[PciAddress, T], before: Mapping[PciAddress, T], addresses: Iterable[PciAddress]
) -> dict[PciAddress, T]:
    again = set(addresses)
    return {**_without(entries, again), **{address: entry for address, entry in before.items() if address in again}}


@contextmanager
def recorded_unbind(kernel: Kernel, path: Path, address: PciAddress, boot_id: BootId | None) -> Iterator[None]:
    """Keep a started change in the journal while a program takes a function from its native driver for a moment."""
    driver = modules.driver_of(kernel, address)
    had = driver if isinstance(driver, str) else None

    def begun(journal: DriverJournal) -> DriverJournal:
        journal = journal.of_boot(boot_id)
        drivers = {**journal.drivers, address: had} if had is not None else journal.drivers
        return replace(journal, drivers=drivers, changes={**journal.changes, address: StartedChange(False, had)})

    def ended(journal: DriverJournal) -> DriverJournal:
        gone = {address} if modules.driver_of(kernel, address) not in {None, *STUB_DRIVERS} else set()
        return replace(journal, drivers=_without(journal.drivers, gone), changes=_without(journal.changes, gone))

    hostfiles.journal(path).update(begun)
    try:
        yield
    finally:
        hostfiles.journal(path).update(ended)
