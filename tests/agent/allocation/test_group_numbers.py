"""KubeVirt's own plugin beside gpuvirt, under the same resource names: its ids are the numbers of IOMMU groups."""

from pathlib import Path

import pytest

from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.model.reasons import ReasonCode
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

A10 = "nvidia.com/GA102GL_A10"
FIRST, SECOND = "0000:65:00.0", "0000:ca:00.0"
BY_GROUP = "12"
"""The group of the first A10."""


def message(node: SimNode, device: str) -> str:
    """Return the message of the first reason against a GPU."""
    return node.gpu(device).reasons[0].message


async def test_a_gpu_that_a_pod_has_by_its_group_is_withheld_under_the_same_resource(
    simulated: Simulated, tmp_path: Path
) -> None:
    async with running_node(simulated("2xA10"), tmp_path) as node:
        await node.report_account()
        node.hold(A10, BY_GROUP, pod="vm-of-kubevirt")
        await node.report_account()
        assert node.offered == {A10: {SECOND: True}}
        assert node.reasons(FIRST) == [ReasonCode.ALLOCATED_UNDER_OTHER_NAME]
        assert "pod default/vm-of-kubevirt" in message(node, FIRST)
        assert f"{A10}: {BY_GROUP}" in message(node, FIRST)
        assert node.refused(A10, [FIRST]) is ReasonCode.ALLOCATED_UNDER_OTHER_NAME
        node.free(BY_GROUP)
        await node.report_account()
        assert node.refused(A10, [FIRST]) is ReasonCode.ALLOCATED_UNDER_OTHER_NAME, (
            "one account may be older than the pod"
        )
        await node.report_account()
        assert node.offered == {A10: {FIRST: True, SECOND: True}}
        assert node.allocate(A10, [FIRST])


async def test_a_gpu_that_a_pod_has_just_got_by_its_group_is_refused(simulated: Simulated, tmp_path: Path) -> None:
    """The kubelet has recorded the other plugin's answer, and no list of gpuvirt has followed yet."""
    async with running_node(simulated("2xA10"), tmp_path) as node:
        await node.report_account()
        node.write(A10, BY_GROUP, uid="kubevirts")
        with pytest.raises(AllocationRefusedError, match="pod kubevirts"):
            node.allocate(A10, [FIRST])
        assert node.allocate(A10, [SECOND])


async def test_a_gpu_of_a_pod_is_not_given_again_after_another_plugin_gave_it_too(
    simulated: Simulated, tmp_path: Path
) -> None:
    """The pod's own device stays listed, since gpuvirt has given it; no further request gets it."""
    async with running_node(simulated("2xA10"), tmp_path) as node:
        await node.report_account()
        node.allocate(A10, [FIRST])
        node.hold(A10, FIRST, pod="ours")
        node.hold(A10, BY_GROUP, pod="theirs")
        await node.report_account()
        assert node.offered == {A10: {FIRST: True, SECOND: True}}
        assert node.refused(A10, [FIRST]) is ReasonCode.ALLOCATED_UNDER_OTHER_NAME


async def test_a_vgpu_that_a_pod_has_by_its_group_is_withheld_under_the_same_resource(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path) as node:
        await node.report_account()
        resource, devices = next((name, found) for name, found in node.offered.items() if name.endswith("8Q"))
        vgpu = min(devices)
        group = str(kernel.mdev.devices[vgpu].group)
        node.hold(resource, group, pod="vm-of-kubevirt")
        await node.report_account()
        assert set(node.offered[resource]) == set(devices) - {vgpu}
        assert node.reasons(vgpu) == [ReasonCode.ALLOCATED_UNDER_OTHER_NAME]
        assert node.refused(resource, [vgpu]) is ReasonCode.ALLOCATED_UNDER_OTHER_NAME
