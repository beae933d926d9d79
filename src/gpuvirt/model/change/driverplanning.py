"""Plans the drivers of the GPUs of one isolation unit.

A GPU changes its driver together with its sibling functions; VFs that are parts of a GPU change theirs alone. Bridges
stay. Functions of other slots in its IOMMU group stay too, and the plan is then refused, unless the admin has listed
these functions (`--also`). All functions are unbound before the first probe, so that no native driver takes a function
of a group that is still on VFIO, and no VM gets a group of which only a part is on VFIO.
"""

from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from gpuvirt.facts.ids import IommuGroup, PciAddress, slot_of
from gpuvirt.facts.pci import NVIDIA, FunctionKind
from gpuvirt.model.change.desired import DesiredDriver, DesiredDrivers
from gpuvirt.model.change.driverrefusals import driver_refusals
from gpuvirt.model.change.modalias import FALLBACK
from gpuvirt.model.change.nativedrivers import HEADS, is_head, leftovers, our_overrides, steps_to_native
from gpuvirt.model.change.plan import DriverPlan
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.change.steps import ClearOverride, DriverStep, LoadModule, Override, Probe, Unbind
from gpuvirt.model.inventory.isolation import UnitId, group_blockers
from gpuvirt.model.reasons import Reason, notoffered, refusals


def plan_units(state: UnitState, desired: DesiredDrivers) -> tuple[DriverPlan, ...]:
    """Return a plan for each unit that has a function with a desired driver, in the order of their addresses."""
    units = {unit for unit, members in state.inventory.units.items() if desired.keys() & set(members)}
    return tuple(plan_drivers(state, unit, desired) for unit in sorted(units))


def plan_drivers(state: UnitState, unit: UnitId, desired: DesiredDrivers) -> DriverPlan:
    """Return the plan of a unit, which may be empty. Desired drivers of GPUs, their parts and NVSwitches count."""
    slots = {
        head: (head,) if state.function(head).is_gpu_part else tuple(state.inventory.slots[slot_of(head)])
        for head in state.inventory.units[unit]
        if is_head(state.function(head))
    }
    desired_drivers = {
        address: driver
        for gpu, members in slots.items()
        if (driver := desired.get(gpu)) is not None
        for address in members
        if state.function(address).kind is not FunctionKind.BRIDGE
    }
    desired_drivers |= dict.fromkeys(_also_moved(state, desired_drivers), DesiredDriver.PASSTHROUGH)
    desired_drivers |= dict.fromkeys(_also_returned(state, unit, desired_drivers, slots), DesiredDriver.NATIVE)
    passthrough = [address for address in sorted(desired_drivers) if _is_passthrough(desired_drivers[address])]
    native = [address for address in sorted(desired_drivers) if not _is_passthrough(desired_drivers[address])]
    to_vfio = [address for address in passthrough if not state.function(address).on_vfio]
    to_native = [address for address in native if _lacks_native_driver(state, address)]
    undone = leftovers(state, [address for address in native if address not in to_native])
    return _plan(state, unit, desired_drivers, to_vfio, to_native, undone)


def plan_return(state: UnitState, unit: UnitId, before: Mapping[PciAddress, bool]) -> DriverPlan:
    """Return the plan that gives their former drivers back to the functions that a change has touched, and no others.

    `before` has whether each function was on a VFIO driver. A function gets back the driver, and so the tenants, that
    it had before the change: no reset is required.
    """
    state = replace(state, former=replace(state.former, required=False), grace_without_driver=True)
    touched = [address for address in sorted(before) if address in state.inventory.facts.functions]
    to_vfio = [address for address in touched if before[address] and not state.function(address).on_vfio]
    to_native = [address for address in touched if not before[address] and _lacks_native_driver(state, address)]
    drivers = {address: DesiredDriver.PASSTHROUGH if before[address] else DesiredDriver.NATIVE for address in touched}
    kept = [address for address in touched if address not in to_vfio and address not in to_native]
    plan = _plan(state, unit, drivers, to_vfio, to_native, _former_overrides(state, kept, before))
    return replace(plan, notes=())


def _plan(
    state: UnitState,
    unit: UnitId,
    desired_drivers: DesiredDrivers,
    to_vfio: list[PciAddress],
    to_native: list[PciAddress],
    first: Iterable[DriverStep],
) -> DriverPlan:
    by_hand = _must_be_probed_by_hand(state, unit)
    if refused := driver_refusals(state, desired_drivers, to_vfio, to_native, by_hand=by_hand):
        return DriverPlan(unit, refusals=refused)
    return DriverPlan(
        unit,
        steps=(
            *first,
            *_steps_to_vfio(state, to_vfio),
            *steps_to_native(state, to_native, _unbinds(state, to_native), probe=not by_hand),
        ),
        leases=_leases(state, to_native),
        locks=tuple(address for address in to_vfio if state.function(address).driver == "nvidia"),
        forced=state.forced,
        notes=tuple(_notes(to_native)) if by_hand else (),
    )


def _is_passthrough(driver: DesiredDriver) -> bool:
    return driver is DesiredDriver.PASSTHROUGH


def _former_overrides(
    state: UnitState, functions: Iterable[PciAddress], before: Mapping[PciAddress, bool]
) -> Iterator[DriverStep]:
    """Yield the steps that restore the overrides of functions whose driver has not changed."""
    for address in functions:
        driver = state.function(address).driver
        if before[address] and isinstance(driver, str):
            yield Override(address, driver)
        else:
            yield ClearOverride(address, our_overrides(state, address), required=False)


def _leases(state: UnitState, to_native: Iterable[PciAddress]) -> tuple[IommuGroup, ...]:
    groups = {state.function(address).iommu_group for address in to_native if state.function(address).on_vfio}
    return tuple(sorted(group for group in groups if isinstance(group, int)))


def _lacks_native_driver(state: UnitState, address: PciAddress) -> bool:
    """Return whether a function that had a native driver is on none; each GPU and NVSwitch counts as having had one."""
    function = state.function(address)
    if function.kind in HEADS and function.physfn is None and function.is_idle:
        return True
    was_taken = address in state.journal.drivers or address in state.journal.changes
    return function.on_vfio or (function.driver is None and was_taken)


def _also_moved(state: UnitState, desired_drivers: DesiredDrivers) -> list[PciAddress]:
    """Return the functions of other slots whose drivers keep the group from VFIO, and that the admin has listed."""
    moving = [address for address, driver in desired_drivers.items() if _is_passthrough(driver)]
    others = sorted(state.neighbours(moving) - desired_drivers.keys())
    spoiling = group_blockers(state.inventory.facts.functions, others)
    return [function.address for function in spoiling if function.address in state.allowed]


def _also_returned(
    state: UnitState, unit: UnitId, desired_drivers: DesiredDrivers, slots: Mapping[PciAddress, tuple[PciAddress, ...]]
) -> list[PciAddress]:
    """Return the functions of other slots that moved with the GPUs of their group, once the last of these returns."""
    ours = {address for members in slots.values() for address in members}
    returned = {address for address, driver in desired_drivers.items() if not _is_passthrough(driver)}
    found: list[PciAddress] = []
    for address in state.inventory.units.get(unit, ()):
        if address in ours or address not in state.journal.drivers or not _lacks_native_driver(state, address):
            continue
        cards = state.neighbours([address]) & ours
        if cards and cards <= returned:
            found.append(address)
    return found


def _steps_to_vfio(state: UnitState, addresses: list[PciAddress]) -> Iterator[DriverStep]:
    drivers = {address: state.best_drivers.get(address, FALLBACK) for address in addresses}
    yield from (LoadModule(driver) for driver in sorted(set(drivers.values())) if driver not in state.drivers)
    yield from (Override(address, driver) for address, driver in drivers.items())
    yield from _unbinds(state, addresses)
    yield from (Probe(address, driver) for address, driver in drivers.items())


def _unbinds(state: UnitState, addresses: Iterable[PciAddress]) -> Iterator[DriverStep]:
    for address in addresses:
        driver = state.function(address).driver
        if isinstance(driver, str):
            yield Unbind(address, driver)


def _must_be_probed_by_hand(state: UnitState, unit: UnitId) -> bool:
    """Return whether a probe of the native driver can hang, as it can where NVSwitches join the GPUs."""
    has_switches = any(function.kind is FunctionKind.NVSWITCH for function in state.inventory.facts.functions.values())
    return has_switches and any(gpu.unit == unit for gpu in state.inventory.gpus.values())


def _notes(addresses: Iterable[PciAddress]) -> Iterator[str]:
    for address in addresses:
        yield (
            f"{address}: on a host with NVSwitches the driver may hang when it probes a single GPU; when all GPUs are"
            f" free, probe it by hand: {notoffered.probe_command(address)}"
        )


def why_not_unused(state: UnitState) -> tuple[Reason, ...]:
    """Return why a VM can be using one of NVIDIA's GPUs. A GPU whose use could not be read counts as used."""
    return tuple(dict.fromkeys(_possible_uses(state)))


def _possible_uses(state: UnitState) -> Iterator[Reason]:
    gpus = {address: gpu for address, gpu in state.inventory.gpus.items() if gpu.function.id.vendor == NVIDIA}
    for address, gpu in gpus.items():
        if gpu.vgpu_host is not None and gpu.vgpu_host.live:
            yield refusals.carries_vgpus(address, len(gpu.vgpu_host.live))
        if gpu.function.on_vfio and state.inventory.facts.users is None:
            yield refusals.users_unseen(address)
    for plan in plan_units(state, dict.fromkeys(gpus, DesiredDriver.NATIVE)):
        yield from plan.refusals
