"""Moves GPUs between drivers, by hand or for the agent: looks, plans, records, acts, and puts back what failed.

One move a unit at a time on a host: whoever moves it has the unit's lock.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import FunctionKind
from gpuvirt.hardware import hostuse, modules, nativeusers
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.scan import scan, with_device_ids, with_users
from gpuvirt.hardware.tools import HostTools, ToolError, Tools
from gpuvirt.model import refusals
from gpuvirt.model.inventory import Inventory, build_inventory
from gpuvirt.model.isolation import UnitId
from gpuvirt.model.modalias import FALLBACK, best_vfio_driver
from gpuvirt.model.plan import Override, Plan, Probe, RollBack, Seen, Step, Wish, Wishes
from gpuvirt.model.planning import HEADS, plan_unit
from gpuvirt.model.podallocations import Allocation, PodAllocations
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.node import originals
from gpuvirt.node.executor import execute
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
        ReasonCode.UNBIND_PENDING,
        ReasonCode.DRIVER_LOCK,
        ReasonCode.UNIT_BUSY,
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

    pods: Mapping[PciAddress, tuple[str, ...]]
    """The pods that have GPUs, as far as is known."""
    allowed: frozenset[PciAddress] = frozenset()
    forced: bool = False
    unmapped: tuple[Allocation, ...] = ()
    """GPUs that pods have, and that could not be found on this host."""
    ask: Callable[[Inventory], PodAllocations] | None = None
    """Asks what pods have at each look, under the unit's lock; None: `pods` and `unmapped` are what is known."""


def look(site: Site, orders: Orders) -> Seen:
    """Return all that plans follow from; this walks through all processes."""
    facts = with_device_ids(site.kernel, with_users(site.kernel, scan(site.kernel)))
    inventory = build_inventory(facts)
    heads = {address for address, one in facts.functions.items() if one.kind in HEADS}
    concerned = [one for members in inventory.units.values() if heads & set(members) for one in members]
    functions = [facts.functions[address] for address in concerned]
    allocations = (
        orders.ask(inventory) if orders.ask is not None else PodAllocations(orders.pods, unmapped=orders.unmapped)
    )
    aliases = modules.read_aliases(site.kernel)
    best = {one.address: best_vfio_driver(aliases, one) for one in functions if one.kind is FunctionKind.GPU}
    return Seen(
        inventory,
        drivers=modules.loaded_drivers(site.kernel),
        best_drivers={address: driver for address, driver in best.items() if driver != FALLBACK},
        host_uses=hostuse.read_host_uses(site.kernel, functions),
        native_users=nativeusers.read_native_users(site.kernel, concerned) if facts.users is not None else None,
        pods=allocations.by_gpu(inventory),
        unmapped=allocations.unmapped,
        allocations_unknown=allocations.unknown,
        originals=originals.read(site.originals),
        allowed=orders.allowed,
        forced=orders.forced,
    )


def move(site: Site, unit: UnitId, wishes: Wishes, orders: Orders, tell: Tell) -> tuple[Reason, ...]:
    """Bring one unit to where it is wanted; return why that failed, and why putting it back did, if it did.

    The host is looked at anew under the unit's lock, so that the steps follow from what is there.
    """
    with unit_locked(site.locks, unit):
        seen = look(site, orders)
        plan = plan_unit(seen, unit, wishes)
        if plan.refusals or not plan.steps:
            return plan.refusals
        _record(site, seen, plan)
        taken: list[Step | RollBack] = []

        def take(step: Step | RollBack) -> None:
            taken.append(step)
            tell(step)

        failed = _carry_out(site, seen, plan, take)
        if failed is None:
            _forget(site, plan)
            return ()
        if not taken:
            return (failed,)
        tell(RollBack(unit))
        return (failed, *_put_back(site, unit, wishes, orders, tell))


def obstacles(site: Site, unit: UnitId, wishes: Wishes) -> tuple[Reason, ...]:
    """Return why GPUs of a unit could not get VFIO drivers even when they carry nothing and nobody uses them."""
    seen = look(site, Orders({}))
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


def _carry_out(site: Site, seen: Seen, plan: Plan, tell: Tell) -> Reason | None:
    try:
        execute(site.kernel, site.tools, seen.inventory.facts.functions, plan, tell)
    except RefusedError as error:
        return error.reason
    return None


def _put_back(site: Site, unit: UnitId, wishes: Wishes, orders: Orders, tell: Tell) -> tuple[Reason, ...]:
    """Give what was to go to machines, and came only half the way, back to its driver."""
    away = {address: Wish.NATIVE for address, wish in wishes.items() if wish is Wish.PASSTHROUGH}
    seen = look(site, replace(orders, forced=False))
    plan = plan_unit(seen, unit, away)
    if plan.refusals or not plan.steps:
        return plan.refusals
    failed = _carry_out(site, seen, plan, tell)
    if failed is None:
        _forget(site, plan)
        return ()
    return (failed,)


def _record(site: Site, seen: Seen, plan: Plan) -> None:
    """Write down which driver each function has that is about to lose it; the first one stays."""
    functions = seen.inventory.facts.functions
    going = [step.address for step in plan.steps if isinstance(step, Override) and step.driver is not None]
    found = {one: driver for one in going if isinstance(driver := functions[one].driver, str)}
    originals.update(site.originals, lambda before: {**found, **before})


def _forget(site: Site, plan: Plan) -> None:
    overridden = {step.address for step in plan.steps if isinstance(step, Override) and step.driver is None}
    returned = overridden & {step.address for step in plan.steps if isinstance(step, Probe)}
    originals.update(
        site.originals, lambda before: {one: driver for one, driver in before.items() if one not in returned}
    )
