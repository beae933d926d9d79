"""What is wished of a GPU that carries vGPUs, and the steps that are taken toward it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.vgpu import Scheduler
from gpuvirt.model.profiles import host_type, parse_profile
from gpuvirt.model.reasons import Reason
from gpuvirt.model.vgpuentries import Sizes


@dataclass(frozen=True, slots=True)
class CarveWish:
    """What is wished of one GPU."""

    types: Mapping[str, int] = field(default_factory=dict)
    """How many of each type, as somebody has named it: `A10-4Q` as configs do, or `NVIDIA A10-4Q` as the host does."""
    sizes: Sizes | None = None
    """None leaves alone whether vGPUs of several sizes may be on it."""
    scheduler: Scheduler | None = None
    """None leaves its scheduler alone."""
    whole: bool = False
    """Whether it is to be had whole: it carries nothing then, and its VFs are off."""


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

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.gpu}: create a GPU instance {self.profile}"


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
CarveStep = VfStep | RemoveVgpu | ModeStep | DestroyInstance | CreateInstance | CreateVgpu | SetScheduler


@dataclass(frozen=True, slots=True)
class CarvePlan:
    """What is to be done to one GPU."""

    gpu: PciAddress
    steps: tuple[CarveStep, ...] = ()
    pending: tuple[Reason, ...] = ()
    """What is waited for; the steps are what can be done meanwhile."""
    refusals: tuple[Reason, ...] = ()
    """Why nothing is done; there are no steps then."""
    unwanted: frozenset[VgpuId] = frozenset()
    """The vGPUs that are to go, now or when they are free."""

    @property
    def met(self) -> bool:
        """Whether the GPU carries what is wanted, and nothing else."""
        return not (self.steps or self.pending or self.refusals)

    @property
    def destroys(self) -> bool:
        """Whether its steps touch anything that is there, which a pod may have."""
        return any(not isinstance(step, CreateInstance | CreateVgpu | SetScheduler) for step in self.steps)


def meant(name: str, known: Iterable[VgpuType]) -> VgpuType | None:
    """Return which of the types that a host knows somebody has named, by its own name or that of configs."""
    known = tuple(known)
    if VgpuType(name) in known:
        return VgpuType(name)
    try:
        return host_type(parse_profile(name), known)
    except InvalidIdError:
        return None
