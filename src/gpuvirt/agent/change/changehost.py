"""The host on which GPUs are changed, the inputs of a change, and the entry to the one change of a unit at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.change.gate.gate import Gates, Pass, gate_at
from gpuvirt.agent.change.gate.gatefiles import Read, no_readings
from gpuvirt.agent.change.gate.gatelock import Anchor
from gpuvirt.agent.store import hostfiles
from gpuvirt.agent.store.persisted import Persisted
from gpuvirt.facts.ids import BootId, PciAddress
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.tools import HostTools, Tools
from gpuvirt.hardware.access.writerkernel import writing
from gpuvirt.hardware.scan import scan_functions
from gpuvirt.model.allocation.podallocations import PodAllocations
from gpuvirt.model.allocation.tenancy import Tenancies
from gpuvirt.model.change.state import Account
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import Slots, UnitId, slots_of, units_of
from gpuvirt.model.inventory.naming import NO_NAMES, TypeNames
from gpuvirt.paths import HostRoots, KubeletPaths


class Inputs(msgspec.Struct, frozen=True):
    """The inputs of changes besides the host's state."""

    account: Callable[[Inventory], Account]
    """Returns the allocations of the devices in an inventory; a change calls it under the unit's lock."""
    type_names: TypeNames = NO_NAMES
    """The names of vGPU types. A host shows only names of types that it could create now."""
    allowed: frozenset[PciAddress] = frozenset()
    """Functions of other slots whose driver the admin permits to change with a GPU of their IOMMU group."""
    forced: bool = False
    """Whether a GPU may be taken from processes of the host that use it natively."""
    require_reset: bool = True
    """Whether a GPU that a VM had returns to the host only if the kernel can reset it."""
    grace_without_driver: bool = False
    """Whether a Grace GPU may be bound to vfio-pci where the host lacks the driver for its memory."""
    driver_may_come: bool = False
    """Whether a driver container may still load NVIDIA's driver."""

    readings: Read = no_readings
    """Returns the latest readings of the kubelet's two accounts; a change calls it under the unit's lock."""

    def newest(self, inventory: Inventory) -> PodAllocations:
        """Return the present allocations to pods; any thread calls it."""
        return self.account(inventory).allocations


ReportStep = Callable[[Step | RollBack], None]
Children = Callable[[Sequence[int]], AbstractContextManager[tuple[Kernel, Tools]]]
"""Starts the child process of a change, which keeps these descriptors open; gives the kernel and tools that use it."""


class ChangeHost(msgspec.Struct, frozen=True):
    """The host, real or simulated, and the files with the records of its changes."""

    kernel: Kernel
    tools: Tools
    original_drivers: Path
    """The driver journal."""
    locks: Path
    """The folder of the gates of agents and commands, which is deleted at boot."""
    device_plugins: Path
    """The kubelet's device-plugins folder, in which an unprivileged device plugin has its gates."""
    children: Children | None = None
    """Makes the writes of a change in a child process; None for a host simulated in this process's memory."""
    null: Path | None = None
    """The host's `/dev/null`, whose bytes changes lock; None: a simulated host has a file beside the gates for that."""

    @property
    def gates(self) -> Gates:
        """The gates that each change of this host passes."""
        return Gates(gate_at(self.locks), self.device_plugins, Anchor(self.null or self.locks.with_name("null")))

    @property
    def tenancies(self) -> Persisted[Tenancies]:
        """The tenants of GPUs, beside the driver journal."""
        return hostfiles.tenancies_beside(self.original_drivers)

    def read_tenancies(self, boot_id: BootId | None) -> Tenancies:
        """Return the tenants of GPUs in a boot, also those that an unprivileged device plugin has recorded."""
        plugins = hostfiles.tenancies(self.device_plugins / "gpuvirt" / hostfiles.TENANCIES)
        own, others = (file.value.of_boot(boot_id) for file in (self.tenancies, plugins))
        return own.with_tenants_of(others)


def change_host_of(kernel: Kernel, roots: HostRoots, kubelet: KubeletPaths, driver: Path | None = None) -> ChangeHost:
    """Return a real host; `driver` is the path of the driver container's root folder."""
    tools = HostTools(roots.system, driver or roots.run / "nvidia/driver")
    return ChangeHost(
        kernel,
        tools,
        roots.local(hostfiles.DRIVERS),
        roots.run / "gpuvirt/gate",
        kubelet.device_plugins,
        partial(writing, roots, tools),
        roots.dev / "null",
    )


@contextmanager
def changing(
    change_host: ChangeHost, unit: UnitId, first: Inventory, readings: Read
) -> Iterator[tuple[ChangeHost, Pass]]:
    """Take the gates of a unit for a change that writes by a child process; raise UnitBusyError.

    `first` is an earlier inventory of the host. The context gives the host to which the change writes, and
    the pass through the gates.
    """
    with ExitStack() as stack:
        passed = stack.enter_context(change_host.gates.change(unit, lambda: _slots(change_host, unit, first), readings))
        if change_host.children is not None:
            kernel, tools = stack.enter_context(change_host.children(passed.locks))
            change_host = replace(change_host, kernel=kernel, tools=tools)
        yield change_host, passed


def _slots(change_host: ChangeHost, unit: UnitId, first: Inventory) -> Slots:
    """Return the present slots of a unit. A unit that is gone has the slot of the address in its name."""
    members = first.units.get(unit)
    functions = scan_functions(change_host.kernel, first.facts, frozenset(members) if members is not None else None)
    return slots_of(functions, units_of(functions).get(unit, members or (PciAddress(unit),)))
