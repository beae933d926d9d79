"""A GPU and the audio function of its card share an IOMMU group: both go to one container, never to two pods."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.facts.pci import FunctionKind
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import ReasonCode
from tests.simnode import SimNode, running_node
from tests.simulated import Simulated

GPU, AUDIO = "nvidia.com/TU106_GEFORCE_RTX_2060_REV__A", "nvidia.com/TU106_HIGH_DEFINITION_AUDIO_CONTROLLER"
CARD, SOUND = "0000:86:00.0", "0000:86:00.1"
SOUNDS = [DeviceId(f"0000:{bus}:00.1") for bus in ("04", "3b", "86", "af")]
BOTH = Settings(offer=(FunctionKind.GPU, FunctionKind.AUDIO))


def preferred(node: SimNode, count: int = 1, *must: str) -> list[str]:
    musts = [DeviceId(one) for one in must]
    return list(node.agent.allocator.prefer(ResourceName(AUDIO), SOUNDS, musts, count))


@pytest.fixture
async def node(simulated: Simulated, tmp_path: Path) -> AsyncIterator[SimNode]:
    async with running_node(simulated("4xRTX2060"), tmp_path, BOTH) as node:
        await node.report_account()
        yield node


async def test_one_container_gets_both_in_two_calls(node: SimNode) -> None:
    node.allocate(GPU, [CARD])
    assert preferred(node) == [SOUND]
    assert node.allocate(AUDIO, [SOUND])


async def test_a_pod_that_comes_at_once_does_not_get_the_audio(node: SimNode) -> None:
    """The kubelet has recorded the first pod, and nobody has named it to the agent."""
    node.allocate(GPU, [CARD])
    node.write(GPU, CARD, uid="a")
    assert SOUND not in preferred(node)
    assert SOUND not in preferred(node, 4), "even where all are asked for"
    assert node.refused(AUDIO, [SOUND]) is ReasonCode.GROUP_HELD


async def test_the_other_way_round(node: SimNode) -> None:
    node.allocate(AUDIO, [SOUND])
    node.write(AUDIO, SOUND, uid="a")
    assert node.refused(GPU, [CARD]) is ReasonCode.GROUP_HELD


@pytest.mark.parametrize("remembered", [True, False])
async def test_right_after_a_restart(simulated: Simulated, tmp_path: Path, *, remembered: bool) -> None:
    """No container asks for its second resource of an agent that was started after it gave the first."""
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
        assert node.refused(AUDIO, [SOUND]) is ReasonCode.GROUP_HELD


async def test_without_the_record_nobody_can_tell_whose_the_gpu_is(node: SimNode) -> None:
    node.recorded.unread = True
    node.allocate(GPU, [CARD])
    assert SOUND not in preferred(node)
    assert node.refused(AUDIO, [SOUND]) is ReasonCode.GROUP_HELD
    assert node.allocate(GPU, ["0000:3b:00.0"]), "what shares nothing is given as ever"


async def test_an_app_container_gets_what_its_init_container_had(node: SimNode) -> None:
    """It is asked for again, in any order, and the record still names the init container alone."""
    for resource, device in ((GPU, CARD), (AUDIO, SOUND)):
        node.allocate(resource, [device])
    for resource, device in ((GPU, CARD), (AUDIO, SOUND)):
        node.write(resource, device, uid="a", container="init")
    node.allocate(GPU, [CARD])
    assert preferred(node, 1, SOUND) == [SOUND]
    assert node.allocate(AUDIO, [SOUND])


async def test_an_app_container_may_ask_for_more_than_its_init_container(node: SimNode) -> None:
    node.allocate(GPU, [CARD])
    node.write(GPU, CARD, uid="a", container="init")
    node.allocate(GPU, [CARD])
    assert node.allocate(AUDIO, [SOUND]), "the GPU was given to this container just now, and is not recorded yet"


async def test_the_record_of_a_pod_that_has_ended_is_in_the_way_of_nothing(node: SimNode) -> None:
    """The kubelet leaves it there until it writes the record again."""
    node.write(GPU, CARD, uid="ended")
    node.allocate(GPU, [CARD])
    assert node.allocate(AUDIO, [SOUND])


async def test_what_another_plugin_has_just_given_is_refused(node: SimNode) -> None:
    node.write("devices.kubevirt.io/rtx", CARD, uid="b")
    assert node.refused(GPU, [CARD]) is ReasonCode.HELD_UNDER_OTHER_NAME
    assert node.refused(AUDIO, [SOUND]) is ReasonCode.GROUP_HELD
