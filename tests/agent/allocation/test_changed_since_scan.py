"""Changes of a device's group or of a vGPU's parent since the last scan of the host refuse its allocation."""

import errno
from pathlib import Path

import pytest

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

A10, GPU, OTHER = "nvidia.com/GA102GL_A10", "0000:65:00.0", PciAddress("0000:66:00.0")
MEMBERS = HostPath("/sys/kernel/iommu_groups/12/devices")
L40S_12Q, PARENT = "nvidia.com/NVIDIA_L40S-12Q", PciAddress("0000:25:00.4")


@pytest.mark.parametrize(("error", "code"), [(errno.EIO, ReasonCode.UNREAD), (errno.ENOENT, ReasonCode.GROUP_CHANGED)])
async def test_a_device_whose_group_members_are_unread_or_gone_is_refused(
    two_a10: SimNode, error: int, code: ReasonCode
) -> None:
    two_a10.kernel.faults.fail(MEMBERS, error)
    assert two_a10.refused(A10, [GPU]) is code
    two_a10.kernel.faults.heal()
    two_a10.allocate(A10, [GPU])


async def test_a_vgpu_whose_parent_has_an_unread_driver_is_refused(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("4xL40S"), tmp_path) as node:
        node.kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{PARENT}/driver"), errno.EIO)
        assert node.refused(L40S_12Q, [PARENT]) is ReasonCode.UNREAD


@pytest.mark.parametrize("driver", [None, "vfio-pci"])
async def test_a_vgpu_whose_parent_has_lost_its_driver_is_refused(
    simulated: Simulated, tmp_path: Path, driver: str | None
) -> None:
    async with running_node(simulated("4xL40S"), tmp_path) as node:
        node.kernel.rebind(PARENT, driver)
        assert node.refused(L40S_12Q, [PARENT]) is ReasonCode.DRIVER_CHANGED


async def test_a_vgpu_that_was_removed_is_refused(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("4xL40S"), tmp_path) as node:
        node.kernel.write(HostPath(f"/sys/bus/pci/devices/{PARENT}/nvidia/current_vgpu_type"), b"0")
        assert node.refused(L40S_12Q, [PARENT]) is ReasonCode.TYPE_CHANGED


async def test_a_device_is_judged_by_itself_after_another_member_of_its_group_was_unplugged(tmp_path: Path) -> None:
    slots = tuple(SlotSpec(at=at, board="A10", group=12, numa=0, driver="vfio-pci") for at in (GPU, OTHER))
    kernel = build_host(HostSpec(about="two A10 in one group", iommufd=True, slots=slots))
    async with running_node(kernel, tmp_path) as node:
        await node.report_account()
        kernel.unplug(OTHER)
        kernel.start_vm(IommuGroup(12))
        assert node.refused(A10, [GPU]) is ReasonCode.IN_USE_ELSEWHERE
