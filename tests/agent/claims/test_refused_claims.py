"""A claim that can't have its GPU, or can't give it back, changes nothing and says why."""

import errno
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.claims.claimednode import CLAIMS, BlockedWorker, ClaimedNode, claim_of
from tests.agent.node.diskfaults import failing
from tests.agent.node.simnode import running_node
from tests.sim.simulated import Simulated

FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
A, B, OTHER = claim_of("a", FIRST), claim_of("b", FIRST), claim_of("other", SECOND)
NATIVE = PciAddress("0000:d8:00.0")
"""A P100 on its native driver without vGPUs."""


def refused(found: object, code: ReasonCode, says: str) -> None:
    assert isinstance(found, Reason), found
    assert found.code is code
    assert says in found.text


def drivers(kernel: SimKernel) -> dict[str, str | None]:
    return {address: function.driver for address, function in kernel.pci.functions.items()}


@pytest.fixture
def kernel(simulated: Simulated) -> SimKernel:
    return simulated("2xA10")


async def test_only_a_gpu_that_claims_get_is_prepared(kernel: SimKernel, tmp_path: Path) -> None:
    settings = Settings(mode=DesiredMode.PASSTHROUGH, modes={FIRST: DesiredMode.CLAIMS})
    gone = claim_of("gone", PciAddress("0000:99:00.0"))
    async with running_node(kernel, tmp_path, settings) as node:
        claimed = ClaimedNode(node, tmp_path, [A, OTHER, gone])
        refused(await claimed.prepare(OTHER), ReasonCode.CLAIM_INVALID, f"claims do not get {SECOND}")
        refused(await claimed.prepare(gone), ReasonCode.CLAIM_INVALID, "has no GPU 0000:99:00.0")
        assert not isinstance(await claimed.prepare(A), Reason)
        claimed.preparing.read = None
        refused(await claimed.prepare(B), ReasonCode.CLAIM_UNKNOWN, "no client of the API server")


async def test_claims_of_two_gpus_do_not_know_of_each_other(kernel: SimKernel, tmp_path: Path) -> None:
    async with running_node(kernel, tmp_path, CLAIMS) as node:
        claimed = ClaimedNode(node, tmp_path, [A, OTHER])
        assert not isinstance(await claimed.prepare(A), Reason)
        assert not isinstance(await claimed.prepare(OTHER), Reason)
        assert await claimed.unprepare(OTHER) is None
        assert claimed.spec(A)


async def test_what_the_kubelet_has_recorded_counts_although_the_ledger_was_lost(
    kernel: SimKernel, tmp_path: Path
) -> None:
    async with running_node(kernel, tmp_path, CLAIMS) as node:
        claimed = ClaimedNode(node, tmp_path, [A, B, OTHER])
        claimed.record(A)
        await node.report_account()
        refused(await claimed.prepare(B), ReasonCode.CLAIM_WAITS, "0000:65:00.0 is allocated to pod pod-of-a")
        assert not isinstance(await claimed.prepare(OTHER), Reason)
        assert not isinstance(await claimed.prepare(A), Reason), "its own pod"


async def test_a_conversion_that_is_refused_for_good_is_not_waited_for(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xP100")
    kernel.pci.forget_driver("vfio-pci")
    before = drivers(kernel)
    async with running_node(kernel, tmp_path, CLAIMS, tools=SimTools(kernel, {"nvidia"})) as node:
        claimed = ClaimedNode(node, tmp_path, [native := claim_of("native", NATIVE)])
        refused(await claimed.prepare(native, within_s=20), ReasonCode.STEP_FAILED, "vfio-pci")
        assert drivers(kernel) == before


async def test_what_can_not_be_written_is_not_prepared_or_forgotten(kernel: SimKernel, tmp_path: Path) -> None:
    async with running_node(kernel, tmp_path, CLAIMS) as node:
        claimed = ClaimedNode(node, tmp_path, [A])
        with failing(tmp_path, errno.EROFS):
            refused(await claimed.prepare(A), ReasonCode.CLAIM_NOT_WRITTEN, "Read-only file system")
        assert node.agent.publishing is not None
        assert node.agent.publishing.claimed == frozenset()
        (tmp_path / "claims").touch()  # in the place of the folder
        refused(await claimed.prepare(A), ReasonCode.CLAIM_NOT_WRITTEN, "claims")
        (tmp_path / "claims").unlink()
        assert not isinstance(await claimed.prepare(A), Reason)
        spec = tmp_path / f"cdi/gpuvirt.io-claim-{A.uid}.json"
        spec.unlink()
        spec.mkdir()
        refused(await claimed.unprepare(A), ReasonCode.CLAIM_NOT_WRITTEN, spec.name)
        assert node.agent.publishing.claimed == {FIRST}
        spec.rmdir()
        assert await claimed.unprepare(A) is None


async def test_a_gpu_whose_users_are_not_known_is_not_given_back(kernel: SimKernel, tmp_path: Path) -> None:
    async with running_node(kernel, tmp_path, CLAIMS) as node:
        claimed = ClaimedNode(node, tmp_path, [A])
        await claimed.prepare(A)
        kernel.processes.hide(hidden=True)
        kernel.faults.fail(HostPath("/dev/vfio/12"), errno.EPERM)
        refused(await claimed.unprepare(A), ReasonCode.CLAIM_WAITS, "ProcessesNotVisible")
        kernel.faults.heal()
        vm = kernel.start_vm(IommuGroup(12))
        refused(await claimed.unprepare(A), ReasonCode.CLAIM_WAITS, "its IOMMU group is open")
        kernel.end_vm(vm)
        assert await claimed.unprepare(A) is None


async def test_nothing_is_given_before_the_host_was_observed(kernel: SimKernel, tmp_path: Path) -> None:
    async with running_node(kernel, tmp_path, CLAIMS) as node:
        claimed = ClaimedNode(node, tmp_path, [A])
        state = claimed.preparing._state
        state.picture = replace(state.picture, inventory=None)
        refused(await claimed.prepare(A), ReasonCode.CLAIM_WAITS, "has not observed its host yet")
        assert not state.ledger.claims, "the next call reads the claim again"


async def test_a_gpu_for_claims_says_why_no_device_plugin_offers_it(kernel: SimKernel, tmp_path: Path) -> None:
    async with running_node(kernel, tmp_path, CLAIMS) as node:
        assert node.reasons(FIRST) == [ReasonCode.OFFERED_TO_CLAIMS]


async def test_a_gpu_that_can_not_be_read_in_time_is_not_given_back(kernel: SimKernel, tmp_path: Path) -> None:
    worker = BlockedWorker()
    async with running_node(kernel, tmp_path, CLAIMS, allocating=worker) as node:
        claimed = ClaimedNode(node, tmp_path, [A])
        await claimed.prepare(A)
        worker.is_blocked = True
        refused(await claimed.unprepare(A), ReasonCode.CLAIM_WAITS, "takes more than 2 s")
        assert claimed.spec(A)
