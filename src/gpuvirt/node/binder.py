"""Moves GPUs between drivers, by hand or for the agent: looks, plans, records, acts, and puts back what failed.

One move a unit at a time on a host: whoever moves it has the unit's lock.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpuvirt.facts.ids import PciAddress, slot_of
from gpuvirt.facts.pci import FunctionKind, PciFunction
from gpuvirt.hardware import driverctl, hostuse, modules, nativeusers
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.scan import scan, with_device_ids, with_users
from gpuvirt.hardware.tools import HostTools, ToolError, Tools
from gpuvirt.model import refusals
from gpuvirt.model.allocations import Allocations, Unknown
from gpuvirt.model.inventory import Inventory, build_inventory
from gpuvirt.model.isolation import UnitId
from gpuvirt.model.modalias import FALLBACK, best_vfio_driver, native_modules
from gpuvirt.model.nativedrivers import HEADS, alias_of, is_loaded
from gpuvirt.model.plan import LoadModule, Plan, RollBack, Seen, Step, Wish, Wishes
from gpuvirt.model.planning import plan_return, plan_unit
from gpuvirt.model.podallocations import Allocation, PodAllocations
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.node import originals
from gpuvirt.node.changerecord import ChangeRecord
from gpuvirt.node.executor import execute
from gpuvirt.node.gate import Change, StalePlanError, by_hand
from gpuvirt.node.guard import unit_locked
from gpuvirt.node.leasing import RefusedError
from gpuvirt.paths import HostRoots

Tell = Callable[[Step | RollBack], None]

WAITING = frozenset(
    {
        ReasonCode.CARRIES_VGPUS,
        ReasonCode.VFS_ENABLED,
        ReasonCode.VGPU_IN_USE,
        ReasonCode.IN_USE,
        ReasonCode.HELD_BY_POD,
        ReasonCode.ALLOCATION_UNMAPPED,
        ReasonCode.STILL_COUNTED,
        ReasonCode.HOLDERS_UNHEARD,
        ReasonCode.ALLOCATIONS_UNKNOWN,
        ReasonCode.UNBIND_PENDING,
        ReasonCode.DRIVER_LOCK,
        ReasonCode.UNIT_BUSY,
        ReasonCode.PLAN_OUTDATED,
    }
)
"""What passes by itself when somebody has ended."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where moves are made."""

    kernel: Kernel
    tools: Tools
    originals: Path
    """The record of the drivers that functions had."""
    locks: Path
    """A folder that does not outlive a boot."""


def site_of(kernel: Kernel, roots: HostRoots, driver: Path | None = None) -> Site:
    """Return where moves are made on a real host; `driver` is where the driver container's `/` is seen."""
    tools = HostTools(roots.system, driver or roots.run / "nvidia/driver")
    return Site(kernel, tools, roots.local(originals.FILE), roots.run / "gpuvirt/units")


@dataclass(frozen=True, slots=True)
class Orders:
    """What the admin adds to a wish."""

    pods: Allocations | Unknown
    """The pods that GPUs are allocated to."""
    allowed: frozenset[PciAddress] = frozenset()
    forced: bool = False
    unmapped: tuple[Allocation, ...] = ()
    """GPUs that pods have, and that could not be found on this host."""
    driver_may_come: bool = False
    """Whether a container may yet bring NVIDIA's driver."""
    ask: Callable[[Inventory], PodAllocations] | None = None
    """Asks what pods have at each look, under the unit's lock; None: `pods` and `unmapped` are what is known."""


def look(site: Site, orders: Orders) -> Seen:
    """Return all that plans follow from; this walks through all processes."""
    facts = with_device_ids(site.kernel, with_users(site.kernel, scan(site.kernel)))
    inventory = build_inventory(facts)
    heads = {address for address, one in facts.functions.items() if one.kind in HEADS}
    concerned = [one for members in inventory.units.values() if heads & set(members) for one in members]
    functions = [facts.functions[address] for address in concerned]
    pods, unmapped = _allocated(inventory, orders)
    aliases = modules.read_aliases(site.kernel)
    best = {one.address: best_vfio_driver(aliases, one) for one in functions if one.kind is FunctionKind.GPU}
    journal = originals.read(site.originals).of_boot(facts.platform.boot_id)
    drivers = modules.loaded_drivers(site.kernel)
    away = [one for one in functions if (one.on_vfio or one.is_idle) and one.kind is not FunctionKind.BRIDGE]
    native = _native_modules(site.kernel, aliases, away)
    return Seen(
        inventory,
        drivers=drivers,
        best_drivers={address: driver for address, driver in best.items() if driver != FALLBACK},
        host_uses=hostuse.read_host_uses(site.kernel, functions),
        native_users=nativeusers.read_native_users(site.kernel, concerned) if facts.users is not None else None,
        pods=pods,
        unmapped=unmapped,
        journal=journal,
        native_modules=native,
        missing_modules=_cannot_load(site, _to_load(away, journal.drivers, native, drivers)),
        pinned=driverctl.read_pins(site.kernel, concerned),
        driver_may_come=orders.driver_may_come,
        allowed=orders.allowed,
        forced=orders.forced,
    )


def _native_modules(
    kernel: Kernel, aliases: str, functions: Collection[PciFunction]
) -> Mapping[PciAddress, tuple[str, ...]]:
    """Return the native drivers of functions, by name where they are loaded; nothing without modules.alias."""
    found = native_modules(aliases, functions) if aliases else {}
    return {
        address: tuple(name for one in named for name in modules.loaded_as(kernel, one) or (one,))
        for address, named in found.items()
    }


def _to_load(
    functions: Iterable[PciFunction],
    recorded: Mapping[PciAddress, str],
    native: Mapping[PciAddress, tuple[str, ...]],
    drivers: frozenset[str],
) -> set[str]:
    """Return the modules that may have to be loaded for functions that are to get native drivers."""
    found: set[str] = set()
    for function in functions:
        names = (*filter(None, [recorded.get(function.address)]), *native.get(function.address, ()))
        if names and not is_loaded(drivers, names[0]):
            found |= {names[0], *([alias_of(function)] if native.get(function.address) else [])}
    return found


def _cannot_load(site: Site, wanted: Iterable[str]) -> Mapping[str, str]:
    """Return the modules that modprobe can't load, with what it said."""
    found: dict[str, str] = {}
    for module in sorted(wanted):
        try:
            site.tools.demand_module(module)
        except ToolError as error:
            found[module] = str(error)
    return found


def _allocated(inventory: Inventory, orders: Orders) -> tuple[Allocations | Unknown, tuple[Allocation, ...]]:
    """Return which pods have which GPUs, and what they have that could not be found on this host."""
    if orders.ask is None:
        return orders.pods, orders.unmapped
    found = orders.ask(inventory)
    known = found.by_gpu(inventory)
    return known if found.unknown is None else Unknown(found.unknown, known), found.unmapped


def move(
    site: Site, unit: UnitId, wishes: Wishes, orders: Orders, tell: Tell, change: Change | None = None
) -> tuple[Reason, ...]:
    """Bring one unit to where it is wanted; return why that failed, and why putting it back did, if it did.

    The host is looked at anew under the unit's lock, so that the steps follow from what is there. `change` is the
    agent's; somebody who moves GPUs by hand has none.
    """
    change = change or by_hand(unit, orders.ask)
    with unit_locked(site.locks, unit), change.under_way():
        seen = look(site, orders)
        change.plan_from(seen.inventory, seen.unmapped)
        plan = plan_unit(seen, unit, wishes)
        if plan.refusals:
            return plan.refusals
        record = _record(site, seen)
        concerned = [one for gpu in wishes for one in seen.inventory.slots.get(slot_of(gpu), ())]
        if not plan.steps:
            record.settle(plan, concerned)
            return ()
        record.begin(plan)
        touched: set[PciAddress] = set()

        def begin(step: Step | RollBack) -> None:
            if not isinstance(step, LoadModule | RollBack):
                touched.add(step.address)
            tell(step)

        failed = _carry_out(site, seen, plan, begin, change)
        if failed is None:
            record.settle(plan, concerned)
            return ()
        before = _to_put_back(seen, touched, failed)
        reasons: tuple[Reason, ...] = ()
        if before:
            tell(RollBack(unit))
            reasons = _put_back(site, unit, before, orders, tell, change)
        record.keep(plan, touched)
        return (failed.reason, *reasons)


def _to_put_back(seen: Seen, touched: Iterable[PciAddress], failed: RefusedError) -> Mapping[PciAddress, bool]:
    """Return the functions that go back to where they were, with whether that is a VFIO driver.

    One that had no driver has nowhere to go back to: it stays recorded, and the next plan follows from what is desired.
    """
    had = {one: seen.inventory.facts.functions[one] for one in touched}
    before = {address: one.on_vfio for address, one in had.items() if not one.is_idle}
    if isinstance(failed, StalePlanError):
        return before
    # A native driver that does not take its GPU would not the next time either.
    return {one: on_vfio for one, on_vfio in before.items() if not on_vfio}


def obstacles(site: Site, unit: UnitId, wishes: Wishes) -> tuple[Reason, ...]:
    """Return why GPUs of a unit could not get VFIO drivers even when they carry nothing and nobody uses them."""
    seen = look(site, Orders(Unknown()))
    lasting = tuple(one for one in plan_unit(seen, unit, wishes).refusals if one.code not in WAITING)
    return lasting or tuple(_missing_modules(site, seen, unit, wishes))


def _missing_modules(site: Site, seen: Seen, unit: UnitId, wishes: Wishes) -> Iterator[Reason]:
    going = [one for one in seen.inventory.units[unit] if wishes.get(one) is Wish.PASSTHROUGH]
    drivers = {seen.best_drivers.get(one, FALLBACK): one for one in reversed(going)}
    for driver, gpu in drivers.items():
        if driver in seen.drivers:
            continue
        try:
            site.tools.demand_module(driver)
        except ToolError as error:
            yield refusals.module_missing(gpu, driver, str(error))


def _carry_out(site: Site, seen: Seen, plan: Plan, tell: Tell, change: Change) -> RefusedError | None:
    try:
        execute(site.kernel, site.tools, seen.inventory.facts.functions, plan, tell, change)
    except RefusedError as error:
        return error
    return None


def _put_back(
    site: Site, unit: UnitId, before: Mapping[PciAddress, bool], orders: Orders, tell: Tell, change: Change
) -> tuple[Reason, ...]:
    """Put back the functions that a change has touched; `before` says which of them were on VFIO drivers."""
    change.roll_back()
    seen = look(site, replace(orders, forced=False, pods=change.allocations(orders.pods)))
    plan = plan_return(seen, unit, before)
    if plan.refusals or not plan.steps:
        return plan.refusals
    record = _record(site, seen)
    record.begin(plan)
    failed = _carry_out(site, seen, plan, tell, change)
    if failed is None:
        record.settle(plan)
        return ()
    return (failed.reason,)


def _record(site: Site, seen: Seen) -> ChangeRecord:
    return ChangeRecord(site.kernel, site.originals, seen.inventory.facts.functions, seen.journal)
