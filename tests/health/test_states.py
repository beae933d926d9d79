"""Each way in which a device falls ill: seen in time, with its reason, and over when it is over."""

import pytest

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.sim.blocking import WouldBlock
from tests.simnode import SimNode

A10 = "nvidia.com/GA102GL_A10"
FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")


async def test_both_are_healthy_at_first(two_a10: SimNode) -> None:
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}


async def test_a_node_that_goes_and_returns_is_seen_within_two_seconds(two_a10: SimNode) -> None:
    two_a10.kernel.delete_node(IommuGroup(12))
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {FIRST: False, SECOND: True}}
    assert two_a10.reasons(FIRST) == [ReasonCode.NODE_MISSING]
    two_a10.kernel.restore_node(IommuGroup(12))
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}


async def test_a_rebind_to_a_native_driver_takes_the_device_out_within_two_seconds(two_a10: SimNode) -> None:
    two_a10.kernel.rebind(FIRST, "nvidia")
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {SECOND: True}}
    assert two_a10.reasons(FIRST) == [ReasonCode.NATIVE_DRIVER]
    two_a10.kernel.rebind(FIRST, "vfio-pci")
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}


async def test_an_unbound_device_says_so(two_a10: SimNode) -> None:
    two_a10.kernel.rebind(FIRST, None)
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {SECOND: True}}
    assert two_a10.reasons(FIRST) == [ReasonCode.NO_DRIVER]


async def test_an_unplugged_device_goes_and_comes_back(two_a10: SimNode) -> None:
    two_a10.kernel.unplug(FIRST)
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {SECOND: True}}
    two_a10.kernel.plug_in(FIRST)
    two_a10.kernel.rebind(FIRST, "vfio-pci")
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}


async def test_the_last_device_leaves_an_empty_list_and_no_unhealthy_ids(two_a10: SimNode) -> None:
    two_a10.kernel.unplug(FIRST)
    two_a10.kernel.unplug(SECOND)
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {}}


async def test_a_card_that_fell_off_the_bus_is_unhealthy_after_two_looks(two_a10: SimNode) -> None:
    two_a10.kernel.fall_off_bus(FIRST)
    await two_a10.advance(9.5)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}, "a device that is being reset answers so too"
    await two_a10.advance(2)
    assert two_a10.reasons(FIRST) == [ReasonCode.FELL_OFF_BUS]
    assert two_a10.offered == {A10: {FIRST: False, SECOND: True}}
    two_a10.kernel.fall_off_bus(FIRST, fallen=False)
    await two_a10.advance(12)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}


async def test_a_reset_that_passes_is_not_an_illness(two_a10: SimNode) -> None:
    two_a10.kernel.fall_off_bus(FIRST)
    await two_a10.advance(9.5)
    two_a10.kernel.fall_off_bus(FIRST, fallen=False)
    await two_a10.advance(20)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}
    assert two_a10.agent.telemetry.looks["brief", "debounce"] == 1


async def test_a_device_that_another_program_unbinds_under_its_vm_is_left_alone_and_says_so(two_a10: SimNode) -> None:
    two_a10.hold(A10, FIRST)
    await two_a10.report_account()
    process = two_a10.kernel.start_vm(IommuGroup(12))
    await two_a10.advance(61)
    with pytest.raises(WouldBlock):
        two_a10.kernel.rebind(FIRST, "nvidia")
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {FIRST: False, SECOND: True}}, "its pod's container may still be started again"
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


async def test_a_device_that_a_pod_has_and_that_is_unplugged_stays_listed_until_the_pod_ends(two_a10: SimNode) -> None:
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


async def test_a_device_that_a_pod_has_and_that_is_rebound_stays_listed_until_the_pod_ends(two_a10: SimNode) -> None:
    two_a10.hold(A10, FIRST)
    await two_a10.report_account()
    two_a10.kernel.rebind(FIRST, "nvidia")
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {FIRST: False, SECOND: True}}
    assert two_a10.reasons(FIRST) == [ReasonCode.DRIVER_CHANGED]
