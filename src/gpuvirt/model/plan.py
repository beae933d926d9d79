"""What is to be done to a host so that GPUs are as they are wanted: steps in their order, or why none is taken."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.facts.snapshot import User
from gpuvirt.model.allocations import Allocations, Unknown
from gpuvirt.model.driverjournal import DriverJournal
from gpuvirt.model.inventory import Inventory
from gpuvirt.model.isolation import UnitId
from gpuvirt.model.podallocations import Allocation
from gpuvirt.model.reasons import Reason


class Wish(StrEnum):
    """What somebody wants of a GPU; one without a wish is left alone."""

    PASSTHROUGH = "passthrough"
    """On a VFIO driver, for virtual machines."""
    NATIVE = "native"
    """Back with the driver that it came from."""


Wishes = Mapping[PciAddress, Wish]


@dataclass(frozen=True, slots=True)
class LoadModule:
    """Have a driver in the kernel."""

    driver: str
    """Its name, or `pci:` and the modalias of the function that needs one: modprobe then minds its blacklist."""
    provides: tuple[str, ...] = ()
    """The drivers of which one must be there afterwards, where that is not `driver`."""
    may_need_device: bool = False
    """NVIDIA's module refuses to be loaded while no GPU is free; it is loaded again after the unbind."""

    @property
    def text(self) -> str:
        """The step in words."""
        return f"modprobe {self.driver}"


@dataclass(frozen=True, slots=True)
class Override:
    """Say which driver alone may have a function."""

    address: PciAddress
    driver: str

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.address}: driver_override = {self.driver}"


@dataclass(frozen=True, slots=True)
class Unbind:
    """Take a function from its driver."""

    address: PciAddress
    driver: str

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.address}: unbind from {self.driver}"


@dataclass(frozen=True, slots=True)
class Probe:
    """Let the kernel give a function to the driver that its override names."""

    address: PciAddress
    driver: str
    """Which must have it then."""

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.address}: probe, for {self.driver}"


@dataclass(frozen=True, slots=True)
class ClearOverride:
    """Take back what somebody wrote into `driver_override`, where that was gpuvirt."""

    address: PciAddress
    ours: frozenset[str]
    """The values that may be taken back; any other stays."""
    wanted: tuple[str, ...] = ()
    """The drivers that may have the function; with another's override none of them could."""
    required: bool = True
    """Whether an override that stays, and keeps these drivers off, stops the change."""

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.address}: driver_override = none"


@dataclass(frozen=True, slots=True)
class Unlock:
    """Have NVIDIA's driver let clients in again, which a change that was killed has locked out."""

    address: PciAddress

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.address}: unbindLock = 0"


@dataclass(frozen=True, slots=True)
class Return:
    """Give a function that no driver has to a native one."""

    address: PciAddress
    drivers: tuple[str, ...] = ()
    """Those that may have it, the best first; none: the one that the kernel has for it."""
    required: bool = True
    """Whether it is a failure that no driver takes it."""

    @property
    def text(self) -> str:
        """The step in words."""
        return (
            f"{self.address}: probe, for {self.drivers[0] if self.drivers else 'the driver that the kernel has for it'}"
        )


Step = LoadModule | Override | ClearOverride | Unlock | Unbind | Probe | Return


@dataclass(frozen=True, slots=True)
class RollBack:
    """The steps that follow undo those of a change that has failed."""

    subject: str

    @property
    def text(self) -> str:
        """The mark in words."""
        return f"{self.subject}: roll back"


@dataclass(frozen=True, slots=True)
class Seen:
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


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done to one unit."""

    unit: UnitId
    steps: tuple[Step, ...] = ()
    refusals: tuple[Reason, ...] = ()
    """Why nothing is done; there are no steps then."""
    leases: tuple[IommuGroup, ...] = ()
    """The groups that are held while the steps are taken."""
    locks: tuple[PciAddress, ...] = ()
    """The GPUs whose native driver is asked to let nobody in before they are taken from it."""
    notes: tuple[str, ...] = ()
