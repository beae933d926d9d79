"""The drivers that the modes of GPUs need, and the isolation units whose GPUs have other drivers."""

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
    DesiredMode.SHARED: DesiredDriver.NATIVE,
    DesiredMode.VGPU: DesiredDriver.NATIVE,
    DesiredMode.ON_DEMAND: DesiredDriver.NATIVE,
}


def driver_of(mode: str) -> DesiredDriver | None:
    """Return the driver that a mode needs; None for a mode that leaves the GPU's driver as it is."""
    return _DRIVERS.get(mode)


def drivers_of(modes: Modes, gpus: Iterable[PciAddress]) -> DesiredDrivers:
    """Return the desired driver of each GPU; GPUs whose mode needs none are left out."""
    desired = {gpu: modes.of(gpu) for gpu in gpus}
    return {gpu: _DRIVERS[mode] for gpu, mode in desired.items() if mode in _DRIVERS}


def unmet(inventory: Inventory, desired: DesiredDrivers, journal: DriverJournal) -> Mapping[UnitId, DesiredDrivers]:
    """Return the units in which a GPU does not have its desired driver, each with all desired drivers.

    This is cheaper than a plan. A unit needs one if a function of a GPU's slot has the other kind of driver, or if a
    change of it was started and has not ended.
    """
    units = {
        inventory.gpus[gpu].unit
        for gpu, driver in desired.items()
        if any(_is_elsewhere(inventory, address, driver, journal) for address in (gpu, *inventory.gpus[gpu].siblings))
    }
    return {
        unit: {gpu: driver for gpu, driver in desired.items() if inventory.gpus[gpu].unit == unit} for unit in units
    }


def interrupted(inventory: Inventory, desired: DesiredDrivers, journal: DriverJournal) -> DesiredDrivers:
    """Return the drivers of GPUs that have no desired driver and whose change was killed.

    Each GPU gets the driver that takes the fewest steps. A GPU on a VFIO driver keeps it. A GPU that had no driver
    before the change gets the driver of the change. Any other GPU returns to its native driver.
    """
    found: dict[PciAddress, DesiredDriver] = {}
    for address, gpu in inventory.gpus.items():
        changes = [journal.changes[member] for member in (address, *gpu.siblings) if member in journal.changes]
        if address in desired or not changes:
            continue
        had_none = gpu.function.driver is None and all(change.to_vfio and change.driver is None for change in changes)
        found[address] = DesiredDriver.PASSTHROUGH if gpu.function.on_vfio or had_none else DesiredDriver.NATIVE
    return found


def withdrawn(inventory: Inventory, desired: DesiredDrivers) -> frozenset[PciAddress]:
    """Return the functions that the agent no longer offers, since their GPU returns to its native driver."""
    return frozenset(
        address
        for gpu, driver in desired.items()
        if driver is DesiredDriver.NATIVE
        for address in (gpu, *inventory.gpus[gpu].siblings)
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
