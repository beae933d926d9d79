"""The desired modes of GPUs, from the settings and the cluster."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class DesiredMode(StrEnum):
    """The modes that an admin can set for a GPU."""

    UNMANAGED = "unmanaged"
    """gpuvirt does not change the GPU."""
    PASSTHROUGH = "passthrough"
    """On a VFIO driver, for one VM as a whole."""
    CONTAINER = "container"
    """On its native driver, for containers and the host."""
    SHARED = "shared"
    """On its native driver, offered to pods in units of `nvidia.com/vgpu`."""
    VGPU = "vgpu"
    """On the driver that creates vGPUs; the existing vGPUs are offered."""
    ON_DEMAND = "on-demand"
    """On the driver that creates vGPUs; a vGPU is created when a pod requests its type, and removed when it ends."""

    CLAIMS = "claims"
    """Given to claims (DRA) in the shape that each asks for, and offered by no device plugin."""


FOR_CONTAINERS = (DesiredMode.CONTAINER, DesiredMode.SHARED)
"""The modes in which containers use a GPU by its native driver. They need no IOMMU, and may be mixed on one node."""
FOR_VGPUS = (DesiredMode.VGPU, DesiredMode.ON_DEMAND)
"""The modes in which a GPU carries vGPUs. They may be mixed on one node."""


class Modes(msgspec.Struct, frozen=True):
    """The desired modes of the GPUs of a node."""

    default: DesiredMode = DesiredMode.UNMANAGED
    by_gpu: Mapping[str, DesiredMode] = msgspec.field(default_factory=dict)
    """The desired modes of single GPUs."""

    def of(self, gpu: str) -> DesiredMode:
        """Return the desired mode of a GPU."""
        return self.by_gpu.get(gpu, self.default)

    @property
    def at_odds(self) -> str | None:
        """Two modes that can't be on one node, as text; None if there are none.

        Modes for containers and modes with vGPUs need the kernel module nvidia.ko, each from another driver.
        """
        modes = {self.default, *self.by_gpu.values()}
        for_containers = next((mode for mode in FOR_CONTAINERS if mode in modes), None)
        for_vgpus = next((mode for mode in FOR_VGPUS if mode in modes), None)
        if for_containers is None or for_vgpus is None:
            return None
        return f"{for_containers} and {for_vgpus}"
