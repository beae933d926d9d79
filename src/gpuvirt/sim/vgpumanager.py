"""Where NVIDIA's vGPU manager, which brings nvidia-smi and sriov-manage, is on a simulated host."""

from enum import StrEnum

from gpuvirt.paths import HostPath


class VgpuManager(StrEnum):
    """The places."""

    HOST = "host"
    CONTAINER = "container"
    NONE = "none"

    @property
    def root(self) -> HostPath | None:
        """The root of its programs; None where there are none."""
        roots = {VgpuManager.HOST: HostPath("/"), VgpuManager.CONTAINER: HostPath("/run/nvidia/driver")}
        return roots.get(self)
