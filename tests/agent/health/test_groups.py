"""A device is unhealthy if another member of its IOMMU group makes the group not viable."""

import errno
from pathlib import Path

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from tests.agent.node.simnode import running_node
from tests.sim.simulated import Simulated

RTX2060 = "nvidia.com/TU106_GEFORCE_RTX_2060_REV__A"
GPU, AUDIO = PciAddress("0000:04:00.0"), PciAddress("0000:04:00.1")


async def test_an_audio_function_on_its_native_driver_makes_the_gpu_unhealthy(
    simulated: Simulated, tmp_path: Path
) -> None:
    async with running_node(simulated("4xRTX2060"), tmp_path) as node:
        node.kernel.rebind(AUDIO, "snd_hda_intel")
        await node.advance(2)
        assert node.offered[RTX2060][GPU] is False
        assert node.reasons(GPU) == [ReasonCode.GROUP_NOT_VIABLE]
        assert "0000:04:00.1 (audio, snd_hda_intel)" in node.gpu(GPU).reasons[0].message
        node.kernel.rebind(AUDIO, "vfio-pci")
        await node.advance(2)
        assert node.offered[RTX2060][GPU] is True


async def test_a_short_rebind_of_another_member_keeps_the_gpu_healthy(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("4xRTX2060"), tmp_path) as node:
        node.kernel.rebind(AUDIO, "snd_hda_intel")
        await node.advance(0.5)
        node.kernel.rebind(AUDIO, "vfio-pci")
        await node.advance(5)
        assert node.offered[RTX2060][GPU] is True
        assert node.reasons(GPU) == []


async def test_a_group_that_was_never_viable_is_unhealthy_at_once(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xRTX2060")
    kernel.rebind(AUDIO, "snd_hda_intel")
    async with running_node(kernel, tmp_path) as node:
        assert node.offered[RTX2060][GPU] is False


async def test_a_member_without_a_driver_keeps_the_gpu_healthy(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("4xRTX2060"), tmp_path) as node:
        node.kernel.rebind(AUDIO, None)
        await node.advance(2)
        assert node.offered[RTX2060][GPU] is True


async def test_a_member_whose_driver_cannot_be_read_makes_the_gpu_unhealthy(
    simulated: Simulated, tmp_path: Path
) -> None:
    async with running_node(simulated("4xRTX2060"), tmp_path) as node:
        node.kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{AUDIO}/driver"), errno.EIO)
        await node.advance(15)
        assert node.offered[RTX2060][GPU] is False
        assert node.reasons(GPU) == [ReasonCode.UNREAD]


async def test_a_bridge_in_a_group_keeps_its_gpus_healthy(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("2xRTX4090-one-group"), tmp_path) as node:
        await node.report_account()
        assert node.offered == {
            "nvidia.com/AD102_GEFORCE_RTX_4090": {"0000:0b:01.0": True, "0000:0b:02.0": True, "0000:0c:00.0": True}
        }
