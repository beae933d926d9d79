"""A GPU and the audio function of its card share an IOMMU group: both go to one container, never to two pods."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.facts.pci import FunctionKind
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import ReasonCode
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

GPU, AUDIO = "nvidia.com/TU106_GEFORCE_RTX_2060_REV__A", "nvidia.com/TU106_HIGH_DEFINITION_AUDIO_CONTROLLER"
CARD, SOUND = "0000:86:00.0", "0000:86:00.1"
SOUNDS = [DeviceId(f"0000:{bus}:00.1") for bus in ("04", "3b", "86", "af")]
BOTH = Settings(offer=(FunctionKind.GPU, FunctionKind.AUDIO))


def preferred(node: SimNode, count: int = 1, *must: str) -> list[str]:
    musts = [DeviceId(device) for device in must]
    return list(node.agent.allocators.existing.prefer(ResourceName(AUDIO), SOUNDS, musts, count))


@pytest.fixture
async def node(simulated: Simulated, tmp_path: Path) -> AsyncIterator[SimNode]:
    async with running_node(simulated("4xRTX2060"), tmp_path, BOTH) as node:
        await node.report_account()
        yield node


async def test_one_container_gets_a_gpu_and_its_audio_function_in_two_calls(node: SimNode) -> None:
    node.allocate(GPU, [CARD])
    assert preferred(node) == [SOUND]
    assert node.allocate(AUDIO, [SOUND])


async def test_a_required_device_that_is_no_longer_offered_stays_among_the_preferred(node: SimNode) -> None:
    """The kubelet requires the devices of a pod's init containers again."""
    assert preferred(node, 1, "0000:d8:00.1") == ["0000:d8:00.1"]


async def test_the_next_pod_does_not_get_the_audio_function_of_an_allocated_gpu(node: SimNode) -> None:
    """The kubelet's checkpoint has the first pod, but the pod-resources API has not listed it yet."""
    node.allocate(GPU, [CARD])
    node.write(GPU, CARD, uid="a")
    assert SOUND not in preferred(node)
    assert SOUND not in preferred(node, 4), "even in a request for all audio functions"
    assert node.refused(AUDIO, [SOUND]) is ReasonCode.GROUP_ALLOCATED


async def test_the_next_pod_does_not_get_the_gpu_of_an_allocated_audio_function(node: SimNode) -> None:
    node.allocate(AUDIO, [SOUND])
    node.write(AUDIO, SOUND, uid="a")
    assert node.refused(GPU, [CARD]) is ReasonCode.GROUP_ALLOCATED


@pytest.mark.parametrize("remembered", [True, False])
async def test_an_audio_function_of_an_allocated_gpu_is_refused_after_a_restart(
    simulated: Simulated, tmp_path: Path, *, remembered: bool
) -> None:
    """The kubelet never splits the resources of one container between an agent and its restarted successor."""
    kernel = simulated("4xRTX2060")
    async with running_node(kernel, tmp_path, BOTH) as node:
        await node.report_account()
        node.allocate(GPU, [CARD])
        await node.advance(0.3)
    if not remembered:
        (tmp_path / "ledger.json").unlink()
    async with running_node(kernel, tmp_path, BOTH) as node:
        await node.report_account()
        if not remembered:
            node.write(GPU, CARD, uid="a")
        assert SOUND not in preferred(node)
        assert node.refused(AUDIO, [SOUND]) is ReasonCode.GROUP_ALLOCATED


async def test_an_audio_function_is_refused_while_the_checkpoint_cannot_be_read(node: SimNode) -> None:
    node.recorded.unread = True
    node.allocate(GPU, [CARD])
    assert SOUND not in preferred(node)
    assert node.refused(AUDIO, [SOUND]) is ReasonCode.GROUP_ALLOCATED
    assert node.allocate(GPU, ["0000:3b:00.0"]), "a GPU in a group of its own is still allocated"


async def test_an_app_container_gets_the_devices_of_its_init_container(node: SimNode) -> None:
    """The kubelet allocates the devices again, in any order, while its checkpoint has only the init container."""
    for resource, device in ((GPU, CARD), (AUDIO, SOUND)):
        node.allocate(resource, [device])
    for resource, device in ((GPU, CARD), (AUDIO, SOUND)):
        node.write(resource, device, uid="a", container="init")
    node.allocate(GPU, [CARD])
    assert preferred(node, 1, SOUND) == [SOUND]
    assert node.allocate(AUDIO, [SOUND])


async def test_an_app_container_gets_more_devices_than_its_init_container(node: SimNode) -> None:
    node.allocate(GPU, [CARD])
    node.write(GPU, CARD, uid="a", container="init")
    node.allocate(GPU, [CARD])
    assert node.allocate(AUDIO, [SOUND]), "the kubelet has not recorded the GPU of this container yet"


async def test_a_stale_checkpoint_entry_of_an_ended_pod_refuses_no_request(node: SimNode) -> None:
    """The kubelet's checkpoint keeps the entry until the kubelet writes the file again."""
    node.write(GPU, CARD, uid="ended")
    node.allocate(GPU, [CARD])
    assert node.allocate(AUDIO, [SOUND])


async def test_a_gpu_that_another_plugin_has_just_allocated_is_refused(node: SimNode) -> None:
    node.write("devices.kubevirt.io/rtx", CARD, uid="b")
    assert node.refused(GPU, [CARD]) is ReasonCode.ALLOCATED_UNDER_OTHER_NAME
    assert node.refused(AUDIO, [SOUND]) is ReasonCode.GROUP_ALLOCATED
