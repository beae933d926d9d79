"""A change that waits for a pod leaves its device listed as healthy if the kubelet could reject the pod without it."""

from pathlib import Path

import pytest

from gpuvirt.facts.ids import PciAddress, PodUid, ResourceName
from gpuvirt.model.desired.observed import NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.offers.ondemand.offer import PodEnds
from gpuvirt.model.offers.view import Registration
from gpuvirt.model.reasons import ReasonCode
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

pytestmark = pytest.mark.usefixtures("worker")

WHOLE, GPU = "nvidia.com/TU104GL_TESLA_T4", PciAddress("0000:3b:00.0")


async def label(node: SimNode, value: str) -> None:
    node.agent.observations.take_request(NodeRequest(Observed(None), Observed(None), Observed(value)))
    await reported(node)


async def reported(node: SimNode) -> None:
    """Let the kubelet report its allocations for some time."""
    for _ in range(5):
        await node.advance(5)
        await node.report_account()
    await node.advance(5)


async def test_no_other_pod_gets_it_and_the_change_follows_the_pods_end(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")

    def driver() -> str | None:
        return kernel.pci.functions[GPU].driver

    async with running_node(kernel, tmp_path, Settings(workload_label=True)) as node:
        await label(node, "vm-passthrough")
        node.allocate(WHOLE, [GPU])
        node.write(WHOLE, GPU, uid="uid-of-vm-a", container="prepares")
        node.hold(WHOLE, GPU)
        node.count(WHOLE, GPU)
        await reported(node)
        await label(node, "container")
        assert node.offered[WHOLE] == {GPU: True}
        assert node.reasons(GPU) == [ReasonCode.LEAVES_AFTER_POD]
        assert node.refused(WHOLE, [GPU]) is ReasonCode.LEAVES_AFTER_POD
        assert ReasonCode.ALLOCATED_TO_POD in {note.code for note in node.view.problems}
        node.free(GPU)
        await reported(node)
        assert node.offered[WHOLE] == {}
        assert driver() == "vfio-pci", "the kubelet still counts it"
        node.count(WHOLE)
        await reported(node)
        assert driver() == "nvidia"


async def test_the_scheduler_counts_it_until_its_pod_is_being_deleted(simulated: Simulated, tmp_path: Path) -> None:
    settings = Settings(workload_label=True)
    async with running_node(simulated("4xT4"), tmp_path, settings, writes_node_counts=True) as node:
        await label(node, "vm-passthrough")
        node.agent.reports.registration(ResourceName(WHOLE), Registration(registered=True))
        node.allocate(WHOLE, [GPU])
        node.write(WHOLE, GPU, uid="uid-of-vm-a", container="prepares")
        node.hold(WHOLE, GPU)
        node.count(WHOLE, GPU)
        await reported(node)
        await label(node, "container")
        counts = node.agent.node_counts
        assert counts is not None
        assert counts.get()[ResourceName(WHOLE)].most == 1
        node.agent.observations.observe_pod_ends(PodEnds(deleted=frozenset({PodUid("uid-of-vm-a")})))
        await node.settle()
        assert counts.get()[ResourceName(WHOLE)].most == 0


async def test_the_device_of_a_pods_only_container_is_unhealthy(simulated: Simulated, tmp_path: Path) -> None:
    """It runs, so that a kubelet that starts passes over it; and nothing is given to the next pod."""
    async with running_node(simulated("4xT4"), tmp_path, Settings(workload_label=True)) as node:
        await label(node, "vm-passthrough")
        node.allocate(WHOLE, [GPU])
        node.hold(WHOLE, GPU)
        await reported(node)
        await label(node, "container")
        assert node.offered[WHOLE] == {GPU: False}
        assert node.refused(WHOLE, [GPU]) is ReasonCode.WITHDRAWN
