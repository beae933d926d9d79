"""What is refused, with its reason; and of a request of which something is refused nothing is given."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.settings import Compat, Settings
from gpuvirt.node.broker import AllocationRefusedError
from gpuvirt.paths import HostPath
from gpuvirt.sim.kernel import SimKernel
from simnode import SimNode, running_node

Machine = Callable[[str], SimKernel]

A10 = "nvidia.com/GA102GL_A10"
FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")


async def test_unknown_devices_and_resources(two_a10: SimNode) -> None:
    assert two_a10.refused(A10, ["0000:01:00.0"]) is ReasonCode.UNKNOWN_DEVICE
    assert two_a10.refused(A10, ["../../etc/passwd"]) is ReasonCode.UNKNOWN_DEVICE
    assert two_a10.refused("nvidia.com/GH100", [FIRST]) is ReasonCode.UNKNOWN_RESOURCE


async def test_an_unhealthy_device(two_a10: SimNode) -> None:
    two_a10.kernel.delete_node(IommuGroup(12))
    await two_a10.advance(2)
    assert two_a10.refused(A10, [FIRST]) is ReasonCode.NODE_MISSING


# What follows happens between the last look at the host and the request.


async def test_a_device_that_was_rebound_a_moment_ago(two_a10: SimNode) -> None:
    two_a10.kernel.rebind(FIRST, "nvidia")
    with pytest.raises(AllocationRefusedError, match="is bound to nvidia now") as refusal:
        two_a10.allocate(A10, [FIRST])
    assert refusal.value.reason.code is ReasonCode.DRIVER_CHANGED


async def test_a_device_that_was_unplugged_a_moment_ago(two_a10: SimNode) -> None:
    two_a10.kernel.unplug(FIRST)
    assert two_a10.refused(A10, [FIRST]) is ReasonCode.DEVICE_GONE


async def test_another_card_in_the_same_slot(two_a10: SimNode) -> None:
    two_a10.kernel.faults.answer(HostPath(f"/sys/bus/pci/devices/{FIRST}/device"), b"0x1eb8\n")
    assert two_a10.refused(A10, [FIRST]) is ReasonCode.IDENTITY_CHANGED


async def test_another_group(two_a10: SimNode) -> None:
    function = two_a10.kernel.pci.functions[FIRST]
    two_a10.kernel.tree.link(HostPath(f"{function.folder}/iommu_group"), HostPath("/sys/kernel/iommu_groups/22"))
    assert two_a10.refused(A10, [FIRST]) is ReasonCode.GROUP_CHANGED


async def test_a_device_that_cannot_be_read(two_a10: SimNode) -> None:
    two_a10.kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{FIRST}/driver"), errno.EIO)
    assert two_a10.refused(A10, [FIRST]) is ReasonCode.UNREAD


async def test_a_neighbour_that_was_given_back_to_the_host(machine: Machine, tmp_path: Path) -> None:
    async with running_node(machine("4xRTX2060"), tmp_path) as node:
        node.kernel.rebind(PciAddress("0000:04:00.1"), "snd_hda_intel")
        name = "nvidia.com/TU106_GEFORCE_RTX_2060_REV__A"
        assert node.refused(name, ["0000:04:00.0"]) is ReasonCode.GROUP_NOT_VIABLE


async def test_a_device_that_a_process_has_open_with_the_process_named(two_a10: SimNode) -> None:
    process = two_a10.kernel.start_machine(IommuGroup(12))
    with pytest.raises(AllocationRefusedError, match=rf"in use by qemu-system-x86 \(pid {process.pid}\)"):
        two_a10.allocate(A10, [FIRST])
    two_a10.kernel.end_machine(process)
    assert two_a10.allocate(A10, [FIRST])


async def test_where_it_cannot_be_told_whether_a_device_is_in_use_it_is_given(two_a10: SimNode) -> None:
    two_a10.kernel.faults.fail(HostPath("/dev/vfio/12"), errno.EPERM)
    assert two_a10.allocate(A10, [FIRST])


async def test_of_a_request_with_one_bad_device_nothing_is_given(two_a10: SimNode) -> None:
    two_a10.kernel.rebind(SECOND, "nvidia")
    assert two_a10.refused(A10, [FIRST], [SECOND]) is ReasonCode.DRIVER_CHANGED
    await two_a10.advance(1)
    assert two_a10.gpu(FIRST).users == ()


async def test_what_a_refusal_has_met_others_hear_of_at_once(two_a10: SimNode) -> None:
    two_a10.kernel.faults.answer(HostPath(f"/sys/bus/pci/devices/{FIRST}/device"), b"0x1eb8\n")
    two_a10.refused(A10, [FIRST])
    await two_a10.advance(0.2)
    assert two_a10.offered == {A10: {SECOND: True}, "nvidia.com/TU104GL_TESLA_T4": {FIRST: True}}


async def test_an_mdev_of_another_type_and_one_that_is_gone(machine: Machine, tmp_path: Path) -> None:
    async with running_node(machine("4xT4"), tmp_path) as node:
        name = "nvidia.com/GRID_T4-8Q"
        first, second, *_ = node.offered[name]
        node.kernel.faults.answer(HostPath(f"/sys/bus/mdev/devices/{first}/mdev_type/name"), b"GRID T4-16Q\n")
        node.kernel.write(HostPath(f"/sys/bus/mdev/devices/{second}/remove"), b"1")
        assert node.refused(name, [first]) is ReasonCode.TYPE_CHANGED
        assert node.refused(name, [second]) is ReasonCode.DEVICE_GONE


async def test_mismatched_vgpus_are_left_out_for_those_who_want_it_back(machine: Machine, tmp_path: Path) -> None:
    settings = Settings(compat=Compat(drop_mismatched_vgpus=True))
    async with running_node(machine("4xT4"), tmp_path, settings) as node:
        name = "nvidia.com/GRID_T4-8Q"
        first, second, *_ = node.offered[name]
        node.kernel.write(HostPath(f"/sys/bus/mdev/devices/{second}/remove"), b"1")
        (answer,) = node.allocate(name, [first, second])
        assert answer.env == {"MDEV_PCI_RESOURCE_NVIDIA_COM_GRID_T4-8Q": first}


async def test_a_vf_whose_type_was_taken_away(machine: Machine, tmp_path: Path) -> None:
    async with running_node(machine("4xL40S"), tmp_path) as node:
        node.kernel.write(HostPath("/sys/bus/pci/devices/0000:25:00.4/nvidia/current_vgpu_type"), b"0")
        assert node.refused("nvidia.com/NVIDIA_L40S-12Q", ["0000:25:00.4"]) is ReasonCode.TYPE_CHANGED


async def test_refusals_are_counted_by_their_reason(two_a10: SimNode) -> None:
    two_a10.refused(A10, ["0000:01:00.0"])
    two_a10.allocate(A10, [FIRST])
    assert two_a10.agent.telemetry.allocations == {(A10, "UnknownDevice"): 1, (A10, "given"): 1}
