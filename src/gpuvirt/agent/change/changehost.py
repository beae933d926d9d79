"""The host on which GPUs are changed, and the entry to the one change of an isolation unit at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.change.gate.gate import Pass, gate_at
from gpuvirt.agent.change.gate.gatelock import Anchor
from gpuvirt.agent.change.gate.gates import Gates
from gpuvirt.agent.change.gate.unsettled import Read
from gpuvirt.agent.store import hostfiles
from gpuvirt.agent.store.persisted import Persisted
from gpuvirt.facts.ids import BootId, PciAddress
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.tools import HostTools, Tools
from gpuvirt.hardware.access.writerkernel import writing
from gpuvirt.hardware.scan import scan_functions
from gpuvirt.model.allocation.tenancy import Tenancies
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import Slots, UnitId, slots_of, units_of
from gpuvirt.paths import HostRoots, KubeletPaths

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
