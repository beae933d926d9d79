"""A node whose four T4 carry vGPUs, for tests of agents that change the vGPUs."""

from collections import Counter

from gpuvirt.agent.cluster.gpunode import status_of
from gpuvirt.facts.ids import PciAddress, ResourceName, VgpuId
from gpuvirt.hardware.scan import scan
from gpuvirt.kube.kinds.gpunode import GpuNode
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt_sim.clock import BEGINNING
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import SimNode

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


async def ask(node: SimNode, mode: DesiredMode, config: str | None) -> None:
    """Set the spec of the node's GpuNode, and let the agent follow it."""
    request = NodeRequest(configs=Observed(None), spec=Observed(GpuNodeSpec(mode, vgpu_config=config)))
    node.agent.observations.take_request(request)
    for _ in range(3):
        await node.advance(2)
        await node.report_account()
        await node.advance(30)


def reported(node: SimNode) -> GpuNode:
    empty = GpuNode(metadata=Metadata(name="node01"))
    return GpuNode(metadata=Metadata(name="node01"), status=status_of(node.view, empty, BEGINNING))


async def give_first_vgpu(node: SimNode) -> None:
    """Have a T4 carry two 8Q, of which a VM gets the first."""
    await ask(node, DesiredMode.VGPU, "T4-8Q")
    vgpu = of(node.kernel, FIRST)[0]
    node.allocate(T4_8Q, [vgpu])
    node.hold(T4_8Q, vgpu, pod="virt-launcher-vm-a-x2x4c")
    await node.report_account()
    await node.advance(10)
