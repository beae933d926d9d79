"""Which drivers the modes of GPUs need, and where GPUs have others."""

from collections.abc import Iterable, Mapping

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import FunctionKind
from gpuvirt.model.change.desired import DesiredDriver, DesiredDrivers
from gpuvirt.model.change.driverjournal import DriverJournal
from gpuvirt.model.desired.gpumodes import DesiredMode, Modes
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import UnitId

_DRIVERS: Mapping[str, DesiredDriver] = {
    DesiredMode.PASSTHROUGH: DesiredDriver.PASSTHROUGH,
    DesiredMode.CONTAINER: DesiredDriver.NATIVE,
    DesiredMode.VGPU: DesiredDriver.NATIVE,
}


def driver_of(mode: str) -> DesiredDriver | None:
    """Return which driver a mode needs, None for a mode that leaves a GPU alone."""
    return _DRIVERS.get(mode)


def drivers_of(modes: Modes, gpus: Iterable[PciAddress]) -> DesiredDrivers:
    """Return the desired driver of each GPU; a GPU without one is left alone."""
    desired = {gpu: modes.of(gpu) for gpu in gpus}
    return {gpu: _DRIVERS[mode] for gpu, mode in desired.items() if mode in _DRIVERS}


def unmet(inventory: Inventory, desired: DesiredDrivers, journal: DriverJournal) -> Mapping[UnitId, DesiredDrivers]:
    """Return the units in which a GPU does not have its desired driver, each with all desired drivers.

    It is cheap, and tells whether a plan is worth making: a function of a slot is on the wrong side, or a change of it
    was started and has not ended.
    """
    units = {
        inventory.gpus[gpu].unit
        for gpu, driver in desired.items()
        if any(_is_elsewhere(inventory, one, driver, journal) for one in (gpu, *inventory.gpus[gpu].siblings))
    }
    return {
        unit: {gpu: driver for gpu, driver in desired.items() if inventory.gpus[gpu].unit == unit} for unit in units
    }


def interrupted(inventory: Inventory, desired: DesiredDrivers, journal: DriverJournal) -> DesiredDrivers:
    """Return where GPUs go that a change which was killed has left half done, and of which nothing is wished.

    Whatever needs the fewest steps: a GPU that a VFIO driver has keeps it, one that had no driver gets the one that it
    was to get, any other goes back to its native driver.
    """
    found: dict[PciAddress, DesiredDriver] = {}
    for address, gpu in inventory.gpus.items():
        changes = [journal.changes[one] for one in (address, *gpu.siblings) if one in journal.changes]
        if address in desired or not changes:
            continue
        had_none = gpu.function.driver is None and all(one.to_vfio and one.driver is None for one in changes)
        found[address] = DesiredDriver.PASSTHROUGH if gpu.function.on_vfio or had_none else DesiredDriver.NATIVE
    return found


def withdrawn(inventory: Inventory, desired: DesiredDrivers) -> frozenset[PciAddress]:
    """Return the functions that are offered no more, since their GPU is to go back to the host."""
    return frozenset(
        one
        for gpu, driver in desired.items()
        if driver is DesiredDriver.NATIVE
        for one in (gpu, *inventory.gpus[gpu].siblings)
    )


def _is_elsewhere(inventory: Inventory, address: PciAddress, driver: DesiredDriver, journal: DriverJournal) -> bool:
    function = inventory.facts.functions[address]
    if function.kind is FunctionKind.BRIDGE:
        return False
    if address in journal.changes:
        return True
    if driver is DesiredDriver.PASSTHROUGH:
        return not function.on_vfio
    if address in inventory.gpus and function.is_idle:
        return True
    return function.on_vfio or address in journal.overrides or (function.driver is None and address in journal.drivers)
