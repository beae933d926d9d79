"""What is desired of GPUs: the driver that a GPU is bound to, and the vGPUs that it carries."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.vgpu import Scheduler
from gpuvirt.model.desired.vgpuentries import Sizes


class DesiredDriver(StrEnum):
    """The kind of driver that is desired for a GPU; a GPU without one is left alone."""

    PASSTHROUGH = "passthrough"
    """A VFIO driver, for VMs."""
    NATIVE = "native"
    """The driver that the GPU had before, for the host, containers and vGPUs."""


DesiredDrivers = Mapping[PciAddress, DesiredDriver]


@dataclass(frozen=True, slots=True)
class DesiredVgpus:
    """The vGPUs that are desired on one GPU."""

    types: Mapping[str, int] = field(default_factory=dict)
    """How many of each type, as a config (`A10-4Q`) or the host (`NVIDIA A10-4Q`) names it."""
    sizes: Sizes | None = None
    """None leaves alone whether vGPUs of several sizes may be on the GPU."""
    scheduler: Scheduler | None = None
    """None leaves the scheduler alone."""
    whole: bool = False
    """Whether the GPU is used whole: it carries no vGPU then, and its VFs are off."""


@dataclass(frozen=True, slots=True)
class DesiredGpu:
    """What is desired of one GPU; what is None is left alone."""

    driver: DesiredDriver | None = None
    vgpus: DesiredVgpus | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the GPU is used whole, and what it carries goes for that."""
        return self.vgpus is not None and self.vgpus.whole


DesiredUnit = Mapping[PciAddress, DesiredGpu]
"""What is desired of the GPUs of one isolation unit, which are planned for together."""


def desired_drivers(desired: DesiredUnit) -> DesiredDrivers:
    """Return the drivers that are desired for the GPUs of a unit."""
    return {gpu: target.driver for gpu, target in desired.items() if target.driver is not None}
