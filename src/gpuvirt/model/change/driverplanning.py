"""Plans the drivers of the GPUs of one isolation unit.

A GPU changes its driver together with its sibling functions; VFs that are parts of a GPU change theirs alone. Bridges
stay. Functions of other slots in its IOMMU group stay too, and the plan is then refused, unless the admin has listed
these functions (`--also`). All functions are unbound before the first probe, so that no native driver takes a function
of a group that is still on VFIO, and no VM gets a group of which only a part is on VFIO.
"""

from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from gpuvirt.facts import sysfs
from gpuvirt.facts.ids import IommuGroup, PciAddress, slot_of
from gpuvirt.facts.pci import GRACE_DRIVER, NVIDIA, FunctionKind, PciFunction, Unread
from gpuvirt.facts.snapshot import OpenDeviceUser
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.podallocations import unmapped_reasons
from gpuvirt.model.allocation.tenancy import TenantKind
from gpuvirt.model.change.desired import DesiredDriver, DesiredDrivers
from gpuvirt.model.change.nativedrivers import (
    FALLBACK,
    HEADS,
    is_head,
    leftovers,
    native_driver,
    our_overrides,
    pinned_to_vfio,
    steps_to_native,
)
from gpuvirt.model.change.plan import DriverPlan
from gpuvirt.model.change.state import DriverJournal, UnitState
from gpuvirt.model.change.steps import ClearOverride, DriverStep, LoadModule, Override, Probe, Unbind
from gpuvirt.model.desired.gpumodes import DesiredMode, Modes
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import UnitId, group_blockers
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, notoffered, refusals
from gpuvirt.model.reasons.refusals import move_or_bind

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


def driver_refusals(
    state: UnitState,
    desired_drivers: DesiredDrivers,
    to_vfio: list[PciAddress],
    to_native: list[PciAddress],
    *,
    by_hand: bool,
) -> tuple[Reason, ...]:
    """Return why these functions must not change their drivers; `by_hand`: an admin must probe the native driver."""
    return tuple(dict.fromkeys(_refusals(state, desired_drivers, to_vfio, to_native, by_hand=by_hand)))


def _refusals(
    state: UnitState,
    desired_drivers: DesiredDrivers,
    to_vfio: list[PciAddress],
    to_native: list[PciAddress],
    *,
    by_hand: bool,
) -> Iterator[Reason]:
    for address in to_vfio:
        yield from _why_not_to_vfio(state, address)
    staying = sorted(state.neighbours(to_vfio) - desired_drivers.keys())
    for other in group_blockers(state.inventory.facts.functions, staying):
        same_group = [address for address in to_vfio if state.function(address).iommu_group == other.iommu_group]
        gpu, group = same_group[0] if same_group else other.address, other.iommu_group
        yield Reason(
            ReasonCode.FOREIGN_ENDPOINT,
            gpu,
            f"shares IOMMU group {group} with {other.address} ({other.id}), which is bound to {other.driver}",
            (Seen(f"{sysfs.IOMMU_GROUPS}/{group}/devices/{other.address}"),),
            move_or_bind(gpu, [other.address]),
        )
    for address in to_vfio:
        for neighbour in sorted(state.neighbours([address]) & desired_drivers.keys()):
            if desired_drivers[neighbour] is DesiredDriver.NATIVE:
                yield notoffered.group_not_viable(address, address, [state.function(neighbour)], by_modes=True)
    for address in to_native:
        yield from _why_not_to_native(state, desired_drivers, address)
        if by_hand and state.function(address).driver is None and address not in state.journal.overrides:
            yield notoffered.no_driver(address, by_hand=True)
        elif not by_hand and (reason := native_driver(state, address).refusal) is not None:
            yield reason


def _why_not_to_vfio(state: UnitState, address: PciAddress) -> Iterator[Reason]:
    function = state.function(address)
    vfio_folders = [unread for unread in function.unread if unread.path.endswith("/vfio-dev")]
    for attribute in (function.driver, function.iommu_group, *vfio_folders):
        if isinstance(attribute, Unread):
            yield refusals.unread(address, attribute)
    if function.iommu_group is None:
        yield refusals.no_group(address)
    if function.fell_off_bus:
        yield refusals.fell_off_bus(address, address)
    if (use := state.host_uses.get(address)) is not None:
        yield Reason(
            ReasonCode.USED_BY_HOST,
            address,
            f"{use}, so it stays with the host",
            fix="end that use first: set another primary display in the firmware, or initcall_blacklist=sysfb_init on"
            " the kernel's command line; unmount the disk; take the interface down",
        )
    if (
        function.needs_grace_driver
        and state.best_drivers.get(address) != GRACE_DRIVER
        and not state.grace_without_driver
    ):
        found = Seen("modules.alias", "names no driver for it, or could not be read")
        yield notoffered.grace_driver_missing(address, address, function.driver_name, found)
    if function.driver is None and (users := _vfio_users(state, function)):
        yield refusals.unbind_pending(address, users, certain=False)
    yield from _vgpus_and_vfs(state, function)
    yield from _allocated(state, address)
    yield from unmapped_reasons(function, state.unmapped)
    if not state.forced:
        yield from _native_users(state, function)


def _vgpus_and_vfs(state: UnitState, function: PciFunction) -> Iterator[Reason]:
    """Yield the vGPUs or VFs that a function would lose with its native driver."""
    gpu = state.inventory.gpus.get(function.address)
    if gpu is not None and gpu.vgpu_host is not None and gpu.vgpu_host.live:
        yield refusals.carries_vgpus(function.address, len(gpu.vgpu_host.live))
    elif function.virtfns:
        yield refusals.vfs_enabled(function)


def _native_users(state: UnitState, function: PciFunction) -> Iterator[Reason]:
    found = state.native_users
    if isinstance(found, Unread):
        if function.driver is not None:
            yield refusals.users_unseen(function.address, Seen(found.path, found.detail))
        return
    users = found.get(function.address, ())
    if function.driver == "nvidia":  # NVIDIA's driver answers for NVIDIA's own services, when it is locked
        users = refusals.serious(users)
    if users:
        yield refusals.in_use(function.address, users, forcible=True)


def _allocated(state: UnitState, address: PciAddress) -> Iterator[Reason]:
    """Yield the pods that a function is allocated to; or, for a function that has a driver, that they are unknown."""
    known = state.pods.known if isinstance(state.pods, Unknown) else state.pods
    if pods := known.get(address, ()):
        yield refusals.allocated_to_pod(address, pods)
    if isinstance(state.pods, Unknown) and state.function(address).driver is not None:
        reason = state.pods.reason
        yield refusals.allocations_unknown(address) if reason is None else replace(reason, subject=address)


def _why_not_to_native(state: UnitState, desired_drivers: DesiredDrivers, address: PciAddress) -> Iterator[Reason]:
    function = state.function(address)
    if isinstance(function.iommu_group, Unread):
        yield refusals.unread(address, function.iommu_group)
    if function.on_vfio and function.virtfns:  # an unbind removes the VFs, even while a VM uses them
        yield refusals.vfs_enabled(function)
    yield from _why_no_native_driver(state, function)
    if users := _vfio_users(state, function):
        yield refusals.in_use(address, users, forcible=False)
    for member in sorted({address, *state.neighbours([address])}):  # the lease takes the whole group
        if state.function(member).on_vfio or member == address:
            yield from _allocated(state, member)
    yield from _why_group_stays(state, desired_drivers, address)


def _why_group_stays(state: UnitState, desired_drivers: DesiredDrivers, address: PciAddress) -> Iterator[Reason]:
    """Yield the GPUs on VFIO that no VM could open once the slot of a function of their group is the host's."""
    gpus = state.inventory.gpus.keys()
    head = next((gpu for gpu in gpus if slot_of(gpu) == slot_of(address)), address)
    staying = [
        other
        for other in sorted(state.neighbours([address]) & gpus)
        if state.function(other).on_vfio and desired_drivers.get(other) is not DesiredDriver.NATIVE
    ]
    for other in staying:
        yield notoffered.group_not_viable(other, other, [state.function(head)], together=[head, *staying])


def _why_no_native_driver(state: UnitState, function: PciFunction) -> Iterator[Reason]:
    """Yield why a native driver must not, or can't, take a function."""
    if function.fell_off_bus:
        yield refusals.fell_off_bus(function.address, function.address)
    if function.address in state.inventory.gpus:
        functions = state.inventory.facts.functions
        if (unreset := state.former.why_withheld(functions, function.address, TenantKind.NATIVE)) is not None:
            yield unreset
    if (pinned := pinned_to_vfio(state, function.address)) is not None:
        yield refusals.pinned(function.address, pinned, by_driverctl=True)
    for vf in function.virtfns:  # the driver may reset them
        found = state.inventory.facts.functions.get(vf)
        if found is None:
            yield refusals.unread_function(vf)
        elif isinstance(found.iommu_group, Unread):
            yield refusals.unread(vf, found.iommu_group)
        elif users := _vfio_users(state, found):
            yield refusals.in_use(vf, users, forcible=False)


def _vfio_users(state: UnitState, function: PciFunction) -> tuple[OpenDeviceUser, ...]:
    facts = state.inventory.facts
    group = function.iommu_group
    users = (facts.users or {}).get(group, ()) if isinstance(group, int) else ()
    return users + (facts.users_of_lost_nodes if function.driver is None else ())


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
    return _plan(state, unit, drivers, to_vfio, to_native, _former_overrides(state, kept, before))


def _plan(
    state: UnitState,
    unit: UnitId,
    desired_drivers: DesiredDrivers,
    to_vfio: list[PciAddress],
    to_native: list[PciAddress],
    first: Iterable[DriverStep],
) -> DriverPlan:
    # A probe of the native driver can hang where NVSwitches join the GPUs.
    by_hand = state.inventory.has_nvswitches and any(gpu.unit == unit for gpu in state.inventory.gpus.values())
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
        left_driverless=tuple(_left_driverless(to_native)) if by_hand else (),
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


def _left_driverless(addresses: Iterable[PciAddress]) -> Iterator[Reason]:
    return (notoffered.no_driver(address, by_hand=True, is_left=True) for address in addresses)


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
