"""Decides which native driver a function goes back to, whether it must be loaded first, and what of ours is in its way.

The recorded driver is the first choice, another that modules.alias names for the function the second. Modules are
loaded before anything is unbound, so that a function is never taken from a driver without another that could have it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA, VFIO_DRIVERS, FunctionKind, PciFunction
from gpuvirt.model.change.modalias import modalias
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.change.steps import (
    ClearOverride,
    DriverStep,
    LoadModule,
    Return,
    Unlock,
)
from gpuvirt.model.reasons import Reason, nativerefusals

HEADS = frozenset({FunctionKind.GPU, FunctionKind.NVSWITCH})


@dataclass(frozen=True, slots=True)
class NativeDriver:
    """Where a function goes."""

    drivers: tuple[str, ...] = ()
    """The drivers that may have it, the best first; none: the kernel knows."""
    load: LoadModule | None = None
    required: bool = True
    refusal: Reason | None = None
    """Why no driver could have it."""


def native_driver(seen: UnitState, address: PciAddress) -> NativeDriver:
    """Return which driver a function goes back to; a GPU's other functions may stay without one."""
    function = seen.inventory.facts.functions[address]
    recorded = seen.journal.drivers.get(address)
    known = seen.native_modules.get(address)
    drivers = tuple(dict.fromkeys((*((recorded,) if recorded else ()), *(known or ()))))
    if recorded is not None and is_loaded(seen.drivers, recorded):
        return NativeDriver(drivers)
    if recorded is not None and recorded not in seen.missing_modules:
        return NativeDriver(drivers, LoadModule(recorded, may_need_device=True))
    if loaded := tuple(one for one in known or () if is_loaded(seen.drivers, one)):
        return NativeDriver(loaded)
    alias = alias_of(function)
    if known and alias not in seen.missing_modules:
        return NativeDriver(known, LoadModule(alias, known, may_need_device=True))
    is_unknown = known is None and recorded is None
    comes_later = seen.driver_may_come and function.id.vendor == NVIDIA
    if is_unknown or comes_later or function.kind not in HEADS:
        return NativeDriver(required=function.kind in HEADS)
    said = seen.missing_modules.get(recorded or alias)
    return NativeDriver(refusal=nativerefusals.no_native_driver(address, recorded, known, said))


def alias_of(function: PciFunction) -> str:
    """Return the name by which modprobe finds a function's modules."""
    return f"pci:{modalias(function)}"


def is_loaded(drivers: frozenset[str], driver: str) -> bool:
    """Return whether a driver is among those that are loaded: modules are named with `_`, drivers at times with `-`."""
    return bool({driver, driver.replace("_", "-")} & drivers)


def our_overrides(seen: UnitState, address: PciAddress) -> frozenset[str]:
    """Return the values of `driver_override` that may be taken back: gpuvirt's own.

    Of a function that goes from a VFIO driver to its native one these are all that keep it on VFIO. driverctl's stay.
    """
    function, ours = seen.inventory.facts.functions[address], seen.journal.overrides.get(address)
    if address in seen.pinned:
        return frozenset()
    found = {ours} if ours is not None else set[str]()
    if ours in VFIO_DRIVERS or function.on_vfio or seen.journal.damaged:
        found |= VFIO_DRIVERS | {seen.best_drivers.get(address, "vfio-pci")}
    if function.on_vfio and isinstance(function.driver, str):
        found.add(function.driver)
    return frozenset({*found, *(one.replace("_", "-") for one in found)})


def pinned_to_vfio(seen: UnitState, address: PciAddress) -> str | None:
    """Return the VFIO driver on which driverctl keeps a function."""
    driver = seen.pinned.get(address)
    vfio = VFIO_DRIVERS | {seen.best_drivers.get(address, "vfio-pci"), seen.inventory.facts.functions[address].driver}
    return driver if driver in vfio else None


def leftovers(seen: UnitState, addresses: Iterable[PciAddress]) -> Iterator[DriverStep]:
    """Yield the steps that take back what changes that were killed have left at functions with a native driver."""
    for address in addresses:
        function = seen.inventory.facts.functions[address]
        if address in seen.journal.overrides:
            desired = (function.driver,) if isinstance(function.driver, str) else ()
            yield ClearOverride(address, our_overrides(seen, address), desired, required=False)
        if address in seen.journal.changes and function.driver == "nvidia":
            yield Unlock(address)


def steps_to_native(
    seen: UnitState, addresses: list[PciAddress], unbinds: Iterable[DriverStep], *, probe: bool
) -> Iterator[DriverStep]:
    """Yield the steps that give functions to their native drivers; without `probe` they are left without one."""
    found = {address: native_driver(seen, address) for address in addresses}
    if probe:
        yield from dict.fromkeys(one.load for one in found.values() if one.load is not None)
    for address, native in found.items():
        yield ClearOverride(address, our_overrides(seen, address), native.drivers)
    yield from unbinds
    if probe:
        for address, native in found.items():
            yield Return(address, native.drivers, native.required)
