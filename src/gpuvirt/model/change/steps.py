"""The steps that a plan is made of, as data: each touches one device of a host, or loads a kernel module."""

from dataclasses import dataclass

from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.vgpu import Scheduler


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
    desired: tuple[str, ...] = ()
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


DriverStep = LoadModule | Override | ClearOverride | Unlock | Unbind | Probe | Return


def _switched(*, on: bool) -> str:
    return "on" if on else "off"


@dataclass(frozen=True, slots=True)
class EnableVfs:
    """Have the VFs of a GPU, on which its vGPUs stand."""

    gpu: PciAddress

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.gpu}: switch its VFs on"


@dataclass(frozen=True, slots=True)
class DisableVfs:
    """Have a GPU without its VFs, which nobody uses and which carry nothing."""

    gpu: PciAddress

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.gpu}: switch its VFs off"


@dataclass(frozen=True, slots=True)
class RemoveVgpu:
    """Take a vGPU away that nobody has."""

    vgpu: VgpuId
    type: VgpuType
    slot: PciAddress

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.slot}: remove {self.type} {self.vgpu}"


@dataclass(frozen=True, slots=True)
class CreateVgpu:
    """Make a vGPU."""

    vgpu: VgpuId
    type: VgpuType
    slot: PciAddress

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.slot}: create {self.type} {self.vgpu}"


@dataclass(frozen=True, slots=True)
class SetMixedSizes:
    """Let vGPUs of several sizes be on a GPU at a time, or of one alone, while it carries none."""

    gpu: PciAddress
    on: bool

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.gpu}: switch mixed sizes {_switched(on=self.on)}"


@dataclass(frozen=True, slots=True)
class SetMigMode:
    """Switch MIG mode of a GPU that carries nothing and that nobody uses."""

    gpu: PciAddress
    on: bool

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.gpu}: switch MIG mode {_switched(on=self.on)}"


@dataclass(frozen=True, slots=True)
class DestroyInstance:
    """Take a GPU instance away that no vGPU can stand on."""

    gpu: PciAddress
    instance: int
    profile: str

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.gpu}: destroy GPU instance {self.instance} ({self.profile})"


@dataclass(frozen=True, slots=True)
class CreateInstance:
    """Make a GPU instance for MIG-backed vGPUs."""

    gpu: PciAddress
    profile: str
    start: int
    """The first memory slice that it takes."""

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.gpu}: create a GPU instance {self.profile} at slice {self.start}"


@dataclass(frozen=True, slots=True)
class SetScheduler:
    """Let a GPU's vGPUs share its time in another way, while no machine runs on them."""

    gpu: PciAddress
    scheduler: Scheduler

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.gpu}: set the vGPU scheduler to {self.scheduler.text}"


ModeStep = SetMixedSizes | SetMigMode
VfStep = EnableVfs | DisableVfs
VgpuStep = VfStep | RemoveVgpu | ModeStep | DestroyInstance | CreateInstance | CreateVgpu | SetScheduler
Step = DriverStep | VgpuStep


@dataclass(frozen=True, slots=True)
class RollBack:
    """The steps that follow undo those of a change that has failed."""

    subject: str

    @property
    def text(self) -> str:
        """The mark in words."""
        return f"{self.subject}: roll back"
