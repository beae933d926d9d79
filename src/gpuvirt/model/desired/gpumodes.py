"""The desired modes of GPUs, from the settings and the cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class DesiredMode(StrEnum):
    """The modes that an admin can set for a GPU."""

    UNMANAGED = "unmanaged"
    """gpuvirt does not change the GPU."""
    PASSTHROUGH = "passthrough"
    """On a VFIO driver, for one VM as a whole."""
    CONTAINER = "container"
    """On its native driver, for containers and the host."""
    VGPU = "vgpu"
    """On the driver that creates vGPUs; the existing vGPUs are offered."""


@dataclass(frozen=True, slots=True)
class Modes:
    """The desired modes of the GPUs of a node."""

    default: DesiredMode = DesiredMode.UNMANAGED
    by_gpu: Mapping[str, DesiredMode] = field(default_factory=dict)
    """The desired modes of single GPUs."""

    def of(self, gpu: str) -> DesiredMode:
        """Return the desired mode of a GPU."""
        return self.by_gpu.get(gpu, self.default)

    @property
    def are_at_odds(self) -> bool:
        """Whether container and vgpu are both desired: each needs the kernel module nvidia.ko of another driver."""
        return {DesiredMode.CONTAINER, DesiredMode.VGPU} <= {self.default, *self.by_gpu.values()}
