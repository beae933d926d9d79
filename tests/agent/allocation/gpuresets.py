"""GPUs that can't be reset, and pods that have them one after another."""

from gpuvirt.facts.ids import PciAddress
from gpuvirt.paths import HostPath
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import SimNode

A10 = "nvidia.com/GA102GL_A10"
FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
SETTLED_S = 30.0


def methods_of(address: str) -> HostPath:
    return HostPath(f"/sys/bus/pci/devices/{address}/reset_method")


def without_reset(kernel: SimKernel, address: PciAddress = FIRST) -> SimKernel:
    """Remove every reset method of a function, as on a card without one."""
    folder = kernel.pci.functions[address].folder
    kernel.tree.remove(HostPath(f"{folder}/reset_method"))
    kernel.tree.remove(HostPath(f"{folder}/reset"))
    return kernel


async def allocate_and_end(node: SimNode, resource: str, device: str, pod: str = "vm-a") -> None:
    """Allocate a device to a pod, have the kubelet report the pod, and end the pod."""
    node.allocate(resource, [device])
    node.hold(resource, device, pod=pod)
    await report_account(node)
    node.free(device)
    await report_account(node)


async def report_account(node: SimNode) -> None:
    for _ in range(2):
        await node.advance(SETTLED_S)
        await node.report_account()
    await node.advance(SETTLED_S)
