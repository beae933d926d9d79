"""The desired state of GPUs: the driver that a GPU is bound to, and the vGPUs that it carries."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.vgpu import Scheduler
from gpuvirt.model.desired.vgpuconfig import Sizes


class DesiredDriver(StrEnum):
    """The desired kind of driver of a GPU. A GPU without a desired driver keeps its driver."""

    PASSTHROUGH = "passthrough"
    """A VFIO driver, for VMs."""
    NATIVE = "native"
    """The driver that the GPU had before, for the host, containers and vGPUs."""


DesiredDrivers = Mapping[PciAddress, DesiredDriver]


class DesiredVgpus(msgspec.Struct, frozen=True):
    """The vGPUs that are desired on one GPU."""

    types: Mapping[str, int] = msgspec.field(default_factory=dict)
    """The number of vGPUs of each type. A type has its name in a config (`A10-4Q`) or on the host (`NVIDIA A10-4Q`)."""
    sizes: Sizes | None = None
    """Whether vGPUs of several sizes may share the GPU. None keeps the GPU's setting."""
    scheduler: Scheduler | None = None
    """None keeps the GPU's scheduler."""
    whole: bool = False
    """Whether the GPU is used whole: it then carries no vGPU, and its VFs are switched off."""
    on_demand: bool = False
    """Whether the GPU carries the vGPUs that are allocated to pods, and no others; `types` is empty then."""
    added: int = 0
    """How many of `types` a command adds to the existing ones; 0 for a vGPU config."""


class DesiredGpu(msgspec.Struct, frozen=True):
    """The desired state of one GPU. A field that is None keeps what the GPU has."""

    driver: DesiredDriver | None = None
    vgpus: DesiredVgpus | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the GPU is used whole, so that its vGPUs are removed."""
        return self.vgpus is not None and self.vgpus.whole


VGPUS = "vgpus"
"""Stands for other vGPUs on a GPU, in what a command changes."""

DesiredUnit = Mapping[PciAddress, DesiredGpu]
"""The desired state of the GPUs of one isolation unit, which have one plan."""


def desired_drivers(desired: DesiredUnit) -> DesiredDrivers:
    """Return the desired drivers of the GPUs of an isolation unit."""
    return {gpu: target.driver for gpu, target in desired.items() if target.driver is not None}
