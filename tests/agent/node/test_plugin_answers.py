"""The answer of another device plugin shows which GPU its pod has: by device numbers, never by names alone."""

import errno
import os
from functools import partial
from pathlib import Path

import pytest

from gpuvirt.agent.kubelet import wire
from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName
from gpuvirt.hardware.scan import scan, with_device_ids
from gpuvirt.hardware.usage.nativeusers import read_node
from gpuvirt.model.allocation.pluginanswers import PluginAnswer
from gpuvirt.model.allocation.podallocations import Allocation, PodAllocations, ResourceRules, map_allocations
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.nvidia import gpu_uuid
from gpuvirt_sim.files.tree import DeviceNode, constant
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import running_node
from tests.sim.simulated import Simulated

FIRST, SECOND = PciAddress("0000:3b:00.0"), PciAddress("0000:5e:00.0")
XE, NIC, A10 = PciAddress("0000:4d:00.0"), PciAddress("0000:17:00.0"), PciAddress("0000:65:00.0")
SMARTER, VCUDA = "smarter-devices/nvidia0", "tencent.com/vcuda-core"


def add_node(kernel: SimKernel, path: str, number: tuple[int, int], device: str = "") -> None:
    """Add a device node, with its device in `/sys` unless it is a node of NVIDIA's driver."""
    kernel.tree.place(HostPath(path), DeviceNode(os.makedev(*number)))
    if device:
        kernel.tree.place(HostPath(f"{device}/dev"), constant("{}:{}".format(*number)))


def host(simulated: Simulated, name: str) -> SimKernel:
    """Return a host with nodes of devices that are no GPUs, and of NVIDIA's driver itself."""
    kernel = simulated(name)
    add_node(kernel, "/dev/infiniband/rdma_cm", (10, 58), "/sys/devices/virtual/misc/rdma_cm")
    add_node(kernel, "/dev/fuse", (10, 229), "/sys/devices/virtual/misc/fuse")
    add_node(kernel, "/dev/kfd", (235, 0), "/sys/devices/virtual/kfd/kfd")
    add_node(kernel, "/dev/null", (1, 3), "/sys/devices/virtual/mem/null")
    add_node(kernel, "/dev/vfio/vfio", (10, 196), "/sys/devices/virtual/misc/vfio")
    for path, number in (("nvidiactl", (195, 255)), ("nvidia-uvm", (508, 0)), ("nvidia9", (195, 9))):
        add_node(kernel, f"/dev/{path}", number)
    if NIC in kernel.pci.functions:
        folder = kernel.pci.functions[NIC].folder
        add_node(kernel, "/dev/infiniband/uverbs0", (231, 192), f"{folder}/infiniband_verbs/uverbs0")
    return kernel


def answered(kernel: SimKernel, *paths: str, **others: object) -> PluginAnswer:
    """Return an answer with these device nodes as gpuvirt reads it from the kubelet's checkpoint."""
    nodes = [pb.DeviceSpec(host_path=path, container_path=path, permissions="rw") for path in paths]
    content = pb.ContainerAllocateResponse(devices=nodes, **others).SerializeToString()  # type: ignore[arg-type]
    return wire.plugin_answer(content, partial(read_node, kernel))


def mapped(
    kernel: SimKernel, resource: str, device: str, answer: PluginAnswer | None, rules: ResourceRules | None = None
) -> PodAllocations:
    inventory = build_inventory(with_device_ids(kernel, scan(kernel)))
    allocation = Allocation(ResourceName(resource), DeviceId(device), "pod a/b", answer)
    return map_allocations(inventory, [allocation], rules=rules or ResourceRules())


@pytest.mark.parametrize(
    ("name", "resource", "nodes", "gpu"),
    [
        ("4xT4", SMARTER, ["/dev/nvidia0"], FIRST),
        ("4xT4", VCUDA, ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1"], SECOND),
        ("4xT4", "rdma/shared", ["/dev/nvidia0", "/dev/infiniband/rdma_cm"], FIRST),
        ("2xFlex170", "smarter-devices/dri", ["/dev/dri/renderD128"], XE),
        ("2xFlex170", "squat.ai/gpu", ["/dev/dri/card0", "/dev/dri/renderD128"], XE),
        ("2xA10", "example.com/vfio", ["/dev/vfio/vfio", "/dev/vfio/12"], A10),
    ],
)
def test_an_answer_with_a_gpus_node_maps_to_that_gpu(
    simulated: Simulated, name: str, resource: str, nodes: list[str], gpu: PciAddress
) -> None:
    kernel = host(simulated, name)
    found = mapped(kernel, resource, "0", answered(kernel, *nodes))
    assert (dict(found.functions), found.unmapped) == ({gpu: ("pod a/b",)}, ())


def test_a_node_under_another_name_maps_by_its_number(simulated: Simulated) -> None:
    kernel = host(simulated, "4xT4")
    add_node(kernel, "/dev/dri/card7", (195, 1))
    assert set(mapped(kernel, SMARTER, "x", answered(kernel, "/dev/dri/card7")).functions) == {SECOND}


def test_an_answer_with_a_partition_of_an_amd_gpu_is_unmapped(simulated: Simulated) -> None:
    """The kernel links its node with a platform device, and that with no GPU."""
    kernel = host(simulated, "2xW7900")
    add_node(kernel, "/dev/dri/renderD135", (226, 135), "/sys/devices/platform/amdgpu_xcp_3/drm/renderD135")
    for nodes in (["/dev/dri/renderD135"], ["/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD135"]):
        assert mapped(kernel, "amd.com/gpu", "amdgpu_xcp_3", answered(kernel, *nodes)).unmapped


def test_an_answer_with_a_node_whose_device_is_unread_is_unmapped(simulated: Simulated) -> None:
    kernel = host(simulated, "2xFlex170")
    nodes = ["/dev/dri/renderD128", "/dev/dri/renderD129"]
    assert not mapped(kernel, SMARTER, "x", answered(kernel, *nodes)).unmapped
    number = kernel.device_number(HostPath(nodes[1]))
    kernel.faults.fail(HostPath(f"/sys/dev/char/{os.major(number)}:{os.minor(number)}"), errno.EIO)
    assert mapped(kernel, SMARTER, "x", answered(kernel, *nodes)).unmapped


@pytest.mark.parametrize(
    "nodes", [["/dev/fuse"], ["/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"], ["/dev/infiniband/uverbs0"]]
)
def test_an_answer_with_nodes_of_other_devices_maps_to_no_gpu(simulated: Simulated, nodes: list[str]) -> None:
    kernel = host(simulated, "2xA10")
    found = mapped(kernel, "example.com/hca", "12", answered(kernel, *nodes))
    assert (set(found.functions) - {NIC}, found.unmapped) == (set(), ())


@pytest.mark.parametrize("value", ["void", "none", "NONE", "", " "])
def test_a_variable_that_asks_the_runtime_for_no_gpu_names_none(simulated: Simulated, value: str) -> None:
    kernel = host(simulated, "4xT4")
    answer = answered(kernel, "/dev/fuse", envs={"NVIDIA_VISIBLE_DEVICES": value})
    assert mapped(kernel, "example.com/x", "abc", answer).unmapped == ()


@pytest.mark.parametrize(
    ("nodes", "others"),
    [
        ([], {}),
        (["/dev/nvidiactl"], {}),
        (["/dev/nvidia-uvm", "/dev/fuse"], {}),
        (["/dev/kfd"], {}),
        (["/dev/nvidia9"], {}),
        (["/dev/not-there"], {}),
        (["/dev/fuse", "/dev/not-there"], {}),
        (["/dev/dri"], {}),
        (["/dev"], {}),
        (["/var/devices/gpu"], {}),
        (["/dev/fuse"], {"mounts": [pb.Mount(host_path="/dev", container_path="/host/dev")]}),
        (["/dev/fuse"], {"mounts": [pb.Mount(host_path="/", container_path="/host")]}),
        (["/dev/fuse"], {"envs": {"NVIDIA_VISIBLE_DEVICES": "all"}}),
        (["/dev/fuse"], {"envs": {"NVIDIA_VISIBLE_DEVICES": "0"}}),
        (["/dev/fuse"], {"cdi_devices": [pb.CDIDevice(name="example.com/gpu=0")]}),
        (["/dev/fuse"], {"annotations": {"cdi.k8s.io/x": "nvidia.com/gpu=0"}}),
    ],
)
def test_an_answer_that_may_give_a_gpu_is_unmapped(
    simulated: Simulated, nodes: list[str], others: dict[str, object]
) -> None:
    kernel = host(simulated, "4xT4")
    found = mapped(kernel, "example.com/x", "abc", answered(kernel, *nodes, **others))
    assert (dict(found.functions), len(found.unmapped)) == ({}, 1)


@pytest.mark.parametrize(
    "others",
    [
        {"envs": {"NVIDIA_VISIBLE_DEVICES": "{uuid}"}},
        {"envs": {"GPUS": "x,{uuid}"}},
        {"envs": {"PCI_RESOURCE_X": str(FIRST)}},
        {"cdi_devices": [pb.CDIDevice(name="k8s.device-plugin.nvidia.com/gpu={uuid}")]},
        {"annotations": {"cdi.k8s.io/x": "nvidia.com/gpu={uuid}"}},
        {
            "envs": {"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
            "mounts": [pb.Mount(host_path="/dev/null", container_path="/var/run/nvidia-container-devices/{uuid}")],
        },
    ],
)
def test_an_id_in_an_answer_maps_to_its_gpu(simulated: Simulated, others: dict[str, object]) -> None:
    kernel = host(simulated, "4xT4")
    content = pb.ContainerAllocateResponse(**others).SerializeToString()  # type: ignore[arg-type]
    uuid = gpu_uuid(FIRST)
    text = pb.ContainerAllocateResponse.FromString(content)
    for key, value in text.envs.items():
        text.envs[key] = value.format(uuid=uuid)
    for key, value in text.annotations.items():
        text.annotations[key] = value.format(uuid=uuid)
    for device in text.cdi_devices:
        device.name = device.name.format(uuid=uuid)
    for mount in text.mounts:
        mount.container_path = mount.container_path.format(uuid=uuid)
    answer = wire.plugin_answer(text.SerializeToString(), partial(read_node, kernel))
    found = mapped(kernel, "example.com/x", "abc", answer)
    assert (dict(found.functions), found.unmapped) == ({FIRST: ("pod a/b",)}, ())


def test_a_damaged_answer_raises() -> None:
    with pytest.raises(DamagedError):
        wire.plugin_answer(b"\xff\xff", lambda _: pytest.fail("no node is read"))


@pytest.mark.parametrize(
    ("resource", "ours", "counts"),
    [
        ("rdma/hca_shared_devices_a", (), False),
        ("example.com/hca", (), False),
        ("example.com/a10", ("example.com/a10",), True),
        ("devices.kubevirt.io/a10", (), True),
        ("nvidia.com/GA102GL_A10", (), True),
    ],
)
def test_a_number_is_a_group_only_as_an_id_of_gpuvirt_and_kubevirt(
    simulated: Simulated, resource: str, ours: tuple[str, ...], counts: bool
) -> None:
    kernel = host(simulated, "2xA10")
    rules = ResourceRules(frozenset(map(ResourceName, ours)))
    assert (A10 in mapped(kernel, resource, "12", None, rules).functions) is counts


@pytest.mark.parametrize(
    ("resource", "without_gpus", "counts"),
    [
        (VCUDA, (), True),
        (SMARTER, (), True),
        ("macvtap.network.kubevirt.io/eth0", (), False),
        ("sgx.intel.com/epc", (), False),
        ("openshift.io/mlxnics", (), False),
        ("github.com/fuse", (), False),
        ("github.com/gpu", (), True),
        ("example.com/nic", ("example.com/nic",), False),
        ("example.com/gpu", ("example.com/nic",), True),
        ("example.com/nic", ("example.com",), False),
        ("a.example.com/nic", ("*.example.com",), False),
        ("dra.example.com", ("dra.example.com",), False),
    ],
)
def test_a_resource_counts_unless_it_is_known_to_be_no_gpu(
    simulated: Simulated, resource: str, without_gpus: tuple[str, ...], counts: bool
) -> None:
    rules = ResourceRules(without_gpus=without_gpus)
    assert len(mapped(host(simulated, "4xT4"), resource, "abc", None, rules).unmapped) == int(counts)


@pytest.mark.parametrize(
    ("nodes", "code"),
    [
        (["/dev/nvidia0"], ReasonCode.ALLOCATED_TO_POD),
        ([], ReasonCode.ALLOCATION_UNMAPPED),
        (["/dev/nvidia1"], None),
        (["/dev/infiniband/rdma_cm"], None),
    ],
)
async def test_the_agent_leaves_a_gpu_to_an_idle_pod_of_any_plugin(
    simulated: Simulated, tmp_path: Path, nodes: list[str], code: ReasonCode | None
) -> None:
    kernel = host(simulated, "4xT4")
    async with running_node(kernel, tmp_path, Settings(modes={FIRST: DesiredMode.PASSTHROUGH})) as node:
        node.hold(VCUDA, "7", pod="cuda", answer=answered(kernel, *nodes))
        for _ in range(8):
            await node.report_account()
            await node.advance(60)
        assert kernel.pci.functions[FIRST].driver == ("nvidia" if code else "vfio-pci")
        if code is not None:
            (note,) = {problem for problem in node.view.problems if problem.code is code}
            assert "pod default/cuda" in note.message


async def test_a_number_of_rdmas_plugin_withholds_no_gpu(simulated: Simulated, tmp_path: Path) -> None:
    """Its ids count from 0 to the number of shares: 12 is no IOMMU group."""
    kernel = host(simulated, "2xA10")
    async with running_node(kernel, tmp_path) as node:
        node.hold("rdma/hca_shared_devices_a", "12", answer=answered(kernel, "/dev/infiniband/uverbs0"))
        await node.report_account()
        assert node.offered["nvidia.com/GA102GL_A10"][A10] is True
        assert node.allocate("nvidia.com/GA102GL_A10", [A10])


async def test_a_number_of_rdmas_plugin_does_not_keep_a_gpu_counted(simulated: Simulated, tmp_path: Path) -> None:
    kernel = host(simulated, "2xA10")
    async with running_node(kernel, tmp_path, Settings(modes={A10: DesiredMode.CONTAINER})) as node:
        node.count("rdma/hca_shared_devices_a", *map(str, range(30)))
        for _ in range(4):
            await node.report_account()
            await node.advance(60)
        assert kernel.pci.functions[A10].driver == "nvidia"


async def test_a_gpu_whose_vfio_node_a_pod_has_is_withheld_under_any_id(simulated: Simulated, tmp_path: Path) -> None:
    kernel = host(simulated, "2xA10")
    async with running_node(kernel, tmp_path) as node:
        await node.report_account()
        answer = answered(kernel, "/dev/vfio/vfio", "/dev/vfio/12")
        node.write("example.com/vm-gpu", "a", uid="b", answer=answer)
        assert node.refused("nvidia.com/GA102GL_A10", [A10]) is ReasonCode.ALLOCATED_UNDER_OTHER_NAME
        node.hold("example.com/vm-gpu", "a", answer=answer)
        await node.report_account()
        assert A10 not in node.offered["nvidia.com/GA102GL_A10"]
        await node.advance(1)
        text = (tmp_path / "ledger.json").read_text()
        assert "vm-gpu" in text
        assert "answer" not in text, "an older gpuvirt reads the file"


def test_no_text_of_an_answer_has_the_values_of_its_variables() -> None:
    answer = PluginAnswer(env=(("LICENCE_TOKEN", "s3cret"),))
    assert "s3cret" not in repr(Allocation(ResourceName("example.com/x"), DeviceId("x"), "pod a/b", answer))
