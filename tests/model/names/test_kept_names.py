"""Resource names over time: restarts, new databases, aliases added while pods have devices, colliding ids."""

from pathlib import Path

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory import pciids
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.reasons import ReasonCode
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import CardSpec, FunctionSpec, HostSpec, SlotSpec
from tests.agent.node.simnode import running_node
from tests.sim.simulated import Simulated

A10 = "nvidia.com/GA102GL_A10"
FIRST, SECOND = "0000:65:00.0", "0000:ca:00.0"


async def test_a_newer_database_renames_no_resource(simulated: Simulated, tmp_path: Path) -> None:
    """The pci.ids of the first agent had no name for the card."""
    kernel = simulated("2xA10")
    old = PciIds((pciids.parse("10de  NVIDIA\n\t1eb8  TU104GL [Tesla T4]\n", where="old"),))
    async with running_node(kernel, tmp_path, ids=old) as node:
        assert list(node.offered) == ["nvidia.com/2236"]
    async with running_node(kernel, tmp_path) as node:
        assert list(node.offered) == ["nvidia.com/2236"]
        assert node.view.resources[0].also_called == ("GA102GL_A10",)


async def test_colliding_ids_share_one_resource(tmp_path: Path) -> None:
    boards = {
        "one": CardSpec(functions=(FunctionSpec(id="10de:20b1", class_code="030200"),)),
        "other": CardSpec(functions=(FunctionSpec(id="10de:20f1", class_code="030200"),)),
    }
    slots = (
        SlotSpec(at="0000:01:00.0", board="one", driver="vfio-pci", group=1),
        SlotSpec(at="0000:02:00.0", board="other", driver="vfio-pci", group=2),
    )
    async with running_node(build_host(HostSpec(about="two ids", boards=boards, slots=slots)), tmp_path) as node:
        assert node.offered == {"nvidia.com/GA100_A100_PCIE_40GB": {"0000:01:00.0": True, "0000:02:00.0": True}}


async def test_an_allocated_gpu_keeps_its_resource_name(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10")
    async with running_node(kernel, tmp_path) as node:
        node.allocate(A10, [FIRST])
        await node.advance(0.3)
    async with running_node(kernel, tmp_path, Settings(aliases={"GA102GL_A10": "a10"})) as node:
        assert node.offered == {A10: {FIRST: True}, "nvidia.com/a10": {SECOND: True}}
        assert node.refused("nvidia.com/a10", [FIRST]) is ReasonCode.UNKNOWN_DEVICE
        node.hold(A10, FIRST)
        await node.report_account()
        node.free(FIRST)
        await node.report_account()
        await node.report_account()
        assert node.offered == {A10: {}, "nvidia.com/a10": {FIRST: True, SECOND: True}}


async def test_a_vf_and_its_gpu_have_different_resource_names(tmp_path: Path) -> None:
    """An Intel VF has the id of its GPU, and VFs differ in size: with one name, a pod could get another part."""
    flex = CardSpec(functions=(FunctionSpec(id="8086:56c0", class_code="038000", native_driver="xe"),), total_vfs=31)
    slots = (
        SlotSpec(at="0000:01:00.0", board="flex", group=1, vfs=2),
        SlotSpec(at="0000:02:00.0", board="flex", driver="vfio-pci", group=20),
        SlotSpec(at="0000:03:00.0", board="flex", group=30, vfs=3),
    )
    kernel = build_host(HostSpec(about="one GPU whole, two cut up", boards={"flex": flex}, slots=slots))
    for vf in ("0000:01:00.4", "0000:01:00.5", "0000:03:00.4"):
        kernel.rebind(PciAddress(vf), "vfio-pci")
    async with running_node(kernel, tmp_path) as node:
        assert node.offered == {
            "intel.com/ATSM_DATA_CENTER_GPU_FLEX_170": {"0000:02:00.0": True},
            "intel.com/ATSM_DATA_CENTER_GPU_FLEX_170_VF_1_2": {"0000:01:00.4": True, "0000:01:00.5": True},
            "intel.com/ATSM_DATA_CENTER_GPU_FLEX_170_VF_1_3": {"0000:03:00.4": True},
        }
