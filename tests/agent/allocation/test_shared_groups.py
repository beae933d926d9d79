"""GPUs of one IOMMU group never go to two pods."""

import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

RTX4090 = "nvidia.com/AD102_GEFORCE_RTX_4090"
LEFT, RIGHT, ALONE = "0000:0b:01.0", "0000:0b:02.0", "0000:0c:00.0"


@pytest.fixture
async def node(simulated: Simulated, tmp_path: Path) -> AsyncIterator[SimNode]:
    async with running_node(simulated("2xRTX4090-one-group"), tmp_path) as node:
        await node.report_account()
        yield node


async def test_shared_groups_are_not_offered_while_allocations_are_unknown(
    simulated: Simulated, tmp_path: Path
) -> None:
    async with running_node(simulated("2xRTX4090-one-group"), tmp_path) as node:
        assert node.offered == {RTX4090: {ALONE: True}}
        assert node.refused(RTX4090, [LEFT]) is ReasonCode.ALLOCATIONS_UNKNOWN
        await node.report_account()
        assert node.offered == {RTX4090: {LEFT: True, RIGHT: True, ALONE: True}}


async def test_the_sibling_of_an_allocated_gpu_is_refused_at_once(node: SimNode) -> None:
    node.allocate(RTX4090, [LEFT])
    assert node.refused(RTX4090, [RIGHT]) is ReasonCode.GROUP_ALLOCATED


async def test_the_sibling_of_an_allocated_gpu_is_no_longer_listed(node: SimNode) -> None:
    node.allocate(RTX4090, [LEFT])
    await node.advance(0.3)
    assert node.offered == {RTX4090: {LEFT: True, ALONE: True}}
    assert node.reasons(RIGHT) == [ReasonCode.GROUP_ALLOCATED]


async def test_both_gpus_of_a_group_go_to_one_container(node: SimNode) -> None:
    (answer,) = node.allocate(RTX4090, [LEFT, RIGHT])
    assert answer.device_nodes == ("/dev/vfio/vfio", "/dev/vfio/12")
    await node.advance(0.3)
    assert node.offered == {RTX4090: {LEFT: True, RIGHT: True, ALONE: True}}


async def test_two_containers_of_one_call_do_not_share_a_group(node: SimNode) -> None:
    assert node.refused(RTX4090, [LEFT], [RIGHT]) is ReasonCode.GROUP_ALLOCATED
    assert node.allocate(RTX4090, [RIGHT]), "a refused request allocates no device"


async def test_the_sibling_is_allocated_again_after_the_pod_has_ended(node: SimNode) -> None:
    node.allocate(RTX4090, [LEFT])
    node.hold(RTX4090, LEFT)
    await node.report_account()
    assert node.refused(RTX4090, [RIGHT]) is ReasonCode.GROUP_ALLOCATED
    node.free(LEFT)
    await node.report_account()
    assert node.refused(RTX4090, [RIGHT]) is ReasonCode.GROUP_ALLOCATED, (
        "a single report without the pod doesn't end it"
    )
    await node.report_account()
    assert node.offered == {RTX4090: {LEFT: True, RIGHT: True, ALONE: True}}
    assert node.allocate(RTX4090, [RIGHT])


async def test_the_allocation_of_a_pod_that_was_never_admitted_expires(node: SimNode) -> None:
    node.allocate(RTX4090, [LEFT])
    await node.report_account()
    await node.report_account()
    assert node.refused(RTX4090, [RIGHT]) is ReasonCode.GROUP_ALLOCATED
    await node.advance(10)
    await node.report_account()
    await node.report_account()
    assert node.allocate(RTX4090, [RIGHT])


async def test_no_allocation_ends_while_the_kubelet_does_not_answer(node: SimNode) -> None:
    node.allocate(RTX4090, [LEFT])
    for _ in range(10):
        await node.advance(60)
        node.agent.observations.observe_account(None)
    assert node.refused(RTX4090, [RIGHT]) is ReasonCode.GROUP_ALLOCATED


async def test_a_second_request_for_an_allocated_device_is_granted(node: SimNode) -> None:
    node.allocate(RTX4090, [LEFT])
    assert node.allocate(RTX4090, [LEFT]), "an app container gets the GPU of its pod's init container"
    assert node.allocate(RTX4090, [LEFT, RIGHT])
    assert node.allocate(RTX4090, [LEFT]), "and a part of it"


async def test_the_sibling_is_refused_after_a_restart_of_the_agent(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xRTX4090-one-group")
    async with running_node(kernel, tmp_path) as node:
        await node.report_account()
        node.allocate(RTX4090, [LEFT])
        await node.advance(0.3)
    async with running_node(kernel, tmp_path) as node:
        assert node.offered == {RTX4090: {LEFT: True, ALONE: True}}
        await node.report_account()
        assert node.refused(RTX4090, [RIGHT]) is ReasonCode.GROUP_ALLOCATED


async def test_the_sibling_of_a_gpu_of_an_older_pod_is_refused(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("2xRTX4090-one-group"), tmp_path) as node:
        node.hold(RTX4090, LEFT)
        await node.report_account()
        assert node.offered == {RTX4090: {LEFT: True, ALONE: True}}
        assert node.refused(RTX4090, [RIGHT]) is ReasonCode.GROUP_ALLOCATED


async def test_a_gpu_that_another_plugin_allocated_is_withheld_until_it_is_free(
    simulated: Simulated, tmp_path: Path
) -> None:
    """A container has the card as amd.com/gpu, a resource that gpuvirt doesn't serve; the card is not free."""
    async with running_node(simulated("8xMI300X"), tmp_path) as node:
        resource = "amd.com/AQUA_VANJARAM_INSTINCT_MI300X"
        node.hold("amd.com/gpu", "0000:05:00.0")
        await node.report_account()
        assert list(node.offered) == [resource]
        assert "0000:05:00.0" not in node.offered[resource]
        assert node.reasons("0000:05:00.0") == [ReasonCode.ALLOCATED_UNDER_OTHER_NAME]
        assert f"as amd.com/gpu; it is offered as {resource}" in node.gpu("0000:05:00.0").reasons[0].message
        node.free("0000:05:00.0")
        await node.report_account()
        await node.report_account()
        assert node.offered[resource]["0000:05:00.0"] is True


async def test_an_account_observed_before_the_first_scan_counts(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xRTX4090-one-group")
    folder = HostPath("/sys/bus/pci/devices")
    kernel.faults.fail(folder, errno.EIO)
    async with running_node(kernel, tmp_path) as node:
        node.hold(RTX4090, LEFT)
        await node.report_account()
        kernel.faults.heal()
        await node.advance(61)
        assert node.offered == {RTX4090: {LEFT: True, ALONE: True}}
        assert node.refused(RTX4090, [RIGHT]) is ReasonCode.GROUP_ALLOCATED


def two_in(group: int, *, alone_in: int) -> SimKernel:
    cards = ((LEFT, group), (RIGHT, group), (ALONE, alone_in))
    slots = tuple(SlotSpec(at=at, board="RTX4090", driver="vfio-pci", group=number) for at, number in cards)
    return build_host(HostSpec(about="two in one group, and one alone", slots=slots))


async def test_the_sibling_is_refused_after_a_reboot_renumbered_the_groups(tmp_path: Path) -> None:
    async with running_node(two_in(12, alone_in=14), tmp_path) as node:
        await node.report_account()
        node.allocate(RTX4090, [LEFT])
    kernel = two_in(30, alone_in=12)
    kernel.reboot_id()
    async with running_node(kernel, tmp_path) as node:
        node.hold(RTX4090, LEFT)
        await node.report_account()
        assert node.offered == {RTX4090: {LEFT: True, ALONE: True}}
        assert node.refused(RTX4090, [RIGHT]) is ReasonCode.GROUP_ALLOCATED


async def test_the_sibling_of_an_allocated_gpu_with_an_unreadable_group_is_refused(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("2xRTX4090-one-group")
    kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{LEFT}/iommu_group"), errno.EIO)
    async with running_node(kernel, tmp_path) as node:
        node.hold(RTX4090, LEFT)
        await node.report_account()
        assert node.refused(RTX4090, [RIGHT]) is ReasonCode.GROUP_CHANGED, (
            "the group has a member that the scan could not read"
        )
        kernel.faults.heal()
        await node.advance(61)
        assert node.refused(RTX4090, [RIGHT]) is ReasonCode.GROUP_ALLOCATED


async def test_a_group_that_another_plugin_allocated_by_its_number_is_withheld(node: SimNode) -> None:
    node.hold("devices.kubevirt.io/rtx", "12")
    await node.report_account()
    assert node.offered == {RTX4090: {ALONE: True}}
    assert node.reasons(LEFT) == [ReasonCode.ALLOCATED_UNDER_OTHER_NAME]
    assert node.reasons(RIGHT) == [ReasonCode.GROUP_ALLOCATED]


async def test_the_sibling_of_an_unreadable_allocated_gpu_is_refused_without_a_ledger(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("2xRTX4090-one-group")
    kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{LEFT}/vendor"), errno.EIO)
    async with running_node(kernel, tmp_path) as node:
        node.hold(RTX4090, LEFT)
        await node.report_account()
        assert node.refused(RTX4090, [RIGHT]) is ReasonCode.GROUP_CHANGED
        kernel.faults.heal()
        await node.advance(61)
        assert node.refused(RTX4090, [RIGHT]) is ReasonCode.GROUP_ALLOCATED


async def test_a_new_agents_allocation_is_not_merged_with_its_predecessors(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("2xRTX4090-one-group")
    async with running_node(kernel, tmp_path) as node:
        await node.report_account()
        node.allocate(RTX4090, [LEFT, RIGHT])
    async with running_node(kernel, tmp_path) as node:
        await node.report_account()
        node.allocate(RTX4090, [LEFT])
        assert node.refused(RTX4090, [RIGHT]) is ReasonCode.GROUP_ALLOCATED
