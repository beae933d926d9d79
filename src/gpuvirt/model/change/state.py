"""The observed state of a host that the plan of an isolation unit follows from."""

from collections.abc import Collection, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import BootId, PciAddress, VgpuId, parse_pci_address
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import OpenDeviceUser
from gpuvirt.model.allocation.allocations import Allocations, Unknown
from gpuvirt.model.allocation.podallocations import Allocation, PodAllocations
from gpuvirt.model.allocation.tenancy import FormerTenants
from gpuvirt.model.change.vgpus.gpustate import GpuState, Holding
from gpuvirt.model.inventory.inventory import Inventory, build_inventory
from gpuvirt.model.reasons import Reason
from gpuvirt.paths import HostPath


class StartedChange(msgspec.Struct, frozen=True):
    """A change of one function's driver that was started and whose end is not recorded."""

    to_vfio: bool
    """Whether the change binds the function to a VFIO driver; else it binds the function to its native driver."""
    driver: str | None = None
    """The driver that the function had when the change started."""


class DriverJournal(msgspec.Struct, frozen=True, rename={"boot_id": "boot"}):
    """The records of all functions of a host, as they are kept on disk; raise InvalidIdError."""

    drivers: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The native drivers that functions had before gpuvirt bound them to a VFIO driver. They outlive a reboot."""
    overrides: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The values that gpuvirt has written into `driver_override` in this boot and not cleared."""
    changes: Mapping[PciAddress, StartedChange] = msgspec.field(default_factory=dict)
    """The changes of this boot that have not ended: their process was killed, or still runs."""
    boot_id: BootId | None = None
    """The boot in which the overrides were written and the changes started."""
    damaged: bool = False
    """Whether the file was damaged in this boot, so that an override without a record may be gpuvirt's own."""

    def __post_init__(self) -> None:
        for address in (*self.drivers, *self.overrides, *self.changes):
            parse_pci_address(address)

    def of_boot(self, boot_id: BootId | None) -> "DriverJournal":
        """Return the records that hold in a boot: a reboot clears every override, and ends every change."""
        if boot_id is None or self.boot_id in {None, boot_id}:
            return self if boot_id is None else replace(self, boot_id=boot_id)
        return DriverJournal(drivers=self.drivers, boot_id=boot_id)

    @property
    def open(self) -> frozenset[PciAddress]:
        """The functions that have an override of gpuvirt's, or a change that has not ended."""
        return frozenset({*self.overrides, *self.changes})


class Account(msgspec.Struct, frozen=True):
    """The devices that are allocated to pods."""

    pods: Allocations | Unknown
    """The pods to which each GPU, or a part of it, is allocated."""
    allocations: PodAllocations = msgspec.field(default_factory=PodAllocations)
    """The allocations by device, from the kubelet's account."""
    holdings: tuple[Holding, ...] = ()
    """The allocated vGPUs."""
    offered: frozenset[VgpuId] = frozenset()
    """The vGPUs that the kubelet may allocate to a pod at any moment."""


NOT_READ = Unread(HostPath("/proc"), seen="not read for this plan")


class UnitState(msgspec.Struct, frozen=True):
    """The inventory of the host, with everything else that a plan depends on."""

    inventory: Inventory
    drivers: frozenset[str]
    """The PCI drivers that are loaded."""
    pods: Allocations | Unknown
    """The pods that each GPU, or a part of it, is allocated to."""
    best_drivers: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The VFIO driver that fits a GPU best. Functions without an entry get vfio-pci."""
    host_uses: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The use that the host makes of a function: `drives the console`."""
    native_users: Mapping[PciAddress, tuple[OpenDeviceUser, ...]] | Unread = NOT_READ
    """Processes that use a function through its native driver; Unread if they could not be listed."""
    unmapped: tuple[Allocation, ...] = ()
    """Allocations of GPUs whose ids can't be mapped to a GPU of this host."""
    journal: DriverJournal = msgspec.field(default_factory=DriverJournal)
    native_modules: Mapping[PciAddress, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """The native drivers and modules of a function, which is missing if modules.alias was not read."""
    missing_modules: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Modules that modprobe can't load, with its error."""
    pinned: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The drivers on which driverctl keeps functions."""
    driver_may_come: bool = False
    """Whether a container may still load NVIDIA's driver, whose module loads only while a GPU is free."""
    allowed: frozenset[PciAddress] = frozenset()
    """Functions of other slots that may move with a GPU of their group, by the admin's list."""
    former: FormerTenants = msgspec.field(default_factory=FormerTenants)
    """The last tenants of GPUs in this boot."""
    grace_without_driver: bool = False
    """Whether a Grace GPU may be bound to vfio-pci, which does not pass its memory to a VM."""
    forced: bool = False
    """Whether functions move although processes use them natively. Pods and users of VFIO always prevent a move."""
    gpu_states: Mapping[PciAddress, GpuState] = msgspec.field(default_factory=dict)
    """The state of each GPU of the unit whose driver can create vGPUs now."""
    whole: Mapping[PciAddress, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """The pods that a function is allocated to whole, or as a part of a GPU that is not a vGPU."""
    unknown: Reason | None = None
    """Why no account of the allocations could be read, so that nothing is changed."""

    def function(self, address: PciAddress) -> PciFunction:
        """Return a function of the host."""
        return self.inventory.facts.functions[address]

    def neighbours(self, addresses: Iterable[PciAddress]) -> set[PciAddress]:
        """Return the functions that share an IOMMU group with these, and these themselves."""
        groups = {self.function(address).iommu_group for address in addresses}
        return {member for group in groups if isinstance(group, int) for member in self.inventory.groups.get(group, ())}

    def emptied(self, gpus: Collection[PciAddress]) -> "UnitState":
        """Return the state in which these GPUs carry no vGPUs and have no VFs."""
        facts = self.inventory.facts
        gone = {vf for gpu in gpus for vf in facts.functions[gpu].virtfns}
        functions = {address: function for address, function in facts.functions.items() if address not in gone}
        functions |= {gpu: replace(functions[gpu], virtfns=()) for gpu in gpus}
        hosts = {gpu: replace(host, live=()) if gpu in gpus else host for gpu, host in facts.vgpu_hosts.items()}
        return replace(self, inventory=build_inventory(replace(facts, functions=functions, vgpu_hosts=hosts)))
