"""The steps of a plan, as data: each changes one device of a host, or loads a kernel module."""

import msgspec

from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.vgpu import Scheduler


class LoadModule(msgspec.Struct, frozen=True):
    """Load a driver into the kernel."""

    driver: str
    """The driver's name, or `pci:` and the modalias of the function, for which modprobe applies its blacklist."""
    provides: tuple[str, ...] = ()
    """The drivers of which one must be loaded afterwards, if that is not `driver`."""
    may_need_device: bool = False
    """Whether a failure is tried again after the unbind: NVIDIA's module does not load while no GPU is free."""

    @property
    def text(self) -> str:
        """The step as text."""
        return f"modprobe {self.driver}"


class Override(msgspec.Struct, frozen=True):
    """Write `driver_override`, which names the only driver that may take a function."""

    address: PciAddress
    driver: str

    @property
    def text(self) -> str:
        """The step as text."""
        return f"{self.address}: driver_override = {self.driver}"


class Unbind(msgspec.Struct, frozen=True):
    """Unbind a function from its driver."""

    address: PciAddress
    driver: str

    @property
    def text(self) -> str:
        """The step as text."""
        return f"{self.address}: unbind from {self.driver}"


class Probe(msgspec.Struct, frozen=True):
    """Have the kernel bind a function to the driver that its override names."""

    address: PciAddress
    driver: str
    """The driver that must have the function afterwards."""

    @property
    def text(self) -> str:
        """The step as text."""
        return f"{self.address}: probe, for {self.driver}"


class ClearOverride(msgspec.Struct, frozen=True):
    """Clear `driver_override` if gpuvirt has written it."""

    address: PciAddress
    ours: frozenset[str]
    """The values that may be cleared; any other stays."""
    desired: tuple[str, ...] = ()
    """The drivers that may take the function, which an override that stays may rule out."""
    required: bool = True
    """Whether the change fails if an override stays and rules these drivers out."""

    @property
    def text(self) -> str:
        """The step as text."""
        return f"{self.address}: driver_override = none"


class Unlock(msgspec.Struct, frozen=True):
    """Have NVIDIA's driver admit clients again, after a change that locked them out was killed."""

    address: PciAddress

    @property
    def text(self) -> str:
        """The step as text."""
        return f"{self.address}: unbindLock = 0"


class Return(msgspec.Struct, frozen=True):
    """Bind a function that has no driver to a native one."""

    address: PciAddress
    drivers: tuple[str, ...] = ()
    """The drivers that may take the function, the best first; empty if the kernel chooses."""
    required: bool = True
    """Whether the change fails if no driver takes the function."""

    @property
    def text(self) -> str:
        """The step as text."""
        return f"{self.address}: probe, for {self.drivers[0] if self.drivers else 'the driver that the kernel chooses'}"


DriverStep = LoadModule | Override | ClearOverride | Unlock | Unbind | Probe | Return


def _switched(*, on: bool) -> str:
    return "on" if on else "off"


class EnableVfs(msgspec.Struct, frozen=True):
    """Switch the VFs of a GPU on, which will carry its vGPUs."""

    gpu: PciAddress

    @property
    def text(self) -> str:
        """The step as text."""
        return f"{self.gpu}: switch its VFs on"


class DisableVfs(msgspec.Struct, frozen=True):
    """Switch the VFs of a GPU off, which are free and carry no vGPU."""

    gpu: PciAddress

    @property
    def text(self) -> str:
        """The step as text."""
        return f"{self.gpu}: switch its VFs off"


class RemoveVgpu(msgspec.Struct, frozen=True):
    """Remove a vGPU that is free."""

    vgpu: VgpuId
    type: VgpuType
    parent: PciAddress

    @property
    def text(self) -> str:
        """The step as text."""
        return f"{self.parent}: remove {self.type} {self.vgpu}"


class CreateVgpu(msgspec.Struct, frozen=True):
    """Create a vGPU."""

    vgpu: VgpuId
    type: VgpuType
    parent: PciAddress

    @property
    def text(self) -> str:
        """The step as text."""
        return f"{self.parent}: create {self.type} {self.vgpu}"


class SetMixedSizes(msgspec.Struct, frozen=True):
    """Switch mixed sizes of a GPU that carries no vGPU."""

    gpu: PciAddress
    on: bool

    @property
    def text(self) -> str:
        """The step as text."""
        return f"{self.gpu}: switch mixed sizes {_switched(on=self.on)}"


class SetMigMode(msgspec.Struct, frozen=True):
    """Switch MIG mode of a GPU that carries no vGPU and is free."""

    gpu: PciAddress
    on: bool

    @property
    def text(self) -> str:
        """The step as text."""
        return f"{self.gpu}: switch MIG mode {_switched(on=self.on)}"


class DestroyInstance(msgspec.Struct, frozen=True):
    """Destroy a GPU instance that carries no vGPU."""

    gpu: PciAddress
    instance: int
    profile: str

    @property
    def text(self) -> str:
        """The step as text."""
        return f"{self.gpu}: destroy GPU instance {self.instance} ({self.profile})"


class CreateInstance(msgspec.Struct, frozen=True):
    """Create a GPU instance for MIG-backed vGPUs."""

    gpu: PciAddress
    profile: str
    start: int
    """The first memory slice of the instance."""

    @property
    def text(self) -> str:
        """The step as text."""
        return f"{self.gpu}: create a GPU instance {self.profile} at slice {self.start}"


class SetScheduler(msgspec.Struct, frozen=True):
    """Set the scheduler of a GPU while no VM runs on its vGPUs."""

    gpu: PciAddress
    scheduler: Scheduler

    @property
    def text(self) -> str:
        """The step as text."""
        return f"{self.gpu}: set the vGPU scheduler to {self.scheduler.text}"


ModeStep = SetMixedSizes | SetMigMode
VfStep = EnableVfs | DisableVfs
VgpuStep = VfStep | RemoveVgpu | ModeStep | DestroyInstance | CreateInstance | CreateVgpu | SetScheduler
Step = DriverStep | VgpuStep


class RollBack(msgspec.Struct, frozen=True):
    """A mark: the steps that follow undo those of a failed change."""

    subject: str

    @property
    def text(self) -> str:
        """The mark as text."""
        return f"{self.subject}: roll back"
