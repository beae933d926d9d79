"""A device that can't be read is not absent, and the agent draws no conclusion from an unknown value."""

import errno

import pytest

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from tests.agent.node.simnode import SimNode

A10 = "nvidia.com/GA102GL_A10"
FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
FOLDER = f"/sys/bus/pci/devices/{FIRST}"


@pytest.mark.parametrize("attribute", ["vendor", "device", "class", "driver", "iommu_group"])
async def test_a_gpu_with_an_unreadable_attribute_stays_listed_and_unhealthy(two_a10: SimNode, attribute: str) -> None:
    two_a10.kernel.faults.fail(HostPath(f"{FOLDER}/{attribute}"), errno.EIO)
    await two_a10.advance(15)
    assert two_a10.offered == {A10: {FIRST: False, SECOND: True}}
    assert two_a10.reasons(FIRST) == [ReasonCode.UNREAD]
    two_a10.kernel.faults.heal()
    await two_a10.advance(15)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}


@pytest.mark.parametrize("content", [b"", b"0", b"0x", b"\xff\xfe", b"0x10dezz\n", b"\0" * 4096])
async def test_an_attribute_with_invalid_content_is_unread(two_a10: SimNode, content: bytes) -> None:
    two_a10.kernel.faults.answer(HostPath(f"{FOLDER}/vendor"), content)
    await two_a10.advance(15)
    assert two_a10.offered == {A10: {FIRST: False, SECOND: True}}
    assert two_a10.reasons(FIRST) == [ReasonCode.UNREAD]


async def test_a_short_read_failure_keeps_the_gpu_healthy(two_a10: SimNode) -> None:
    two_a10.kernel.faults.fail(HostPath(f"{FOLDER}/vendor"), errno.EIO)
    await two_a10.advance(9.2)
    two_a10.kernel.faults.heal()
    await two_a10.advance(20)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}


@pytest.mark.parametrize("folder", ["/sys/bus/pci/devices", "/dev/vfio", "/sys/bus/mdev/devices"])
async def test_a_folder_that_cannot_be_listed_is_only_reported(two_a10: SimNode, folder: str) -> None:
    two_a10.kernel.faults.fail(HostPath(folder), errno.EIO)
    await two_a10.advance(100)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}
    assert [(note.code, note.subject) for note in two_a10.view.problems] == [(ReasonCode.UNREAD, folder)]
    two_a10.kernel.faults.heal()
    await two_a10.advance(70)
    assert two_a10.view.problems == ()


async def test_an_unreadable_numa_node_keeps_its_last_value(two_a10: SimNode) -> None:
    two_a10.kernel.faults.fail(HostPath(f"{FOLDER}/numa_node"), errno.EIO)
    await two_a10.advance(70)
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}
    assert two_a10.gpu(FIRST).numa_node == 0
