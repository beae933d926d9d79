"""The next step of a change leaves alone the devices that another plugin has allocated since the change began."""

from pathlib import Path

import pytest

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.desired.observed import ConfigText, NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import ReasonCode
from gpuvirt_sim.devices.nvidia import gpu_uuid
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.nodewithvgpus import VGPU
from tests.agent.node.pacedworker import OPERATION_S
from tests.agent.node.simnode import SimNode, Workers, running_node
from tests.sim.simulated import Simulated

FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
CONFIGS = ConfigText(
    "version: v1\nvgpu-configs:\n"
    "  A10-4Q: [{devices: [1], vgpu-devices: {A10-4Q: 6}}]\n"
    "  A10-12Q: [{devices: [1], vgpu-devices: {A10-12Q: 2}}]\n",
    "a ConfigMap",
)
MODES = Settings(workload_label=True)


@pytest.fixture(autouse=True)
def _paced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers, "paced", True)


def driver(kernel: SimKernel, address: PciAddress) -> str | None:
    return kernel.pci.functions[address].driver


async def mode(node: SimNode, name: str) -> None:
    node.agent.observations.take_request(NodeRequest(Observed(None), Observed(None), Observed(name)))
    await node.settle()


async def pass_operations(node: SimNode, count: int) -> None:
    for _ in range(count):
        await node.advance(OPERATION_S)


@pytest.mark.parametrize("operation", [1, 3, 5])
async def test_a_gpu_that_a_container_gets_during_a_change_keeps_its_driver(
    simulated: Simulated, tmp_path: Path, operation: int
) -> None:
    kernel = simulated("2xA10")
    async with running_node(kernel, tmp_path, MODES) as node:
        await mode(node, "container")
        await native(node)
        await mode(node, "vm-passthrough")
        await node.report_account()
        await pass_operations(node, operation)
        free = [gpu for gpu in (FIRST, SECOND) if driver(kernel, gpu) == "nvidia"]
        for gpu in free:  # only a GPU that has its driver can be given to a container
            node.write("nvidia.com/gpu", gpu_uuid(gpu), uid="cuda")
        unbinds = len(unbound(kernel))
        await pass_operations(node, 40)
        assert len(unbound(kernel)) == unbinds
        assert [driver(kernel, gpu) for gpu in free] == ["nvidia"] * len(free)


async def native(node: SimNode) -> None:
    for _ in range(4):
        await node.report_account()
        await node.advance(30)
    assert [driver(node.kernel, gpu) for gpu in (FIRST, SECOND)] == ["nvidia"] * 2


def unbound(kernel: SimKernel) -> list[str]:
    return [path for path, _ in kernel.writes if path.endswith("/nvidia/unbind")]


@pytest.mark.parametrize("operation", [1, 4, 7])
async def test_a_change_stops_while_the_checkpoint_cannot_be_read(
    simulated: Simulated, tmp_path: Path, operation: int
) -> None:
    kernel = simulated("2xA10")
    async with running_node(kernel, tmp_path, MODES) as node:
        await mode(node, "container")
        await native(node)
        await mode(node, "vm-passthrough")
        await node.report_account()
        await pass_operations(node, operation)
        node.recorded.unread = True
        await pass_operations(node, 60)
        assert None not in {driver(kernel, gpu) for gpu in (FIRST, SECOND)}, "a GPU is left between two drivers"
        waiting = [gpu for gpu in (FIRST, SECOND) if driver(kernel, gpu) == "nvidia"]
        codes = {note.code for note in node.view.problems}
        assert codes == ({ReasonCode.ALLOCATIONS_UNKNOWN} if waiting else set())
        node.recorded.unread = False
        for _ in range(20):
            await node.report_account()
            await node.advance(30)
        assert [driver(kernel, gpu) for gpu in (FIRST, SECOND)] == ["vfio-pci"] * 2


@pytest.mark.parametrize("removed", [0, 1, 3])
async def test_a_vgpu_that_another_plugin_allocates_during_a_change_is_not_removed(
    simulated: Simulated, tmp_path: Path, removed: int
) -> None:
    kernel = simulated("2xA10-vgpu")

    def live() -> set[str]:
        return {device for device, mdev in kernel.mdev.devices.items() if mdev.slot.startswith("0000:b1:")}

    async with running_node(kernel, tmp_path, VGPU) as node:
        node.agent.observations.take_request(NodeRequest(Observed("A10-4Q"), Observed(CONFIGS)))
        for _ in range(20):
            await node.report_account()
            await node.advance(1)
        before = live()
        assert len(before) == 6
        node.agent.observations.take_request(NodeRequest(Observed("A10-12Q"), Observed(CONFIGS)))
        await node.settle()
        await node.report_account()
        for _ in range(3000):
            if len(live()) <= 6 - removed and node.agent.reports.vgpus.get() is not None:
                break
            await node.advance(OPERATION_S)
        await node.advance(OPERATION_S)
        left = live()
        node.write("nvidia.com/NVIDIA_A10-4Q", *left, uid="vm")
        await pass_operations(node, 200)
        assert len(left - live()) <= 1, "a step that was begun already is the last"
        assert left - live() == set() or removed > 0
