"""A device that a pod has keeps the resource under which it was allocated, whatever its name is by now."""

from pathlib import Path

from gpuvirt.model.desired.settings import Settings
from tests.agent.node.simnode import running_node
from tests.sim.simulated import Simulated

A10, RENAMED = "nvidia.com/GA102GL_A10", "nvidia.com/a10"
FIRST, SECOND = "0000:65:00.0", "0000:ca:00.0"


async def test_a_device_has_its_new_resource_when_its_pod_has_ended(simulated: Simulated, tmp_path: Path) -> None:
    """The kubelet counts a device under two resources twice, and would give it to a second pod."""
    kernel = simulated("2xA10")
    async with running_node(kernel, tmp_path) as node:
        await node.report_account()
        node.allocate(A10, [FIRST])
        node.hold(A10, FIRST)
        await node.report_account()
    async with running_node(kernel, tmp_path, Settings(aliases={"GA102GL_A10": "a10"})) as node:
        node.hold(A10, FIRST)
        await node.report_account()
        assert node.offered == {A10: {FIRST: True}, RENAMED: {SECOND: True}}
        node.free(FIRST)
        await node.report_account()
        await node.report_account()
        assert node.offered == {A10: {}, RENAMED: {FIRST: True, SECOND: True}}
