"""GPUs in mode shared beside NVIDIA's device plugin, over gRPC on real sockets: a GPU is given by one of both."""

from pathlib import Path

from gpuvirt.facts.ids import PciAddress, ResourceName
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import ReasonCode
from gpuvirt_sim.devices.nvidia import gpu_uuid
from gpuvirt_sim.kubelet.containers import Container
from tests.agent.kubelet.foreignplugin import kubevirt_offers
from tests.agent.kubelet.kubeletnode import Cluster, cluster_on, until

VGPU = PciAddress("0000:02:00.0")
GPU = ResourceName("nvidia.com/gpu")


def offered(node: Cluster) -> dict[str, int]:
    return {str(gpu): int(units) for gpu, units in node.view.shared.capacity.items()}


def says(node: Cluster) -> str:
    reason = node.view.shared.gpus[0].withheld
    return reason.message if reason is not None else ""


async def test_units_go_as_nvidias_plugin_registers_the_gpu_and_stay_away_after_it_has_stopped(
    short_path: Path,
) -> None:
    async with cluster_on("vm-V100-8Q", short_path, Settings(mode=DesiredMode.SHARED)) as node:
        await until(lambda: offered(node) == {gpu_uuid(VGPU): 500})
        async with kubevirt_offers(short_path, GPU, (gpu_uuid(VGPU),)):
            await until(lambda: not offered(node))
            await node.kubelet.run_pod("train", Container("main", {GPU: 1}))
            assert "is offered as nvidia.com/gpu by another device plugin" in says(node)
            assert [reason.code for reason in node.view.gpus[0].reasons] == [ReasonCode.REGISTERED_ELSEWHERE]
        await until(lambda: node.kubelet.allocatable().get(GPU) == 0)
        node.kubelet.end_pod("train")
        asked = node.kubelet.listed
        await until(lambda: node.kubelet.listed >= asked + 3)  # it has decided by a reading that began after the end
        assert offered(node) == {}, "the kubelet's checkpoint has the plugin's devices until it forgets the plugin"
