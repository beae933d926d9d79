"""The place of NVIDIA's vGPU manager, which contains nvidia-smi and sriov-manage, on a simulated host."""

from enum import StrEnum

from gpuvirt.paths import HostPath


class VgpuManager(StrEnum):
    """Where the vGPU manager is installed."""

    HOST = "host"
    CONTAINER = "container"
    NONE = "none"

    @property
    def root(self) -> HostPath | None:
        """The root of its programs; None without programs."""
        roots = {VgpuManager.HOST: HostPath("/"), VgpuManager.CONTAINER: HostPath("/run/nvidia/driver")}
        return roots.get(self)
