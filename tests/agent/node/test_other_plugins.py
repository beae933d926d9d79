"""GPUs that other device plugins allocated: the agent maps their device ids to GPUs, and leaves these GPUs alone."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName
from gpuvirt.hardware.scan import scan, with_device_ids
from gpuvirt.model.allocation.podallocations import Allocation, PodAllocations, map_allocations
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.nvidia import gpu_uuid
from gpuvirt_sim.files.tree import constant
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import running_node
from tests.sim.simulated import Simulated

T4, FREE_T4 = PciAddress("0000:3b:00.0"), PciAddress("0000:86:00.0")
MIG = "MIG-0a1b2c3d-0000-5000-8000-000000000000"


def mapped(kernel: SimKernel, resource: str, device: str) -> PodAllocations:
    inventory = build_inventory(with_device_ids(kernel, scan(kernel)))
    return map_allocations(inventory, [Allocation(ResourceName(resource), DeviceId(device), "pod a/b")])


def show_instances(kernel: SimKernel, instances: Mapping[int, list[str]]) -> None:
    for minor, names in instances.items():
        kernel.tree.place(
            HostPath(f"/proc/driver/nvidia/capabilities/gpu{minor}/mig/config"), constant("DeviceFileMode: 256")
        )
        for name in names:
            kernel.tree.place(HostPath(f"/proc/driver/nvidia/capabilities/gpu{minor}/mig/{name}/access"), constant("x"))


@pytest.mark.parametrize(
    ("resource", "device"),
    [
        ("nvidia.com/gpu", "{uuid}"),
        ("nvidia.com/gpu", "{upper}"),
        ("nvidia.com/gpu.shared", "{uuid}::7"),
        ("example.com/shared", "{uuid}-3"),
        ("aliyun.com/gpu-mem", "{uuid}-_-12"),
        ("nvidia.com/mig-1g.5gb", "MIG-{uuid}/1/0"),
        ("nvidia.com/TU104GL_TESLA_T4", "0000:86:00.0"),
        ("nvidia.com/TU104GL_TESLA_T4", "{group}"),
    ],
)
def test_device_ids_of_nvidias_plugin_are_mapped_to_their_gpu(simulated: Simulated, resource: str, device: str) -> None:
    kernel = simulated("4xT4")
    uuid, group = gpu_uuid(FREE_T4), scan(kernel).functions[FREE_T4].iommu_group
    show_instances(kernel, {0: [], 1: [], 2: ["gi1"], 3: []})
    text = device.format(uuid=uuid, upper=f"GPU-{uuid[4:].upper()}", group=group)
    found = mapped(kernel, resource, text)
    assert (dict(found.functions), found.unmapped) == ({FREE_T4: ("pod a/b",)}, ())


def test_a_mig_device_may_be_on_any_gpu_with_instances(simulated: Simulated) -> None:
    kernel = simulated("4xT4")
    assert len(mapped(kernel, "nvidia.com/mig-1g.5gb", MIG).unmapped) == 1, "the driver lists no instances"
    show_instances(kernel, {0: ["gi2"], 1: [], 2: [], 3: ["gi1"]})
    assert set(mapped(kernel, "nvidia.com/mig-1g.5gb", MIG).functions) == {T4, PciAddress("0000:af:00.0")}


def test_the_uuid_of_an_mdev_is_mapped_to_its_vgpu(simulated: Simulated) -> None:
    kernel = simulated("4xT4")
    inventory = build_inventory(with_device_ids(kernel, scan(kernel)))
    vgpu = min(inventory.vgpus)
    found = mapped(kernel, "nvidia.com/GRID_T4-8Q", vgpu.upper())
    assert found.vgpus == {vgpu: ("pod a/b",)}
    assert found.by_gpu(inventory) == {inventory.vgpus[vgpu].gpu: ("pod a/b",)}


def test_the_iommu_group_of_an_mdev_is_mapped_to_its_vgpu(simulated: Simulated) -> None:
    """KubeVirt's own plugin identifies mdevs by their IOMMU groups, too."""
    kernel = simulated("4xT4")
    inventory = build_inventory(with_device_ids(kernel, scan(kernel)))
    vgpu = min(inventory.vgpus)
    group = str(inventory.vgpus[vgpu].live.group)
    assert mapped(kernel, "nvidia.com/GRID_T4-8Q", group).vgpus == {vgpu: ("pod a/b",)}


@pytest.mark.parametrize("device", ["card0-0", "card0-3", "renderD128", "0000-03-00-0-0x56c0"])
def test_device_ids_of_intels_plugin_are_mapped_to_their_gpu(simulated: Simulated, device: str) -> None:
    kernel = simulated("2xFlex170")
    gpu = min(build_inventory(with_device_ids(kernel, scan(kernel))).gpus)
    dashed = gpu.replace(":", "-").replace(".", "-")
    found = mapped(kernel, "gpu.intel.com/i915", device.replace("0000-03-00-0", dashed))
    assert (dict(found.functions), found.unmapped) == ({gpu: ("pod a/b",)}, ())


@pytest.mark.parametrize(
    ("resource", "device", "counts"),
    [
        ("nvidia.com/gpu", "GPU-00000000-0000-0000-0000-000000000000", True),
        ("nvidia.com/gpu", "whatever", True),
        ("gpu.nvidia.com", "gpu-0", True),
        ("compute-domain.nvidia.com", "channel-0", False),
        ("gpu.intel.com/i915", "card9-0", True),
        ("amd.com/gpu", "amdgpu_xcp_1", True),
        ("devices.kubevirt.io/kvm", "kvm7", False),
        ("intel.com/sriov", "0000:99:02.0", False),
        ("nvidia.com/TU104GL_TESLA_T4", "0000:99:00.0", False),
    ],
)
def test_an_unmapped_device_id_counts_if_its_resource_may_be_a_gpu(
    simulated: Simulated, resource: str, device: str, counts: bool
) -> None:
    found = mapped(simulated("4xT4"), resource, device)
    assert (dict(found.functions), len(found.unmapped)) == ({}, int(counts))


@pytest.mark.parametrize(
    ("device", "code"),
    [
        (gpu_uuid(FREE_T4), ReasonCode.ALLOCATED_TO_POD),
        (f"{gpu_uuid(FREE_T4)}::1", ReasonCode.ALLOCATED_TO_POD),
        (MIG, ReasonCode.ALLOCATION_UNMAPPED),
    ],
)
async def test_the_agent_leaves_a_gpu_to_an_idle_container(
    simulated: Simulated, tmp_path: Path, device: str, code: ReasonCode
) -> None:
    kernel = simulated("4xT4")
    user = kernel.start_process("cuda", "/dev/nvidia2")
    async with running_node(kernel, tmp_path, Settings(modes={FREE_T4: DesiredMode.PASSTHROUGH})) as node:
        node.hold("nvidia.com/gpu", device, pod="cuda")
        await node.advance(5)
        await node.report_account()
        kernel.end_vm(user)
        for _ in range(8):
            await node.advance(60)
            await node.report_account()
        assert kernel.pci.functions[FREE_T4].driver == "nvidia", "an idle container keeps its GPU"
        (note,) = {problem for problem in node.view.problems if problem.code is code}
        assert "pod default/cuda" in note.message
        node.free(device)
        await node.report_account()
        await node.advance(301)
        assert kernel.pci.functions[FREE_T4].driver == "vfio-pci"


async def test_the_agent_outlives_a_containers_gpu_that_is_unplugged(simulated: Simulated, tmp_path: Path) -> None:
    """A brief scan sees that it has gone, before the ids of NVIDIA's driver are read again."""
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path) as node:
        node.hold("nvidia.com/gpu", gpu_uuid(FREE_T4), pod="cuda")
        await node.report_account()
        kernel.lose_uevents()
        kernel.unplug(FREE_T4)
        await node.advance(20)
        assert {gpu.address for gpu in node.view.gpus} == {T4, "0000:5e:00.0", "0000:af:00.0"}
