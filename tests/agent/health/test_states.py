"""Each fault that makes a device unhealthy: detected in time, with its reason, and cleared after the fault ends."""

from pathlib import Path

import pytest

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.facts.pci import GRACE_DRIVER
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.function import resource
from gpuvirt_sim.files.blocking import WouldBlock
from gpuvirt_sim.files.tree import Link, constant
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

A10 = "nvidia.com/GA102GL_A10"
FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")


async def test_both_gpus_of_the_host_are_healthy(two_a10: SimNode) -> None:
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}


async def test_a_deleted_group_node_is_detected_within_two_seconds(two_a10: SimNode) -> None:
    two_a10.kernel.delete_node(IommuGroup(12))
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {FIRST: False, SECOND: True}}
    assert two_a10.reasons(FIRST) == [ReasonCode.NODE_MISSING]
    two_a10.kernel.restore_node(IommuGroup(12))
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}


async def test_a_gpu_on_its_native_driver_is_withdrawn_within_two_seconds(two_a10: SimNode) -> None:
    two_a10.kernel.rebind(FIRST, "nvidia")
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {SECOND: True}}
    assert two_a10.reasons(FIRST) == [ReasonCode.NATIVE_DRIVER]
    two_a10.kernel.rebind(FIRST, "vfio-pci")
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}


@pytest.mark.parametrize(
    ("host", "gpu", "first"),
    [("2xA10", FIRST, f"gpuvirt vfio bind {FIRST}, "), ("vm-2xV100", PciAddress("0000:02:00.0"), "gpuvirt doctor ")],
)
async def test_a_gpu_is_bound_for_vms_once_a_vm_could_have_it(
    simulated: Simulated, tmp_path: Path, host: str, gpu: PciAddress, first: str
) -> None:
    """A GPU of the host is in no IOMMU group where the host is a VM without an IOMMU: no VFIO driver takes it."""
    kernel = simulated(host)
    kernel.rebind(gpu, "nvidia")
    async with running_node(kernel, tmp_path) as node:
        (fix,) = (reason.fix for found in node.view.gpus if found.address == gpu for reason in found.reasons)
        assert str(fix).startswith(first)


async def test_an_unbound_gpu_is_withdrawn_with_its_reason(two_a10: SimNode) -> None:
    two_a10.kernel.rebind(FIRST, None)
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {SECOND: True}}
    assert two_a10.reasons(FIRST) == [ReasonCode.NO_DRIVER]


async def test_an_unplugged_gpu_is_withdrawn_until_it_returns(two_a10: SimNode) -> None:
    two_a10.kernel.unplug(FIRST)
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {SECOND: True}}
    two_a10.kernel.plug_in(FIRST)
    two_a10.kernel.rebind(FIRST, "vfio-pci")
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}


async def test_the_list_is_empty_after_the_last_gpu_was_unplugged(two_a10: SimNode) -> None:
    two_a10.kernel.unplug(FIRST)
    two_a10.kernel.unplug(SECOND)
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {}}


async def test_a_gpu_that_fell_off_the_bus_is_unhealthy_after_two_scans(two_a10: SimNode) -> None:
    two_a10.kernel.fall_off_bus(FIRST)
    await two_a10.advance(9.5)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}, "a device under reset reads the same"
    await two_a10.advance(2)
    assert two_a10.reasons(FIRST) == [ReasonCode.FELL_OFF_BUS]
    assert two_a10.offered == {A10: {FIRST: False, SECOND: True}}
    two_a10.kernel.fall_off_bus(FIRST, fallen=False)
    await two_a10.advance(12)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}


async def test_a_gpu_whose_memory_has_no_address_is_unhealthy_and_one_whose_bars_cannot_be_read_is_not(
    two_a10: SimNode,
) -> None:
    file = two_a10.kernel.tree.real_path(HostPath(f"/sys/bus/pci/devices/{FIRST}/resource"))
    before = two_a10.kernel.tree.find(file)
    two_a10.kernel.tree.place(file, constant(resource(unassigned=True)))
    await two_a10.advance(12)
    assert two_a10.reasons(FIRST) == [ReasonCode.BAR_UNASSIGNED]
    assert two_a10.offered == {A10: {FIRST: False, SECOND: True}}
    two_a10.kernel.tree.place(file, constant("odd"))
    await two_a10.advance(12)
    assert two_a10.reasons(FIRST) == [ReasonCode.BAR_UNASSIGNED], "unknown: as before"
    two_a10.kernel.tree.place(file, before)
    await two_a10.advance(12)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}


async def test_a_gpu_stays_healthy_during_a_reset(two_a10: SimNode) -> None:
    two_a10.kernel.fall_off_bus(FIRST)
    await two_a10.advance(9.5)
    two_a10.kernel.fall_off_bus(FIRST, fallen=False)
    await two_a10.advance(20)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}
    assert two_a10.agent.telemetry.observations["brief", "debounce"] == 1


async def test_a_gpu_that_another_program_unbinds_under_its_vm_is_reported_and_left_alone(two_a10: SimNode) -> None:
    two_a10.hold(A10, FIRST)
    await two_a10.report_account()
    process = two_a10.kernel.start_vm(IommuGroup(12))
    await two_a10.advance(61)
    with pytest.raises(WouldBlock):
        two_a10.kernel.rebind(FIRST, "nvidia")
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {FIRST: False, SECOND: True}}, "the kubelet may start the pod's container again"
    assert two_a10.reasons(FIRST) == [ReasonCode.UNBIND_PENDING]
    await two_a10.advance(120)
    assert two_a10.offered == {A10: {FIRST: False, SECOND: True}}
    two_a10.kernel.end_vm(process)
    two_a10.free(FIRST)
    await two_a10.report_account()
    await two_a10.report_account()
    await two_a10.advance(61)
    assert two_a10.offered == {A10: {SECOND: True}}
    assert two_a10.reasons(FIRST) == [ReasonCode.NO_DRIVER]


async def test_an_allocated_gpu_that_was_unplugged_stays_listed_until_the_pod_ends(two_a10: SimNode) -> None:
    two_a10.hold(A10, FIRST)
    await two_a10.report_account()
    two_a10.kernel.unplug(FIRST)
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {FIRST: False, SECOND: True}}
    assert two_a10.reasons(FIRST) == [ReasonCode.DEVICE_GONE]
    two_a10.free(FIRST)
    await two_a10.report_account()
    await two_a10.report_account()
    assert two_a10.offered == {A10: {SECOND: True}}


async def test_an_allocated_gpu_that_was_rebound_stays_listed_until_the_pod_ends(two_a10: SimNode) -> None:
    two_a10.hold(A10, FIRST)
    await two_a10.report_account()
    two_a10.kernel.rebind(FIRST, "nvidia")
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {FIRST: False, SECOND: True}}
    assert two_a10.reasons(FIRST) == [ReasonCode.DRIVER_CHANGED]


GH200 = PciAddress("0009:01:00.0")


async def test_a_grace_gpu_on_vfio_pci_is_unhealthy_unless_a_pod_has_it(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xGH200")
    kernel.rebind(GH200, "vfio-pci")
    async with running_node(kernel, tmp_path / "one") as node:
        ((name, devices),) = node.offered.items()
        assert devices[GH200] is False
        assert node.reasons(GH200) == [ReasonCode.GRACE_DRIVER_MISSING]
        node.kernel.rebind(GH200, GRACE_DRIVER)
        await node.advance(2)
        assert node.offered[name][GH200] is True
        node.hold(name, GH200)
        await node.report_account()
        node.kernel.rebind(GH200, "vfio-pci")
        await node.advance(5)
        assert node.offered[name][GH200] is True, "a restarted kubelet would reject the pod that runs with it"
    async with running_node(kernel, tmp_path / "two", Settings(grace_without_driver=True)) as node:
        assert node.offered[name][GH200] is True


async def test_a_gpu_that_shows_the_console_is_unhealthy_until_it_does_not(two_a10: SimNode) -> None:
    tree, folder = two_a10.kernel.tree, two_a10.kernel.pci.functions[FIRST].folder
    tree.place(HostPath(f"{folder}/boot_vga"), constant("1"))
    tree.place(HostPath("/sys/class/graphics/fb0/device"), Link("../../../efi-framebuffer.0"))
    await two_a10.advance(61)
    assert two_a10.offered == {A10: {FIRST: False, SECOND: True}}
    assert two_a10.reasons(FIRST) == [ReasonCode.BOOT_CONSOLE]
    tree.remove(HostPath("/sys/class/graphics/fb0"))
    await two_a10.advance(61)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}
