"""A claim gets its GPU on the driver of its shape, alone, and gives it back; after any crash, in any order."""

from pathlib import Path

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt_sim.kernel import SimKernel
from tests.agent.claims.claimednode import CLAIMS, ClaimedNode, claim_of
from tests.agent.node.simnode import running_node
from tests.sim.simulated import Simulated

FIRST, SECOND = PciAddress("0000:3b:00.0"), PciAddress("0000:d8:00.0")
A, B = claim_of("a", FIRST), claim_of("b", FIRST)


def driver(kernel: SimKernel, gpu: PciAddress) -> str | None:
    return kernel.pci.functions[gpu].driver


def group_of(kernel: SimKernel) -> IommuGroup:
    group = kernel.pci.functions[FIRST].group
    assert group is not None
    return group


def code(found: object) -> ReasonCode:
    assert isinstance(found, Reason), found
    return found.code


async def test_an_idle_gpu_goes_to_vfio_for_the_claim_of_a_vm_and_is_its_alone(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("2xP100")
    async with running_node(kernel, tmp_path, CLAIMS) as node:
        claimed = ClaimedNode(node, tmp_path, [A, B])
        await node.report_account()
        assert kernel.writes == [], "nothing is changed before a claim asks for it"
        assert not any(node.offered.values()), "no device plugin offers a GPU for claims"
        assert node.reasons(SECOND) == [ReasonCode.OFFERED_TO_CLAIMS]
        found = await claimed.prepare(A)
        assert not isinstance(found, Reason), found
        assert [gpu.cdi_device for gpu in found] == ["gpuvirt.io/claim=uid-of-a-gpu"]
        assert (driver(kernel, FIRST), driver(kernel, SECOND)) == ("vfio-pci", "nvidia")
        assert f"/dev/vfio/{group_of(kernel)}" in str(claimed.spec(A))
        assert code(await claimed.prepare(B)) is ReasonCode.CLAIM_WAITS
        again = await claimed.prepare(A)
        assert again == found
        assert claimed.asked == 2, "a known claim is answered from the record"


async def test_a_gpu_is_given_back_once_no_process_has_it_open(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xP100")
    async with running_node(kernel, tmp_path, CLAIMS) as node:
        claimed = ClaimedNode(node, tmp_path, [A, B])
        await claimed.prepare(A)
        vm = kernel.start_vm(group_of(kernel))
        refused = await claimed.unprepare(A)
        assert code(refused) is ReasonCode.CLAIM_WAITS
        assert refused is not None
        assert "qemu" in refused.text
        assert claimed.spec(A)
        kernel.end_vm(vm)
        assert await claimed.unprepare(A) is None
        assert await claimed.unprepare(A) is None, "the kubelet may ask again"
        assert not list((tmp_path / "cdi").glob("gpuvirt.io-claim-*"))
        assert not isinstance(await claimed.prepare(B), Reason)


async def test_a_gpu_that_a_process_uses_is_not_converted_until_it_ends(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xP100")
    job = kernel.start_process("python3", "/dev/nvidia0")
    async with running_node(kernel, tmp_path, CLAIMS) as node:
        claimed = ClaimedNode(node, tmp_path, [A])
        refused = await claimed.prepare(A)
        assert code(refused) is ReasonCode.CLAIM_WAITS
        assert isinstance(refused, Reason)
        assert "python3" in refused.text
        assert driver(kernel, FIRST) == "nvidia"
        kernel.end_vm(job)
        assert not isinstance(await claimed.prepare(A, within_s=400), Reason)


async def test_a_gpu_of_a_device_plugins_pod_is_not_given_to_a_claim(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xP100")
    async with running_node(kernel, tmp_path, Settings(mode=DesiredMode.PASSTHROUGH)) as node:
        await node.report_account()
        await node.advance(10)
        (resource,) = node.offered
        node.allocate(resource, [FIRST])
        node.hold(resource, FIRST)
        await node.report_account()
    async with running_node(kernel, tmp_path, CLAIMS) as node:
        claimed = ClaimedNode(node, tmp_path, [A])
        node.hold(resource, FIRST)
        await node.report_account()
        publishing = node.agent.publishing
        assert publishing is not None
        refused = await claimed.prepare(A)
        assert isinstance(refused, Reason)
        assert FIRST in node.offered[resource], "the pod's device stays listed"


async def test_a_killed_agent_is_followed_by_one_that_finishes(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xP100")
    async with running_node(kernel, tmp_path, CLAIMS) as node:
        claimed = ClaimedNode(node, tmp_path, [A])
        await claimed.interrupt(A)
    async with running_node(kernel, tmp_path, CLAIMS) as node:
        claimed = ClaimedNode(node, tmp_path, [B])
        refused = await claimed.prepare(B)
        assert code(refused) is ReasonCode.CLAIM_WAITS, "the GPU is promised to the other claim"
        assert isinstance(refused, Reason)
        assert "claim default/a has" in refused.text
        await node.advance(10)
        assert driver(kernel, FIRST) == "vfio-pci", "what the record says is desired"
        assert not isinstance(await claimed.prepare(A), Reason)
        assert claimed.asked == 1, "for the other one"


async def test_gpus_of_one_group_go_to_one_claim(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xRTX4090-one-group")
    first, second = PciAddress("0000:0b:01.0"), PciAddress("0000:0b:02.0")
    one, other = claim_of("one", first), claim_of("other", second)
    async with running_node(kernel, tmp_path, CLAIMS) as node:
        claimed = ClaimedNode(node, tmp_path, [one, other])
        assert not isinstance(await claimed.prepare(one), Reason)
        assert code(await claimed.prepare(other)) is ReasonCode.CLAIM_WAITS


async def test_a_published_gpu_is_offered_by_no_device_plugin_whatever_its_mode(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("2xP100")
    async with running_node(kernel, tmp_path, CLAIMS) as node:
        publishing = node.agent.publishing
        assert publishing is not None
        await node.report_account()
        await publishing.record(frozenset({FIRST}))
    async with running_node(kernel, tmp_path, Settings(mode=DesiredMode.PASSTHROUGH)) as node:
        publishing = node.agent.publishing
        assert publishing is not None
        await node.report_account()
        await node.advance(10)
        assert [device for devices in node.offered.values() for device in devices] == [SECOND]
        await publishing.record(frozenset())
        await node.settle()
        assert [device for devices in node.offered.values() for device in devices] == [FIRST, SECOND]


async def test_a_gpu_of_another_mode_stays_as_it_is_beside_a_claims(simulated: Simulated, tmp_path: Path) -> None:
    """A VM would need both, and an admin has given the other one to the host."""
    kernel = simulated("2xRTX4090-one-group")
    first, second = PciAddress("0000:0b:01.0"), PciAddress("0000:0b:02.0")
    kernel.rebind(first, "nvidia")
    kernel.rebind(second, "nvidia")
    settings = Settings(mode=DesiredMode.CLAIMS, modes={second: DesiredMode.CONTAINER})
    async with running_node(kernel, tmp_path, settings) as node:
        claimed = ClaimedNode(node, tmp_path, [one := claim_of("one", first)])
        assert isinstance(await claimed.prepare(one), Reason)
        assert driver(kernel, second) == "nvidia"
        assert node.agent.publishing is not None
        shaped = await node.agent.publishing.shaped()
        assert shaped is None or first not in shaped.desired, "a scheduler would give what can't be had"


async def test_after_a_reboot_a_claim_is_prepared_again(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xP100")
    async with running_node(kernel, tmp_path, CLAIMS) as node:
        claimed = ClaimedNode(node, tmp_path, [A])
        await claimed.prepare(A)
        before = claimed.spec(A)
    kernel.reboot_id()
    kernel.rebind(FIRST, "nvidia")
    (tmp_path / f"cdi/gpuvirt.io-claim-{A.uid}.json").write_text("{}")  # where the folder outlives a boot
    async with running_node(kernel, tmp_path, CLAIMS) as node:
        claimed = ClaimedNode(node, tmp_path, [])
        claimed.record(A)
        assert not isinstance(await claimed.prepare(A), Reason)
        assert driver(kernel, FIRST) == "vfio-pci"
        assert claimed.spec(A) == before
