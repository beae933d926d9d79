"""Moves GPUs between drivers, by hand or for the agent: looks, plans, records, acts, and puts back what failed.

One move a unit at a time on a host: whoever moves it has the unit's lock.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import FunctionKind
from gpuvirt.hardware import hostuse, modules, nativeusers
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.scan import scan, with_device_ids, with_users
from gpuvirt.hardware.tools import HostTools, ToolError, Tools
from gpuvirt.hardware.writerkernel import writing
from gpuvirt.model import refusals
from gpuvirt.model.allocations import Allocations, Unknown
from gpuvirt.model.inventory import Inventory, build_inventory
from gpuvirt.model.isolation import Slots, UnitId, slots_of
from gpuvirt.model.modalias import FALLBACK, best_vfio_driver
from gpuvirt.model.plan import Override, Plan, Probe, RollBack, Seen, Step, Unbind, Wish, Wishes
from gpuvirt.model.planning import HEADS, plan_return, plan_unit
from gpuvirt.model.podallocations import Allocation, PodAllocations
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.node import originals
from gpuvirt.node.change.gate import gate_at
from gpuvirt.node.executor import execute
from gpuvirt.node.gate import Change, StalePlanError, by_hand
from gpuvirt.node.leasing import RefusedError
from gpuvirt.paths import HostRoots


class NamedStep(Protocol):
    """A step."""

    @property
    def text(self) -> str:
        """What is done."""
        ...


S = TypeVar("S", bound=NamedStep)
TellStep = Callable[[S], None]
Tell = TellStep[Step | RollBack]
Children = Callable[[Sequence[int]], AbstractContextManager[tuple[Kernel, Tools]]]
"""Gives the kernel and the tools of a change, whose processes have these descriptors open for as long as they live."""

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
    """The folder of the gates, which does not outlive a boot."""
    children: Children | None = None
    """Makes the writes of a change by child processes; None for a simulated host in memory, which no child sees."""


@contextmanager
def changing(
    site: Site, unit: UnitId, members: Callable[[], Slots], tell: TellStep[S]
) -> Iterator[tuple[Site, TellStep[S]]]:
    """Be the only one who changes a unit, by processes that can be left behind; raise UnitBusyError.

    `members` reads the slots of the unit. The context gives the site by which the change is made, and what is called
    with each step before it is begun.
    """
    with ExitStack() as stack:
        passed = stack.enter_context(gate_at(site.locks).change(unit, members))

        def begin(step: S) -> None:
            passed.note(step.text)
            tell(step)

        if site.children is not None:
            kernel, tools = stack.enter_context(site.children(tuple(passed.locks)))
            site = replace(site, kernel=kernel, tools=tools)
        yield site, begin


def site_of(kernel: Kernel, roots: HostRoots, driver: Path | None = None) -> Site:
    """Return where moves are made on a real host; `driver` is where the driver container's `/` is seen."""
    tools = HostTools(roots.system, driver or roots.run / "nvidia/driver")
    return Site(kernel, tools, roots.local(originals.FILE), roots.run / "gpuvirt/gate", partial(writing, roots, tools))


@dataclass(frozen=True, slots=True)
class Orders:
    """What the admin adds to a wish."""

    pods: Allocations | Unknown
    """The pods that GPUs are allocated to."""
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
    pods, unmapped = _allocated(inventory, orders)
    aliases = modules.read_aliases(site.kernel)
    best = {one.address: best_vfio_driver(aliases, one) for one in functions if one.kind is FunctionKind.GPU}
    return Seen(
        inventory,
        drivers=modules.loaded_drivers(site.kernel),
        best_drivers={address: driver for address, driver in best.items() if driver != FALLBACK},
        host_uses=hostuse.read_host_uses(site.kernel, functions),
        native_users=nativeusers.read_native_users(site.kernel, concerned) if facts.users is not None else None,
        pods=pods,
        unmapped=unmapped,
        originals=originals.read(site.originals),
        allowed=orders.allowed,
        forced=orders.forced,
    )


def _allocated(inventory: Inventory, orders: Orders) -> tuple[Allocations | Unknown, tuple[Allocation, ...]]:
    """Return which pods have which GPUs, and what they have that could not be found on this host."""
    if orders.ask is None:
        return orders.pods, orders.unmapped
    found = orders.ask(inventory)
    known = found.by_gpu(inventory)
    return known if found.unknown is None else Unknown(found.unknown, known), found.unmapped


def move(
    host: Site, unit: UnitId, wishes: Wishes, orders: Orders, report: Tell, change: Change | None = None
) -> tuple[Reason, ...]:
    """Bring one unit to where it is wanted; return why that failed, and why putting it back did, if it did.

    The host is looked at anew under the unit's lock, so that the steps follow from what is there. `change` is the
    agent's; somebody who moves GPUs by hand has none. `report` is called with each step before it is begun.
    """
    change = change or by_hand(unit)
    with changing(host, unit, lambda: _slots(host, unit), report) as (site, tell), change.under_way():
        seen = look(site, orders)
        plan = plan_unit(seen, unit, wishes)
        if plan.refusals or not plan.steps:
            return plan.refusals
        _record(site, seen, plan)
        touched: set[PciAddress] = set()

        def begin(step: Step | RollBack) -> None:
            if isinstance(step, Override | Unbind | Probe):
                touched.add(step.address)
            tell(step)

        failed = _carry_out(site, seen, plan, begin, change)
        if failed is None:
            _forget(site, plan)
            return ()
        before = {one: seen.inventory.facts.functions[one].on_vfio for one in touched}
        if not isinstance(failed, StalePlanError):  # a driver that does not take its GPU back would not the next time
            before = {one: on_vfio for one, on_vfio in before.items() if not on_vfio}
        if not before:
            return (failed.reason,)
        tell(RollBack(unit))
        return (failed.reason, *_put_back(site, unit, before, orders, tell, change))


def _slots(site: Site, unit: UnitId) -> Slots:
    """Return the slots of a unit as they are now; one that is gone has that of its name."""
    inventory = build_inventory(scan(site.kernel))
    return slots_of(inventory.facts.functions, inventory.units.get(unit, (PciAddress(unit),)))


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
    failed = _carry_out(site, seen, plan, tell, change)
    if failed is None:
        _forget(site, plan)
        return ()
    return (failed.reason,)


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
