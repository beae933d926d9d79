"""The host on which GPUs are changed, where the records of changes lie, and the one change of a unit at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.scan import scan, scan_some
from gpuvirt.hardware.tools import HostTools, Tools
from gpuvirt.hardware.writerkernel import writing
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.inventory.inventory import Inventory, build_inventory
from gpuvirt.model.inventory.isolation import Slots, UnitId, slots_of
from gpuvirt.node.change.gate.gate import Pass, Read, gate_at
from gpuvirt.node.store import originaldrivers
from gpuvirt.paths import HostRoots

Tell = Callable[[Step | RollBack], None]
Children = Callable[[Sequence[int]], AbstractContextManager[tuple[Kernel, Tools]]]
"""Gives the kernel and the tools of a change, whose processes have these descriptors open for as long as they live."""


@dataclass(frozen=True, slots=True)
class Site:
    """The host, real or simulated."""

    kernel: Kernel
    tools: Tools
    original_drivers: Path
    """The record of the drivers that functions had."""
    locks: Path
    """The folder of the gates, which does not outlive a boot."""
    children: Children | None = None
    """Makes the writes of a change by child processes; None for a simulated host in memory, which no child sees."""


def site_of(kernel: Kernel, roots: HostRoots, driver: Path | None = None) -> Site:
    """Return a real host; `driver` is where the driver container's `/` is seen."""
    tools = HostTools(roots.system, driver or roots.run / "nvidia/driver")
    return Site(
        kernel, tools, roots.local(originaldrivers.FILE), roots.run / "gpuvirt/gate", partial(writing, roots, tools)
    )


@contextmanager
def changing(site: Site, unit: UnitId, first: Inventory, readings: Read) -> Iterator[tuple[Site, Pass]]:
    """Be the only one who changes a unit, by processes that can be left behind; raise UnitBusyError.

    `first` is the host as it was seen lately. The context gives the site by which the change is made, and the gates
    that it has passed.
    """
    with ExitStack() as stack:
        passed = stack.enter_context(gate_at(site.locks).change(unit, lambda: _slots(site, unit, first), readings))
        if site.children is not None:
            kernel, tools = stack.enter_context(site.children(tuple(passed.locks)))
            site = replace(site, kernel=kernel, tools=tools)
        yield site, passed


def _slots(site: Site, unit: UnitId, first: Inventory) -> Slots:
    """Return the slots of a unit as they are now; one that is gone has that of its name."""
    members = first.units.get(unit)
    facts = scan(site.kernel) if members is None else scan_some(site.kernel, frozenset(members), first.facts)
    now = build_inventory(facts)
    return slots_of(now.facts.functions, now.units.get(unit, members or (PciAddress(unit),)))
