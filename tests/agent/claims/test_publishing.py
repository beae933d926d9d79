"""GPUs for claims are published once no device plugin can give them, and stay while a claim may have them."""

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpuvirt.agent.cluster.claimslices import EVERY_S
from gpuvirt.agent.store.persisted import NotWrittenError
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.allocation.claims import Shape, device_name
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt.plain import Plain
from gpuvirt_sim.kernel import SimKernel
from tests.agent.claims.claimednode import BlockedWorker, ClaimedNode, claim_of
from tests.agent.claims.sliceapi import Publisher, SliceApi, publishing
from tests.agent.kubelet.kubeletnode import until
from tests.agent.node.diskfaults import failing
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
ONE, TWO = (device_name(gpu, Shape.PASSTHROUGH) for gpu in (FIRST, SECOND))


def want(node: SimNode, mode: DesiredMode) -> None:
    node.agent.observations.take_request(NodeRequest(Observed(None), Observed(None), spec=Observed(GpuNodeSpec(mode))))


class Rig:
    """A host with two GPUs on vfio-pci, its agent, and an API server."""

    def __init__(self, api: SliceApi, node: SimNode, publisher: Publisher, folder: Path) -> None:
        self.api, self.node, self.look, self.folder = api, node, publisher.look, folder
        self.publisher = publisher


@asynccontextmanager
async def node_with(kernel: SimKernel, api: SliceApi, folder: Path) -> AsyncIterator[tuple[SimNode, Publisher]]:
    async with (
        running_node(kernel, folder, Settings(), watches_gpu_node=True) as node,
        publishing(api, node, folder / "api") as publisher,
    ):
        yield node, publisher


@pytest.fixture
async def rig(simulated: Simulated, tmp_path: Path) -> AsyncIterator[Rig]:
    api = SliceApi()
    async with node_with(simulated("2xA10"), api, tmp_path) as (node, publisher):
        want(node, DesiredMode.CLAIMS)
        await node.settle()
        yield Rig(api, node, publisher, tmp_path)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> None:
    (tmp_path / "api").mkdir()


async def test_nothing_is_published_before_the_modes_are_known(simulated: Simulated, tmp_path: Path) -> None:
    api = SliceApi()
    async with node_with(simulated("2xA10"), api, tmp_path) as (node, publisher):
        await publisher.look()
        assert api.writes == []
        want(node, DesiredMode.CLAIMS)
        await node.settle()
        await publisher.look()
        assert api.devices == {ONE: False, TWO: False}
    async with node_with(simulated("2xA10"), api, tmp_path) as (node, publisher):
        api.writes.clear()
        await publisher.look()
        assert api.writes == [], "after a restart nothing is known to have changed"


async def test_an_allocation_writes_no_slice_and_wiped_slices_come_back(rig: Rig) -> None:
    await rig.look()
    assert rig.api.devices == {ONE: False, TWO: False}
    rig.api.writes.clear()
    claim = claim_of("a", FIRST)
    claimed = ClaimedNode(rig.node, rig.folder, [claim])
    rig.api.claim("a", FIRST)
    await claimed.prepare(claim)
    await rig.look()
    assert rig.api.writes == []
    before = rig.api.slices
    rig.api.slices = {}
    await rig.look()
    assert rig.api.slices.keys() == before.keys()
    assert rig.api.devices == {ONE: False, TWO: False}


async def test_slices_that_the_kubelet_deletes_are_back_at_once_but_not_again_and_again(rig: Rig) -> None:
    def delete() -> None:
        rig.publisher.observe()
        rig.api.slices = {}
        rig.publisher.observe()

    await rig.look()
    published = rig.api.devices
    async with rig.publisher.running():
        await rig.node.settle()
        delete()
        await until(lambda: rig.api.devices == published)
        delete()
        await rig.node.advance(EVERY_S - 1)
        assert rig.api.devices == {}
        await rig.node.advance(1)
        await until(lambda: rig.api.devices == published)


async def test_a_gpu_that_claims_get_no_more_is_tainted_and_goes_when_no_claim_has_it(rig: Rig) -> None:
    await rig.look()
    rig.api.claim("a", FIRST)
    want(rig.node, DesiredMode.PASSTHROUGH)
    await rig.node.settle()
    assert not any(rig.node.offered.values()), "it is offered by no device plugin while a scheduler may give it"
    await rig.look()
    assert rig.api.devices == {ONE: True, TWO: True}
    await rig.look()
    assert rig.api.devices == {ONE: True}
    assert [device for devices in rig.node.offered.values() for device in devices] == [SECOND]
    rig.api.claims.clear()
    await rig.look()
    assert rig.api.devices == {}
    assert [device for devices in rig.node.offered.values() for device in devices] == [FIRST, SECOND]


async def test_a_gpu_that_a_device_plugin_may_still_give_is_not_published(rig: Rig) -> None:
    want(rig.node, DesiredMode.PASSTHROUGH)
    await rig.node.report_account()
    await rig.node.advance(5)
    (resource,) = rig.node.offered
    rig.node.count(resource, FIRST, SECOND)
    rig.node.allocate(resource, [FIRST])
    rig.node.hold(resource, FIRST)
    want(rig.node, DesiredMode.CLAIMS)
    await rig.look()
    assert rig.api.devices == {}, "the kubelet counts both"
    rig.node.count(resource, FIRST)
    await rig.look()
    assert rig.api.devices == {TWO: False}
    rig.node.free(FIRST)
    rig.node.count(resource)
    await rig.node.report_account()
    await rig.node.report_account()
    await rig.look()
    assert rig.api.devices == {ONE: False, TWO: False}


async def test_what_claims_have_is_published_before_anything_else_after_a_lost_ledger(rig: Rig) -> None:
    want(rig.node, DesiredMode.PASSTHROUGH)
    await rig.node.settle()
    rig.api.claim("a", FIRST)
    want(rig.node, DesiredMode.CLAIMS)
    await rig.look()
    want(rig.node, DesiredMode.PASSTHROUGH)
    await rig.look()
    assert [device for devices in rig.node.offered.values() for device in devices] == []


@pytest.mark.parametrize("version", ["v1.36.2", "v1.34.0+k3s1"])
async def test_an_old_kubernetes_is_given_no_gpu(rig: Rig, version: str) -> None:
    rig.api.version = version
    reason = await rig.look()
    assert reason is not None
    assert reason.code is ReasonCode.CLAIMS_NOT_POSSIBLE
    assert version.removeprefix("v").split("+")[0] in reason.text
    assert rig.api.writes == []


async def test_a_gpu_of_another_driver_is_not_published(rig: Rig) -> None:
    attributes: Plain = {"resource.kubernetes.io/pciBusID": {"string": FIRST}}
    rig.api.put(
        {
            "metadata": {"name": "theirs"},
            "spec": {
                "driver": "gpu.nvidia.com",
                "nodeName": "node01",
                "devices": [{"name": "gpu-0", "attributes": attributes}],
            },
        }
    )
    reason = await rig.look()
    assert reason is not None
    assert "gpu.nvidia.com" in reason.text
    assert rig.api.devices == {"gpu-0": False, TWO: False}


async def test_no_gpu_is_published_without_the_counters_that_keep_it_apart(
    simulated: Simulated, tmp_path: Path
) -> None:
    api = SliceApi()
    api.drops = ("consumesCounters",)
    async with node_with(simulated("2xRTX4090-one-group"), api, tmp_path) as (node, publisher):
        want(node, DesiredMode.CLAIMS)
        await node.settle()
        reason = await publisher.look()
        assert reason is not None
        assert "consumesCounters" in reason.text


async def test_nothing_is_published_while_the_shapes_are_not_known(rig: Rig) -> None:
    rig.node.kernel.faults.fail(HostPath("/sys/module/nvidia_vgpu_vfio"), errno.EACCES)
    reason = await rig.look()
    assert reason is not None
    assert "the loaded driver is not known" in reason.text
    rig.node.kernel.faults.heal()
    publishing = rig.node.agent.publishing
    assert publishing is not None
    publishing._worker = worker = BlockedWorker()
    worker.is_blocked = True
    reason = await rig.look()
    assert reason is not None
    assert "their shapes are not known" in reason.text
    assert rig.api.writes == []
    worker.is_blocked = False
    assert await rig.look() is None
    assert rig.api.devices == {ONE: False, TWO: False}


async def test_nothing_is_published_that_the_ledger_can_not_have(rig: Rig) -> None:
    with failing(rig.folder, errno.EROFS), pytest.raises(NotWrittenError):
        await rig.look()
    assert rig.api.writes == []
    assert await rig.look() is None
    assert rig.api.devices == {ONE: False, TWO: False}
