"""What was observed of a host, as the plan of an isolation unit follows from it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.snapshot import User
from gpuvirt.model.allocation.allocations import Allocations, Unknown
from gpuvirt.model.allocation.podallocations import Allocation
from gpuvirt.model.change.driverjournal import DriverJournal
from gpuvirt.model.change.vgpus.gpustate import GpuState
from gpuvirt.model.inventory.inventory import Inventory, build_inventory
from gpuvirt.model.reasons import Reason


@dataclass(frozen=True, slots=True)
class UnitState:
    """All that a plan follows from."""

    inventory: Inventory
    drivers: frozenset[str]
    """The drivers of PCI functions that are loaded."""
    best_drivers: Mapping[PciAddress, str] = field(default_factory=dict)
    """The VFIO driver that knows a function best, where that is not vfio-pci."""
    host_uses: Mapping[PciAddress, str] = field(default_factory=dict)
    """What the host itself needs a function for: `drives the console`."""
    native_users: Mapping[PciAddress, tuple[User, ...]] | None = None
    """Processes that use a function through its native driver; None where that could not be looked for."""
    pods: Allocations | Unknown = field(kw_only=True)
    """Pods that have a GPU, or a part of it."""
    unmapped: tuple[Allocation, ...] = ()
    """GPUs that pods have, and that could not be found on this host."""
    journal: DriverJournal = field(default_factory=DriverJournal)
    """What gpuvirt has recorded of the drivers that it took from functions."""
    native_modules: Mapping[PciAddress, tuple[str, ...]] = field(default_factory=dict)
    """The drivers and modules that are for a function; a function is missing where modules.alias was not read."""
    missing_modules: Mapping[str, str] = field(default_factory=dict)
    """Modules that modprobe can't load, with what it said."""
    pinned: Mapping[PciAddress, str] = field(default_factory=dict)
    """The drivers that driverctl keeps functions on."""
    driver_may_come: bool = False
    """Whether a container may yet bring NVIDIA's driver: its module is loaded only while a GPU is free."""
    allowed: frozenset[PciAddress] = frozenset()
    """Functions of other slots that the admin lets move with a GPU of their group."""
    forced: bool = False
    """Processes that use a function natively don't keep it from being moved; pods and VFIO's users always do."""
    gpu_states: Mapping[PciAddress, GpuState] = field(default_factory=dict)
    """The GPUs of the unit that make vGPUs now."""
    whole: Mapping[PciAddress, tuple[str, ...]] = field(default_factory=dict)
    """The pods that have a function whole, or a part of a GPU that is no vGPU."""
    unknown: Reason | None = None
    """Why no account of what pods have could be read, so that nothing is changed."""

    def emptied(self, gpus: Collection[PciAddress]) -> "UnitState":
        """Return what is there once these GPUs carry no vGPUs and have no VFs."""
        facts = self.inventory.facts
        gone = {vf for gpu in gpus for vf in facts.functions[gpu].virtfns}
        functions = {address: one for address, one in facts.functions.items() if address not in gone}
        functions |= {gpu: replace(functions[gpu], virtfns=()) for gpu in gpus}
        hosts = {gpu: replace(host, live=()) if gpu in gpus else host for gpu, host in facts.vgpu_hosts.items()}
        return replace(self, inventory=build_inventory(replace(facts, functions=functions, vgpu_hosts=hosts)))
