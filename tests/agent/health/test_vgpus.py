"""Health of vGPUs that are removed or changed, or whose GPU fails."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.files.blocking import WouldBlock
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

T4_8Q = "nvidia.com/GRID_T4-8Q"
L40S_12Q = "nvidia.com/NVIDIA_L40S-12Q"
L40S_24Q = "nvidia.com/NVIDIA_L40S-24Q"


@pytest.fixture
async def t4(simulated: Simulated, tmp_path: Path) -> AsyncIterator[SimNode]:
    async with running_node(simulated("4xT4"), tmp_path) as node:
        yield node


@pytest.fixture
async def l40s(simulated: Simulated, tmp_path: Path) -> AsyncIterator[SimNode]:
    async with running_node(simulated("4xL40S"), tmp_path) as node:
        yield node


def mdevs(node: SimNode, resource: str) -> list[str]:
    return list(node.offered[resource])


async def test_existing_mdevs_are_offered_by_their_type(t4: SimNode) -> None:
    assert {name: len(devices) for name, devices in t4.offered.items()} == {"nvidia.com/GRID_T4-1Q": 4, T4_8Q: 3}


async def test_a_removed_mdev_is_withdrawn_within_two_seconds(t4: SimNode) -> None:
    first, *others = mdevs(t4, T4_8Q)
    t4.kernel.write(HostPath(f"/sys/bus/mdev/devices/{first}/remove"), b"1")
    await t4.advance(2)
    assert t4.offered[T4_8Q] == dict.fromkeys(others, True)


async def test_a_created_mdev_is_offered_within_two_seconds(t4: SimNode) -> None:
    path = "/sys/class/mdev_bus/0000:86:00.0/mdev_supported_types/nvidia-233/create"
    t4.kernel.write(HostPath(path), b"aaaaaaaa-0000-4000-8000-000000000001\n")
    await t4.advance(2)
    assert t4.offered[T4_8Q]["aaaaaaaa-0000-4000-8000-000000000001"] is True


async def test_an_mdev_in_use_that_another_program_removes_stays_listed_and_unhealthy(t4: SimNode) -> None:
    first = mdevs(t4, T4_8Q)[0]
    t4.hold(T4_8Q, first)
    await t4.report_account()
    t4.kernel.start_vm(t4.kernel.mdev.devices[first].group)
    with pytest.raises(WouldBlock):
        t4.kernel.write(HostPath(f"/sys/bus/mdev/devices/{first}/remove"), b"1")
    await t4.advance(2)
    assert t4.offered[T4_8Q][first] is False
    assert t4.reasons(first) == [ReasonCode.DEVICE_GONE]


async def test_an_mdev_without_its_group_node_is_unhealthy(t4: SimNode) -> None:
    first = mdevs(t4, T4_8Q)[0]
    t4.kernel.delete_node(t4.kernel.mdev.devices[first].group)
    await t4.advance(2)
    assert t4.reasons(first) == [ReasonCode.NODE_MISSING]


async def test_the_vgpus_of_a_gpu_that_fell_off_the_bus_are_unhealthy(t4: SimNode) -> None:
    t4.kernel.fall_off_bus(PciAddress("0000:3b:00.0"))
    await t4.advance(13)
    assert sorted(t4.offered[T4_8Q].values()) == [False, False, True]


async def test_vfs_with_a_vgpu_type_are_offered_by_their_type(l40s: SimNode) -> None:
    assert {name: len(devices) for name, devices in l40s.offered.items()} == {L40S_12Q: 6, L40S_24Q: 2}
    assert "0000:25:00.4" in l40s.offered[L40S_12Q]


async def test_a_vf_with_a_new_vgpu_type_is_offered_by_its_new_type(l40s: SimNode) -> None:
    path = HostPath("/sys/bus/pci/devices/0000:5a:00.4/nvidia/current_vgpu_type")
    other = HostPath("/sys/bus/pci/devices/0000:5a:00.5/nvidia/current_vgpu_type")
    l40s.kernel.write(other, b"0")
    l40s.kernel.write(path, b"0")
    l40s.kernel.write(path, b"1156")
    await l40s.advance(2)
    assert l40s.offered[L40S_24Q] == {}
    assert l40s.offered[L40S_12Q]["0000:5a:00.4"] is True


async def test_an_allocated_vf_with_a_new_type_stays_in_its_resource_as_unhealthy(l40s: SimNode) -> None:
    vf = "0000:5a:00.4"
    l40s.hold(L40S_24Q, vf)
    await l40s.report_account()
    path = HostPath(f"/sys/bus/pci/devices/{vf}/nvidia/current_vgpu_type")
    l40s.kernel.write(HostPath("/sys/bus/pci/devices/0000:5a:00.5/nvidia/current_vgpu_type"), b"0")
    l40s.kernel.write(path, b"0")
    l40s.kernel.write(path, b"1156")
    await l40s.advance(2)
    assert l40s.offered[L40S_24Q] == {vf: False}
    assert vf not in l40s.offered[L40S_12Q], "a VF in two resources could be allocated to two pods"
    l40s.free(vf)
    await l40s.report_account()
    await l40s.report_account()
    await l40s.advance(2)
    assert l40s.offered[L40S_12Q][vf] is True
    assert l40s.offered[L40S_24Q] == {}


def name_no_types(kernel: SimKernel) -> None:
    """Hide all type names, as on a host without room for more vGPUs."""
    for function in kernel.pci.functions.values():
        if function.physfn is not None:
            kernel.faults.answer(HostPath(f"/sys/bus/pci/devices/{function.address}/nvidia/creatable_vgpu_types"), b"")


async def test_a_vgpu_whose_type_never_had_a_name_is_withheld(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xL40S")
    name_no_types(kernel)
    async with running_node(kernel, tmp_path, tools=SimTools(kernel, programs=())) as node:
        assert node.offered == {}
        assert node.reasons("0000:25:00.4") == [ReasonCode.UNREAD]
        kernel.faults.heal()
        await node.advance(61)
        assert {name: len(devices) for name, devices in node.offered.items()} == {L40S_12Q: 6, L40S_24Q: 2}


async def test_vgpu_types_keep_their_names_after_the_host_hides_them(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xL40S")
    async with running_node(kernel, tmp_path) as node:
        before = node.offered
        name_no_types(kernel)
        await node.advance(61)
        assert node.offered == before
    async with running_node(kernel, tmp_path) as node:
        assert node.offered == before, "after a restart too"


async def test_the_vgpus_of_a_pf_that_fell_off_the_bus_are_unhealthy(l40s: SimNode) -> None:
    l40s.kernel.fall_off_bus(PciAddress("0000:25:00.0"))
    await l40s.advance(13)
    assert sum(not healthy for healthy in l40s.offered[L40S_12Q].values()) == 4


async def test_an_mdev_of_a_device_that_is_no_gpu_is_reported(t4: SimNode) -> None:
    kernel = t4.kernel
    kernel.tree.make(HostPath("/sys/devices/virtual/mtty/mtty/83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"))
    kernel.tree.link(
        HostPath("/sys/bus/mdev/devices/83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"),
        HostPath("/sys/devices/virtual/mtty/mtty/83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"),
    )
    await t4.advance(11)
    assert [note.code for note in t4.view.problems] == [ReasonCode.MALFORMED_SYSFS_ENTRY]
    assert {name: len(devices) for name, devices in t4.offered.items()} == {"nvidia.com/GRID_T4-1Q": 4, T4_8Q: 3}


async def test_a_vgpu_without_an_iommu_group_is_withdrawn(t4: SimNode) -> None:
    first = mdevs(t4, T4_8Q)[0]
    t4.kernel.tree.remove(HostPath(f"{t4.kernel.mdev.devices[first].folder}/iommu_group"))
    await t4.advance(11)
    assert first not in t4.offered[T4_8Q]
    assert t4.reasons(first) == [ReasonCode.NO_IOMMU_GROUP]


async def test_a_vf_without_ids_in_its_configuration_space_is_healthy(l40s: SimNode) -> None:
    """By the SR-IOV specification a VF has the ids of its PF, and its configuration space has none."""
    vf = "0000:25:00.4"
    content = l40s.kernel.read(HostPath(f"/sys/bus/pci/devices/{vf}/config"))
    assert content[:4] == b"\xff\xff\xff\xff"
    assert l40s.offered[L40S_12Q][vf] is True
