"""The modes in which GPUs are wanted, by the settings and the cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class DesiredMode(StrEnum):
    """What an admin may want of a GPU."""

    UNMANAGED = "unmanaged"
    """Whatever it is; nothing is done to it."""
    PASSTHROUGH = "passthrough"
    """Whole, for virtual machines."""
    CONTAINER = "container"
    """With its native driver, for containers and the host."""
    VGPU = "vgpu"
    """With the driver that makes vGPUs of it; those that exist are offered."""


@dataclass(frozen=True, slots=True)
class Modes:
    """What is wanted of the GPUs of a node."""

    default: DesiredMode = DesiredMode.UNMANAGED
    by_gpu: Mapping[str, DesiredMode] = field(default_factory=dict)
    """What is wanted of single GPUs instead."""

    def of(self, gpu: str) -> DesiredMode:
        """Return what is wanted of a GPU."""
        return self.by_gpu.get(gpu, self.default)

    @property
    def are_at_odds(self) -> bool:
        """Whether some need what others can't be beside: the kernel module nvidia.ko, each from another driver."""
        return {DesiredMode.CONTAINER, DesiredMode.VGPU} <= {self.default, *self.by_gpu.values()}
