"""Devices in use by a process outside of pods."""

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.model.reasons import ReasonCode
from tests.agent.node.simnode import SimNode

A10 = "nvidia.com/GA102GL_A10"
FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")


async def test_a_gpu_in_use_by_a_vm_outside_of_pods_is_unhealthy(two_a10: SimNode) -> None:
    await two_a10.report_account()
    process = two_a10.kernel.start_vm(IommuGroup(12))
    await two_a10.advance(90)
    assert two_a10.offered == {A10: {FIRST: False, SECOND: True}}
    assert two_a10.reasons(FIRST) == [ReasonCode.IN_USE_ELSEWHERE]
    assert two_a10.gpu(FIRST).users == (f"qemu-system-x86 (pid {process.pid})",)
    two_a10.kernel.end_vm(process)
    await two_a10.advance(6)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}


async def test_a_gpu_in_use_by_its_pod_is_healthy(two_a10: SimNode) -> None:
    two_a10.hold(A10, FIRST)
    await two_a10.report_account()
    two_a10.kernel.start_vm(IommuGroup(12))
    await two_a10.advance(120)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}
    assert two_a10.gpu(FIRST).users == ("pod default/vm-a",)


async def test_a_gpu_in_use_is_healthy_while_allocations_are_unknown(two_a10: SimNode) -> None:
    two_a10.kernel.start_vm(IommuGroup(12))
    await two_a10.advance(120)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}


async def test_a_gpu_in_use_shortly_after_its_pod_ended_is_healthy(two_a10: SimNode) -> None:
    two_a10.hold(A10, FIRST)
    await two_a10.report_account()
    process = two_a10.kernel.start_vm(IommuGroup(12))
    await two_a10.advance(61)
    two_a10.free(FIRST)
    await two_a10.report_account()
    await two_a10.report_account()
    await two_a10.advance(3)
    two_a10.kernel.end_vm(process)
    await two_a10.advance(120)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}
