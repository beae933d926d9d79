"""The environment and device nodes of a container, compared with those of existing plugins and published articles."""

from pathlib import Path

import pytest

from gpuvirt.facts.ids import DeviceId, ResourceName, VgpuType
from gpuvirt.facts.pci import FunctionKind
from gpuvirt.model.desired.settings import Compat, Settings, VfioNodes
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

A10 = "nvidia.com/GA102GL_A10"
RTX2060 = "nvidia.com/TU106_GEFORCE_RTX_2060_REV__A"
T4_8Q = "nvidia.com/GRID_T4-8Q"


async def test_one_gpu_gives_its_address_and_group_node(two_a10: SimNode) -> None:
    (answer,) = two_a10.allocate(A10, ["0000:65:00.0"])
    assert answer.env == {"PCI_RESOURCE_NVIDIA_COM_GA102GL_A10": "0000:65:00.0"}
    assert answer.device_nodes == ("/dev/vfio/vfio", "/dev/vfio/12")


async def test_two_gpus_give_the_environment_of_the_article(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("4xRTX2060"), tmp_path) as node:
        (answer,) = node.allocate(RTX2060, ["0000:86:00.0", "0000:af:00.0"])
        assert answer.env == {
            "PCI_RESOURCE_NVIDIA_COM_TU106_GEFORCE_RTX_2060_REV__A": "0000:86:00.0,0000:af:00.0",
        }
        assert answer.device_nodes == ("/dev/vfio/vfio", "/dev/vfio/81", "/dev/vfio/94")


async def test_addresses_have_the_order_of_the_request(two_a10: SimNode) -> None:
    (answer,) = two_a10.allocate(A10, ["0000:ca:00.0", "0000:65:00.0"])
    assert answer.env == {"PCI_RESOURCE_NVIDIA_COM_GA102GL_A10": "0000:ca:00.0,0000:65:00.0"}
    assert answer.device_nodes == ("/dev/vfio/vfio", "/dev/vfio/22", "/dev/vfio/12")


async def test_two_containers_of_one_call_get_only_their_own_devices(two_a10: SimNode) -> None:
    first, second = two_a10.allocate(A10, ["0000:65:00.0"], ["0000:ca:00.0"])
    assert first.env == {"PCI_RESOURCE_NVIDIA_COM_GA102GL_A10": "0000:65:00.0"}
    assert first.device_nodes == ("/dev/vfio/vfio", "/dev/vfio/12")
    assert second.env == {"PCI_RESOURCE_NVIDIA_COM_GA102GL_A10": "0000:ca:00.0"}
    assert second.device_nodes == ("/dev/vfio/vfio", "/dev/vfio/22")


async def test_a_container_without_devices_gets_an_empty_answer(two_a10: SimNode) -> None:
    without_devices, with_gpu = two_a10.allocate(A10, [], ["0000:65:00.0"])
    assert (without_devices.env, without_devices.device_nodes) == ({}, ())
    assert with_gpu.env


async def test_iommufd_adds_the_device_node_of_each_function(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("8xH100"), tmp_path) as node:
        (answer,) = node.allocate("nvidia.com/GH100_H100_SXM5_80GB", ["0000:1b:00.0", "0000:43:00.0"])
        assert answer.device_nodes == (
            "/dev/vfio/devices/vfio0",
            "/dev/vfio/vfio",
            "/dev/vfio/41",
            "/dev/iommu",
            "/dev/vfio/devices/vfio1",
            "/dev/vfio/42",
        )


async def test_siblings_of_a_group_add_device_nodes_but_no_addresses(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("8xH100")
    async with running_node(kernel, tmp_path) as node:
        (answer,) = node.allocate("nvidia.com/GH100_H100_SXM5_80GB", ["0000:1b:00.0"])
        assert answer.env == {"PCI_RESOURCE_NVIDIA_COM_GH100_H100_SXM5_80GB": "0000:1b:00.0"}


async def test_a_group_with_a_member_without_a_device_node_is_given_by_its_group_node(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("8xH100")
    kernel.tree.remove(HostPath(f"{kernel.pci.functions[next(iter(kernel.pci.functions))].folder}/vfio-dev"))
    async with running_node(kernel, tmp_path) as node:
        (answer,) = node.allocate("nvidia.com/GH100_H100_SXM5_80GB", ["0000:1b:00.0"])
        assert answer.device_nodes == ("/dev/vfio/vfio", "/dev/vfio/41")


async def test_a_kernel_without_vfio_groups_gives_device_nodes_only(tmp_path: Path) -> None:
    spec = HostSpec(
        about="a kernel without VFIO_GROUP",
        iommufd=True,
        group_nodes=False,
        slots=(SlotSpec(at="0000:65:00.0", board="A10", driver="vfio-pci", group=12, numa=0),),
    )
    async with running_node(build_host(spec), tmp_path) as node:
        assert node.offered == {A10: {"0000:65:00.0": True}}
        (answer,) = node.allocate(A10, ["0000:65:00.0"])
        assert answer.device_nodes == ("/dev/vfio/devices/vfio0", "/dev/iommu")


H100 = SlotSpec(at="0000:65:00.0", board="H100-SXM5-80GB", driver="vfio-pci", group=1, numa=0)
BY_CDEV = ("/dev/vfio/devices/vfio0", "/dev/iommu")
BY_GROUP = ("/dev/vfio/vfio", "/dev/vfio/1")


@pytest.mark.parametrize(
    ("host", "chosen", "nodes"),
    [
        (HostSpec(about="both kinds", iommufd=True, slots=(H100,)), VfioNodes.IOMMUFD, BY_CDEV),
        (HostSpec(about="both kinds", iommufd=True, slots=(H100,)), VfioNodes.GROUP, BY_GROUP),
        (HostSpec(about="groups", slots=(H100,)), VfioNodes.IOMMUFD, BY_GROUP),
        (HostSpec(about="iommufd", iommufd=True, cdev_nodes=False, slots=(H100,)), VfioNodes.IOMMUFD, BY_GROUP),
        (HostSpec(about="no groups", iommufd=True, group_nodes=False, slots=(H100,)), VfioNodes.GROUP, BY_CDEV),
    ],
)
async def test_a_runtime_that_plugs_each_node_gets_one_of_a_device(
    tmp_path: Path, host: HostSpec, chosen: VfioNodes, nodes: tuple[str, ...]
) -> None:
    """Kata plugs both, and fails at the second; a runtime with cold plug compares them with the CDI spec's."""
    async with running_node(build_host(host), tmp_path, Settings(vfio_nodes=chosen)) as node:
        ((resource, (device,)),) = node.offered.items()
        (answer,) = node.allocate(resource, [device])
        assert answer.device_nodes == nodes
        (offered,) = node.view.resources[0].devices
        plugged = [path for path in answer.device_nodes if path not in {"/dev/vfio/vfio", "/dev/iommu"}]
        assert plugged == list(offered.nodes), "the CDI spec has the view's nodes"


async def test_a_group_that_cannot_be_opened_is_not_chosen(tmp_path: Path) -> None:
    kernel = build_host(HostSpec(about="no container", iommufd=True, slots=(H100,)))
    kernel.tree.remove(HostPath("/dev/vfio/vfio"))
    async with running_node(kernel, tmp_path, Settings(vfio_nodes=VfioNodes.GROUP)) as node:
        ((resource, (device,)),) = node.offered.items()
        (answer,) = node.allocate(resource, [device])
        assert answer.device_nodes == BY_CDEV


@pytest.mark.parametrize("chosen", [VfioNodes.IOMMUFD, VfioNodes.GROUP])
async def test_vgpus_follow_the_chosen_nodes(simulated: Simulated, tmp_path: Path, chosen: VfioNodes) -> None:
    settings = Settings(vfio_nodes=chosen)
    async with running_node(simulated("4xL40S"), tmp_path / "vf", settings) as node:
        (answer,) = node.allocate("nvidia.com/NVIDIA_L40S-12Q", ["0000:25:00.4"])
        by_group = ("/dev/vfio/vfio", "/dev/vfio/15")
        assert answer.device_nodes == (BY_CDEV if chosen is VfioNodes.IOMMUFD else by_group)
    async with running_node(simulated("4xT4"), tmp_path / "mdev", settings) as node:
        first = next(iter(node.offered[T4_8Q]))
        (answer,) = node.allocate(T4_8Q, [first])
        assert answer.device_nodes == ("/dev/vfio/vfio", f"/dev/vfio/{node.kernel.mdev.devices[first].group}")


async def test_mdevs_give_their_group_nodes_only(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("4xT4"), tmp_path) as node:
        first, second, *_ = node.offered[T4_8Q]
        (both,) = node.allocate(T4_8Q, [first, second])
        groups = [node.kernel.mdev.devices[mdev].group for mdev in (first, second)]
        assert both.env == {"MDEV_PCI_RESOURCE_NVIDIA_COM_GRID_T4-8Q": f"{first},{second}"}
        assert both.device_nodes == ("/dev/vfio/vfio", *(f"/dev/vfio/{group}" for group in groups))


async def test_the_compat_setting_gives_the_whole_vfio_folder(simulated: Simulated, tmp_path: Path) -> None:
    settings = Settings(compat=Compat(whole_vfio_folder=True))
    async with running_node(simulated("4xT4"), tmp_path, settings) as node:
        (answer,) = node.allocate(T4_8Q, [next(iter(node.offered[T4_8Q]))])
        assert answer.device_nodes == ("/dev/vfio",)


async def test_vgpus_on_vfs_are_given_as_pci_devices(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("4xL40S"), tmp_path) as node:
        (answer,) = node.allocate("nvidia.com/NVIDIA_L40S-12Q", ["0000:25:00.4"])
        assert answer.env == {"PCI_RESOURCE_NVIDIA_COM_NVIDIA_L40S-12Q": "0000:25:00.4"}
        assert answer.device_nodes == ("/dev/vfio/devices/vfio0", "/dev/vfio/vfio", "/dev/vfio/15", "/dev/iommu")


async def test_an_egm_node_is_given_only_with_all_its_gpus(simulated: Simulated, tmp_path: Path) -> None:
    name = "nvidia.com/GH100_GH200_120GB___480GB"
    async with running_node(simulated("2xGH200"), tmp_path) as node:
        (answer,) = node.allocate(name, ["0009:01:00.0", "0019:01:00.0"])
        assert answer.device_nodes[-2:] == ("/dev/egm0", "/dev/egm1")
    kernel = simulated("2xGH200")
    kernel.faults.answer(HostPath("/sys/class/egm/egm0/gpu_devices"), b"0009:01:00.0 0019:01:00.0\n")
    async with running_node(kernel, tmp_path) as node:
        (answer,) = node.allocate(name, ["0009:01:00.0"])
        assert "/dev/egm0" not in answer.device_nodes


async def test_an_amd_gpu_has_a_resource_in_the_domain_of_amd(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("8xMI300X"), tmp_path) as node:
        (answer,) = node.allocate("amd.com/AQUA_VANJARAM_INSTINCT_MI300X", ["0000:05:00.0"])
        assert answer.env == {"PCI_RESOURCE_AMD_COM_AQUA_VANJARAM_INSTINCT_MI300X": "0000:05:00.0"}


AUDIO2060 = "nvidia.com/TU106_HIGH_DEFINITION_AUDIO_CONTROLLER"


async def test_the_audio_function_of_the_pods_gpu_is_preferred(simulated: Simulated, tmp_path: Path) -> None:
    """The kubelet calls Allocate once for each resource."""
    settings = Settings(offer=(FunctionKind.GPU, FunctionKind.AUDIO))
    async with running_node(simulated("4xRTX2060"), tmp_path, settings) as node:
        await node.report_account()
        node.allocate(RTX2060, ["0000:86:00.0"])
        free = [DeviceId(f"0000:{bus}:00.1") for bus in ("04", "3b", "86", "af")]
        (audio,) = node.agent.allocators.existing.prefer(ResourceName(AUDIO2060), free, [], 1)
        assert audio == "0000:86:00.1"
        node.allocate(AUDIO2060, [audio])
        await node.advance(1)
        node.hold(RTX2060, "0000:86:00.0")
        node.hold(AUDIO2060, audio)
        await node.report_account()
        assert node.offered[AUDIO2060] == dict.fromkeys(free, True)


async def test_the_audio_function_of_an_allocated_gpu_goes_to_no_other_pod(
    simulated: Simulated, tmp_path: Path
) -> None:
    settings = Settings(offer=(FunctionKind.GPU, FunctionKind.AUDIO))
    async with running_node(simulated("4xRTX2060"), tmp_path, settings) as node:
        await node.report_account()
        node.allocate(RTX2060, ["0000:86:00.0"])
        node.hold(RTX2060, "0000:86:00.0")
        await node.report_account()
        assert node.refused(AUDIO2060, ["0000:86:00.1"]) is ReasonCode.GROUP_ALLOCATED


async def test_an_alias_of_an_mdev_and_a_function_names_only_the_function(tmp_path: Path) -> None:
    """KubeVirt reads mdevs from another variable, so one answer can't name both."""
    slots = (
        SlotSpec(at="0000:3b:00.0", board="T4", driver="vfio-pci", group=12),
        SlotSpec(at="0000:5e:00.0", board="T4", group=22, vgpus={VgpuType("GRID T4-8Q"): 1}),
    )
    kernel = build_host(HostSpec(about="a T4 on vfio-pci and one with a vGPU", slots=slots))
    async with running_node(kernel, tmp_path, Settings(aliases={"TU104GL_TESLA_T4": "t4", "GRID_T4-8Q": "t4"})) as node:
        assert node.offered == {"nvidia.com/t4": {"0000:3b:00.0": True}}
        (mdev,) = node.kernel.mdev.devices
        assert node.reasons(mdev) == [ReasonCode.NAME_TAKEN]
