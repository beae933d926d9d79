"""Decides how GPUs come to be as they are wanted: the plan of each unit, whose functions must be decided on together.

A GPU moves with the functions of its slot; bridges stay; anybody else in its IOMMU group stays too, and then the plan
is refused, unless the admin has listed that address. All functions are unbound before the first is probed: a native
driver gets none of a group that is still held, and a virtual machine none of a group that is half there.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from gpuvirt.facts.ids import IommuGroup, PciAddress, slot_of
from gpuvirt.facts.pci import FunctionKind, PciFunction, Unread
from gpuvirt.facts.snapshot import User
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.podallocations import unmapped_reasons
from gpuvirt.model.change.desired import DesiredDriver, DesiredDrivers
from gpuvirt.model.change.modalias import FALLBACK
from gpuvirt.model.change.nativedrivers import (
    HEADS,
    leftovers,
    native_driver,
    our_overrides,
    pinned_to_vfio,
    steps_to_native,
)
from gpuvirt.model.change.plan import DriverPlan
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.change.steps import (
    ClearOverride,
    DriverStep,
    LoadModule,
    Override,
    Probe,
    Unbind,
)
from gpuvirt.model.inventory.isolation import UnitId, spoilers
from gpuvirt.model.reasons import Reason, nativerefusals, refusals


def plan_units(seen: UnitState, desired: DesiredDrivers) -> tuple[DriverPlan, ...]:
    """Return a plan for each unit of which something is desired, in the order of their addresses."""
    units = {unit for unit, members in seen.inventory.units.items() if desired.keys() & set(members)}
    return tuple(plan_drivers(seen, unit, desired) for unit in sorted(units))


def plan_drivers(seen: UnitState, unit: UnitId, desired: DesiredDrivers) -> DriverPlan:
    """Return what is to be done to a unit, which may be nothing; only GPUs and NVSwitches can be wished for."""
    slots = {
        head: tuple(seen.inventory.slots[slot_of(head)])
        for head in seen.inventory.units[unit]
        if _function(seen, head).physfn is None and _function(seen, head).kind in HEADS
    }
    desired_drivers = {
        address: driver
        for gpu, members in slots.items()
        if (driver := desired.get(gpu)) is not None
        for address in members
        if _function(seen, address).kind is not FunctionKind.BRIDGE
    }
    desired_drivers |= dict.fromkeys(_also_moved(seen, desired_drivers), DesiredDriver.PASSTHROUGH)
    desired_drivers |= dict.fromkeys(_also_returned(seen, unit, desired_drivers, slots), DesiredDriver.NATIVE)
    to_vfio = [
        one
        for one in sorted(desired_drivers)
        if desired_drivers[one] is DesiredDriver.PASSTHROUGH and not _function(seen, one).on_vfio
    ]
    to_native = [
        one for one in sorted(desired_drivers) if desired_drivers[one] is DesiredDriver.NATIVE and _is_away(seen, one)
    ]
    by_hand = _probes_are_for_people(seen, unit)
    refused = tuple(dict.fromkeys(_refusals(seen, desired_drivers, to_vfio, to_native, by_hand=by_hand)))
    if refused:
        return DriverPlan(unit, refusals=refused)
    there = [
        one for one in sorted(desired_drivers) if desired_drivers[one] is DesiredDriver.NATIVE and one not in to_native
    ]
    return DriverPlan(
        unit,
        steps=(
            *leftovers(seen, there),
            *_steps_to_vfio(seen, to_vfio),
            *_steps_to_native(seen, to_native, probe=not by_hand),
        ),
        leases=_leases(seen, to_native),
        locks=tuple(one for one in to_vfio if _function(seen, one).driver == "nvidia"),
        notes=tuple(_notes(to_native)) if by_hand else (),
    )


def plan_return(seen: UnitState, unit: UnitId, before: Mapping[PciAddress, bool]) -> DriverPlan:
    """Return what puts back the functions that a change has touched, and no others.

    `before` says of each whether it was on a VFIO driver.
    """
    there = [one for one in sorted(before) if one in seen.inventory.facts.functions]
    to_vfio = [one for one in there if before[one] and not _function(seen, one).on_vfio]
    to_native = [one for one in there if not before[one] and _is_away(seen, one)]
    desired_drivers = {one: DesiredDriver.PASSTHROUGH if before[one] else DesiredDriver.NATIVE for one in there}
    by_hand = _probes_are_for_people(seen, unit)
    refused = tuple(dict.fromkeys(_refusals(seen, desired_drivers, to_vfio, to_native, by_hand=by_hand)))
    if refused:
        return DriverPlan(unit, refusals=refused)
    kept = {one: _function(seen, one).driver for one in there if one not in to_vfio and one not in to_native}
    overrides = {one: driver if before[one] and isinstance(driver, str) else None for one, driver in kept.items()}
    return DriverPlan(
        unit,
        steps=(
            *(
                ClearOverride(one, our_overrides(seen, one), required=False)
                if driver is None
                else Override(one, driver)
                for one, driver in overrides.items()
            ),
            *_steps_to_vfio(seen, to_vfio),
            *_steps_to_native(seen, to_native, probe=not by_hand),
        ),
        leases=_leases(seen, to_native),
        locks=tuple(one for one in to_vfio if _function(seen, one).driver == "nvidia"),
    )


def _leases(seen: UnitState, to_native: Iterable[PciAddress]) -> tuple[IommuGroup, ...]:
    held = {_function(seen, one).iommu_group for one in to_native if _function(seen, one).on_vfio}
    return tuple(sorted(group for group in held if isinstance(group, int)))


def _function(seen: UnitState, address: PciAddress) -> PciFunction:
    return seen.inventory.facts.functions[address]


def _is_away(seen: UnitState, address: PciAddress) -> bool:
    """Return whether a function is not with a native driver, where it was or could be: a GPU always could."""
    function = _function(seen, address)
    if function.kind in HEADS and function.physfn is None and function.is_idle:
        return True
    was_taken = address in seen.journal.drivers or address in seen.journal.changes
    return function.on_vfio or (function.driver is None and was_taken)


def _neighbours(seen: UnitState, addresses: Iterable[PciAddress]) -> set[PciAddress]:
    """Return the functions that share an IOMMU group with these, these included."""
    groups = {_function(seen, address).iommu_group for address in addresses}
    return {one for group in groups if isinstance(group, int) for one in seen.inventory.groups.get(group, ())}


def _also_moved(seen: UnitState, desired_drivers: DesiredDrivers) -> list[PciAddress]:
    """Return the functions of other slots that are in the way and that the admin lets move."""
    going = [one for one, driver in desired_drivers.items() if driver is DesiredDriver.PASSTHROUGH]
    others = sorted(_neighbours(seen, going) - desired_drivers.keys())
    return [one.address for one in spoilers(seen.inventory.facts.functions, others) if one.address in seen.allowed]


def _also_returned(
    seen: UnitState, unit: UnitId, desired_drivers: DesiredDrivers, slots: Mapping[PciAddress, tuple[PciAddress, ...]]
) -> list[PciAddress]:
    """Return the functions of other slots that were moved along, when the last GPU of their group goes back."""
    ours = {address for members in slots.values() for address in members}
    returned = {one for one, driver in desired_drivers.items() if driver is DesiredDriver.NATIVE}
    found: list[PciAddress] = []
    for one in seen.inventory.units.get(unit, ()):
        if one in ours or one not in seen.journal.drivers or not _is_away(seen, one):
            continue
        cards = _neighbours(seen, [one]) & ours
        if cards and cards <= returned:
            found.append(one)
    return found


def _refusals(
    seen: UnitState,
    desired_drivers: DesiredDrivers,
    to_vfio: list[PciAddress],
    to_native: list[PciAddress],
    *,
    by_hand: bool,
) -> Iterator[Reason]:
    for address in to_vfio:
        yield from _why_not_to_vfio(seen, address)
    staying = sorted(_neighbours(seen, to_vfio) - desired_drivers.keys())
    for other in spoilers(seen.inventory.facts.functions, staying):
        yield refusals.foreign(other, [one for one in to_vfio if _same_group(seen, one, other.address)])
    for address in to_vfio:
        for neighbour in sorted(_neighbours(seen, [address]) & desired_drivers.keys()):
            if desired_drivers[neighbour] is DesiredDriver.NATIVE:
                yield refusals.torn(address, neighbour)
    for address in to_native:
        yield from _why_not_to_native(seen, desired_drivers, address)
        if by_hand and _function(seen, address).driver is None and address not in seen.journal.overrides:
            yield nativerefusals.probe_by_hand(address)
        elif not by_hand and (reason := native_driver(seen, address).refusal) is not None:
            yield reason


def _why_not_to_vfio(seen: UnitState, address: PciAddress) -> Iterator[Reason]:
    function = _function(seen, address)
    hidden = [one for one in function.unread if one.path.endswith("/vfio-dev")]
    for attribute in (function.driver, function.iommu_group, *hidden):
        if isinstance(attribute, Unread):
            yield refusals.unread(address, attribute)
    if function.iommu_group is None:
        yield refusals.no_group(address)
    if function.fell_off_bus:
        yield refusals.fell_off_bus(address, address)
    if (use := seen.host_uses.get(address)) is not None:
        yield refusals.host_needs(address, use)
    if function.driver is None and (leaving := _vfio_users(seen, function)):
        yield refusals.unbind_pending(address, leaving, certain=False)
    yield from _parts(seen, function)
    yield from _allocated(seen, address)
    yield from unmapped_reasons(function, seen.unmapped)
    if not seen.forced:
        yield from _native_users(seen, function)


def _parts(seen: UnitState, function: PciFunction) -> Iterator[Reason]:
    """Yield what would go with a function's native driver."""
    gpu = seen.inventory.gpus.get(function.address)
    if gpu is not None and gpu.vgpu_host is not None and gpu.vgpu_host.live:
        yield refusals.carries_vgpus(function.address, len(gpu.vgpu_host.live))
    elif function.virtfns:
        yield refusals.vfs_enabled(function)


def _native_users(seen: UnitState, function: PciFunction) -> Iterator[Reason]:
    if function.driver is not None and seen.native_users is None:
        yield refusals.users_unseen(function.address)
    if users := refusals.serious((seen.native_users or {}).get(function.address, ())):
        yield refusals.in_use(function.address, users, forcible=True)


def _allocated(seen: UnitState, address: PciAddress) -> Iterator[Reason]:
    """Yield the pods that a function is allocated to, or why that is unknown of one that would lose its driver."""
    known = seen.pods.known if isinstance(seen.pods, Unknown) else seen.pods
    if pods := known.get(address, ()):
        yield refusals.held(address, pods)
    if isinstance(seen.pods, Unknown) and _function(seen, address).driver is not None:
        reason = seen.pods.reason
        yield refusals.allocations_unknown(address) if reason is None else replace(reason, subject=address)


def _why_not_to_native(seen: UnitState, desired_drivers: DesiredDrivers, address: PciAddress) -> Iterator[Reason]:
    function = _function(seen, address)
    if function.on_vfio and function.virtfns:  # they go with it, whoever has them
        yield refusals.vfs_enabled(function)
    yield from _why_no_native_driver(seen, function)
    if users := _vfio_users(seen, function):
        yield refusals.in_use(address, users, forcible=False)
    for member in sorted({address, *_neighbours(seen, [address])}):  # the lease takes the whole group
        if _function(seen, member).on_vfio or member == address:
            yield from _allocated(seen, member)
    for other in sorted(_neighbours(seen, [address]) & seen.inventory.gpus.keys()):
        if _function(seen, other).on_vfio and desired_drivers.get(other) is not DesiredDriver.NATIVE:
            yield refusals.torn(other, address)


def _why_no_native_driver(seen: UnitState, function: PciFunction) -> Iterator[Reason]:
    """Yield why a native driver must not, or can't, have a function."""
    if function.fell_off_bus:
        yield refusals.fell_off_bus(function.address, function.address)
    if (pinned := pinned_to_vfio(seen, function.address)) is not None:
        yield nativerefusals.pinned(function.address, pinned)
    for vf in function.virtfns:  # the driver may reset them
        if vf in seen.inventory.facts.functions and (users := _vfio_users(seen, _function(seen, vf))):
            yield refusals.in_use(vf, users, forcible=False)


def _vfio_users(seen: UnitState, function: PciFunction) -> tuple[User, ...]:
    facts = seen.inventory.facts
    group = function.iommu_group
    users = (facts.users or {}).get(group, ()) if isinstance(group, int) else ()
    return users + (facts.users_of_lost_nodes if function.driver is None else ())


def _same_group(seen: UnitState, one: PciAddress, other: PciAddress) -> bool:
    return _function(seen, one).iommu_group == _function(seen, other).iommu_group


def _steps_to_vfio(seen: UnitState, addresses: list[PciAddress]) -> Iterator[DriverStep]:
    drivers = {address: seen.best_drivers.get(address, FALLBACK) for address in addresses}
    yield from (LoadModule(driver) for driver in sorted(set(drivers.values())) if driver not in seen.drivers)
    yield from (Override(address, driver) for address, driver in drivers.items())
    yield from _unbinds(seen, addresses)
    yield from (Probe(address, driver) for address, driver in drivers.items())


def _steps_to_native(seen: UnitState, addresses: list[PciAddress], *, probe: bool) -> Iterator[DriverStep]:
    return steps_to_native(seen, addresses, _unbinds(seen, addresses), probe=probe)


def _unbinds(seen: UnitState, addresses: Iterable[PciAddress]) -> Iterator[DriverStep]:
    for address in addresses:
        driver = _function(seen, address).driver
        if isinstance(driver, str):
            yield Unbind(address, driver)


def _probes_are_for_people(seen: UnitState, unit: UnitId) -> bool:
    """Return whether giving a GPU back to its driver can hang: it can where GPUs are joined by NVSwitches."""
    joined = any(one.kind is FunctionKind.NVSWITCH for one in seen.inventory.facts.functions.values())
    return joined and any(gpu.unit == unit for gpu in seen.inventory.gpus.values())


def _notes(addresses: Iterable[PciAddress]) -> Iterator[str]:
    for address in addresses:
        yield (
            f"{address}: on a host with NVSwitches its driver may hang while it takes one GPU alone; when all are free,"
            f" by hand: {nativerefusals.probe_command(address)}"
        )
