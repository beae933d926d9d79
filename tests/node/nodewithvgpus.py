"""A node whose four T4 carry vGPUs, for tests of agents that change the vGPUs."""

from collections import Counter

from gpuvirt.facts.ids import PciAddress, ResourceName, VgpuId
from gpuvirt.hardware.scan import scan
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt_sim.kernel import SimKernel

VGPU = Settings(mode=DesiredMode.VGPU)
T4_8Q, T4_4Q = ResourceName("nvidia.com/GRID_T4-8Q"), ResourceName("nvidia.com/GRID_T4-4Q")
FIRST = PciAddress("0000:3b:00.0")


def types(kernel: SimKernel) -> Counter[str]:
    """Return how many vGPUs of each type there are."""
    hosts = scan(kernel).vgpu_hosts.values()
    return Counter(str(vgpu.type).rpartition(" ")[2] for host in hosts for vgpu in host.live)


def of(kernel: SimKernel, gpu: PciAddress) -> list[VgpuId]:
    """Return the vGPUs of a GPU."""
    return sorted(vgpu.id for vgpu in scan(kernel).vgpu_hosts[gpu].live)
