"""Containers start only with their own devices' nodes: the kernel numbers groups and VFIO devices at each boot."""

import dataclasses
import errno
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.agent.store import agentstate
from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName, VgpuId
from gpuvirt.facts.nodes import unread_node
from gpuvirt.facts.sysfs import MDEVS
from gpuvirt.hardware.scan import scan
from gpuvirt.model.allocation.attachment import Attachment
from gpuvirt.model.allocation.containerstarts import foreign_nodes
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.allocation.pluginanswers import PluginAnswer
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.model.offers.offermaking import awaited
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.clock import BEGINNING
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import running
from gpuvirt_sim.kubelet.starting import StartError, start_container
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import change_host_in
from tests.agent.kubelet.kubeletnode import CLOCK, agent_on, options_for, until
from tests.agent.node.nodewithvgpus import FIRST, T4_4Q, VGPU, of
from tests.agent.node.simnode import Record, SimNode, at_once, running_node
from tests.sim.simulated import Simulated

RTX4090 = ResourceName("nvidia.com/AD102_GEFORCE_RTX_4090")
WHOLE = Settings(mode=DesiredMode.PASSTHROUGH)
LEFT, RIGHT = PciAddress("0000:01:00.0"), PciAddress("0000:02:00.0")


def recorded(answer: Attachment) -> PluginAnswer:
    """Return an answer as the agent reads it from the kubelet's checkpoint."""
    return PluginAnswer(tuple(map(unread_node, answer.device_nodes)), tuple(answer.env.items()))


def admit(node: SimNode, resource: str, *devices: str, pod: str = "a") -> Attachment:
    """Start a pod with devices; return the answer, which the kubelet has recorded."""
    (answer,) = node.allocate(resource, list(devices))
    node.hold(resource, *devices, pod=pod, answer=recorded(answer))
    return answer


def start(node: SimNode, resource: str, *devices: str) -> None:
    """Ask before a container starts; raise AllocationRefusedError."""
    at_once(node.agent.allocators.pre_start(ResourceName(resource), [DeviceId(device) for device in devices]))


def why_refused(node: SimNode, resource: str, *devices: str) -> Reason:
    with pytest.raises(AllocationRefusedError) as refused:
        start(node, resource, *devices)
    return refused.value.reason


async def kept(node: SimNode, record: Record, held: SimNode) -> None:
    """Let the kubelet report and record what it had before a reboot."""
    node.recorded.containers, node.held = record.containers, held.held
    await node.report_account()
    await node.advance(30)


async def label(node: SimNode) -> None:
    node.agent.observations.take_request(NodeRequest(Observed("T4-4Q"), Observed(None)))
    await node.advance(2)
    await node.report_account()
    await node.advance(20)


def without_vgpus(kernel: SimKernel) -> SimKernel:
    """Return a host after a reboot, which ends vGPUs."""
    kernel.reboot_id()
    for device in list(kernel.mdev.devices):
        kernel.write(HostPath(f"{MDEVS}/{device}/remove"), b"1")
    return kernel


def gpus_in(left: int, right: int, *, boots: int = 0) -> SimKernel:
    """Return two GPUs for VMs in these groups, after so many reboots."""
    cards = ((LEFT, left), (RIGHT, right))
    slots = tuple(SlotSpec(at=at, board="RTX4090", driver="vfio-pci", group=group) for at, group in cards)
    kernel = build_host(HostSpec(about="two GPUs", slots=slots))
    for _ in range(boots):
        kernel.reboot_id()
    return kernel


@pytest.mark.parametrize("has_ledger", [True, False])
async def test_a_container_does_not_start_with_the_node_of_another_vgpu(
    simulated: Simulated, tmp_path: Path, *, has_ledger: bool
) -> None:
    async with running_node(simulated("4xT4"), tmp_path, VGPU) as before:
        await label(before)
        vgpus = of(before.kernel, FIRST)
        answer = admit(before, T4_4Q, vgpus[2])
        start(before, T4_4Q, vgpus[2])
        await before.report_account()
    if not has_ledger:
        (tmp_path / "ledger.json").unlink()
    async with running_node(without_vgpus(simulated("4xT4")), tmp_path, VGPU) as node:
        await kept(node, before.recorded, before)
        await label(node)
        others = (live for host in scan(node.kernel).vgpu_hosts.values() for live in host.live)
        owner = next(live.id for live in others if f"/dev/vfio/{live.group}" == answer.device_nodes[-1])
        assert owner != vgpus[2], "the kernel has given the group's number to another vGPU"
        reason = why_refused(node, T4_4Q, vgpus[2])
        assert reason.code is ReasonCode.NODES_CHANGED
        assert answer.device_nodes[-1] in reason.text
        assert "delete the pod" in reason.text
        node.free(vgpus[2])
        admit(node, T4_4Q, owner, pod="b")
        start(node, T4_4Q, owner)


def one_t4(*, boots: int = 0) -> SimKernel:
    """Return a host with one T4 without vGPUs, after so many reboots."""
    kernel = build_host(HostSpec(about="one T4", slots=(SlotSpec(at=FIRST, board="T4", group=31),)))
    for _ in range(boots):
        kernel.reboot_id()
    return kernel


async def test_containers_start_with_the_nodes_that_their_vgpus_have_again(tmp_path: Path) -> None:
    """vGPUs of pods are made again in the order of their groups."""
    async with running_node(one_t4(), tmp_path, VGPU) as before:
        await label(before)
        vgpus = of(before.kernel, FIRST)
        for index, vgpu in enumerate(vgpus):
            admit(before, T4_4Q, vgpu, pod=f"pod-{index}")
        await before.report_account()
    for boots in (1, 2):
        async with running_node(one_t4(boots=boots), tmp_path, VGPU) as node:
            await kept(node, before.recorded, before)
            for vgpu in vgpus:
                start(node, T4_4Q, vgpu)
    assert len(vgpus) == 4


async def test_a_vgpu_that_is_made_again_after_a_reboot_is_listed_as_healthy_until_then(tmp_path: Path) -> None:
    """The kubelet, which admits the pod again, would refuse it for good; no other pod gets the vGPU meanwhile."""
    async with running_node(one_t4(), tmp_path, VGPU) as before:
        await label(before)
        made = (live for host in scan(before.kernel).vgpu_hosts.values() for live in host.live)
        vgpu = min(made, key=lambda live: str(live.group)).id  # it is made first in the next boot, too
        admit(before, T4_4Q, vgpu)
        await before.report_account()
    (tmp_path / agentstate.DESIRED_FILE).unlink()  # the agent learns from the API server what is desired
    async with running_node(one_t4(boots=1), tmp_path, VGPU) as node:
        assert of(node.kernel, FIRST) == []
        assert node.offered[T4_4Q] == {vgpu: True}
        assert node.reasons(vgpu) == [ReasonCode.AWAITED_AFTER_REBOOT]
        assert node.refused(T4_4Q, [vgpu]) is ReasonCode.AWAITED_AFTER_REBOOT
        node.recorded.containers, node.held = before.recorded.containers, before.held
        assert why_refused(node, T4_4Q, vgpu).code is ReasonCode.AWAITED_AFTER_REBOOT
        await node.report_account()
        assert node.offered[T4_4Q] == {vgpu: True}, "the kubelet may not have admitted its pod yet"
        await label(node)
        assert node.offered[T4_4Q][DeviceId(vgpu)] is True
        assert node.reasons(vgpu) == []
        start(node, T4_4Q, vgpu)
        node.kernel.write(HostPath(f"{MDEVS}/{vgpu}/remove"), b"1")
        await node.advance(1)
        assert node.offered[T4_4Q][DeviceId(vgpu)] is False, "this boot has shown it"


@pytest.mark.parametrize(
    ("earlier_boot", "against", "is_awaited"),
    [
        (True, ReasonCode.DRIVER_CHANGED, True),
        (True, ReasonCode.NO_DRIVER, True),
        (True, ReasonCode.DEVICE_GONE, False),
        (True, ReasonCode.UNREAD, False),
        (False, ReasonCode.DRIVER_CHANGED, False),
    ],
)
def test_a_gpu_is_awaited_where_a_reboot_has_given_it_another_driver(
    against: ReasonCode, *, earlier_boot: bool, is_awaited: bool
) -> None:
    entry = Entry(RTX4090, DeviceId(LEFT), Target(LEFT), None, "a", BEGINNING, earlier_boot=earlier_boot)
    reason = Reason(against, LEFT, "has changed")
    assert (awaited(entry, reason).code is ReasonCode.AWAITED_AFTER_REBOOT) == is_awaited
    assert is_awaited or awaited(entry, reason) is reason


async def test_a_vgpu_that_was_removed_in_this_boot_is_not_awaited(tmp_path: Path) -> None:
    async with running_node(one_t4(), tmp_path, VGPU) as node:
        await label(node)
        vgpu = of(node.kernel, FIRST)[0]
        admit(node, T4_4Q, vgpu)
        await node.report_account()
        node.kernel.write(HostPath(f"{MDEVS}/{vgpu}/remove"), b"1")
        await node.advance(1)
        assert node.reasons(vgpu) == [ReasonCode.DEVICE_GONE]
        assert node.offered[T4_4Q][DeviceId(vgpu)] is False
        assert why_refused(node, T4_4Q, vgpu).code is ReasonCode.NODES_CHANGED


async def test_a_vgpu_of_vendor_vfio_is_awaited_after_a_reboot(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("4xL40S"), tmp_path) as before:
        await before.report_account()
        resource, devices = next((name, list(found)) for name, found in before.offered.items() if "L40S-" in name)
        admit(before, resource, devices[0])
        await before.report_account()
    kernel = simulated("4xL40S")
    kernel.reboot_id()
    kernel.write(HostPath(f"/sys/bus/pci/devices/{devices[0]}/nvidia/current_vgpu_type"), b"0")
    async with running_node(kernel, tmp_path) as node:
        assert node.offered[resource][DeviceId(devices[0])] is True
        assert ReasonCode.AWAITED_AFTER_REBOOT in node.reasons(devices[0])
        node.recorded.containers, node.held = before.recorded.containers, before.held
        reason = why_refused(node, resource, devices[0])
        assert reason.code is ReasonCode.AWAITED_AFTER_REBOOT
        assert "vGPU" in reason.text
        assert "mdev" not in reason.text


@pytest.mark.parametrize("driver", ["nvidia", None])
async def test_a_gpu_that_is_bound_again_after_a_reboot_is_listed_as_healthy_until_then(
    tmp_path: Path, driver: str | None
) -> None:
    async with running_node(gpus_in(12, 14), tmp_path) as before:
        await before.report_account()
        admit(before, RTX4090, LEFT)
        await before.report_account()
    kernel = gpus_in(12, 14, boots=1)
    kernel.rebind(LEFT, driver)
    async with running_node(kernel, tmp_path) as node:
        await node.advance(5)
        assert node.offered[RTX4090] == {LEFT: True, RIGHT: True}
        assert node.reasons(LEFT) == [ReasonCode.AWAITED_AFTER_REBOOT]
        assert node.refused(RTX4090, [LEFT]) is ReasonCode.AWAITED_AFTER_REBOOT
        node.recorded.containers, node.held = before.recorded.containers, before.held
        assert why_refused(node, RTX4090, LEFT).code is ReasonCode.AWAITED_AFTER_REBOOT
        kernel.rebind(LEFT, "vfio-pci")
        await node.advance(5)
        await node.report_account()
        assert node.reasons(LEFT) == []
        start(node, RTX4090, LEFT)
        kernel.rebind(LEFT, driver)
        await node.advance(5)
        assert node.offered[RTX4090][DeviceId(LEFT)] is False


def natives(*, boots: int = 0) -> SimKernel:
    """Return the two GPUs on their native drivers, as after a boot."""
    kernel = gpus_in(12, 14, boots=boots)
    for gpu, driver in ((LEFT, "nvidia"), (RIGHT, "nvidia")):
        kernel.rebind(gpu, driver)
        kernel.rebind(PciAddress(f"{gpu[:-1]}1"), "snd_hda_intel")
    return kernel


async def test_the_agent_binds_the_gpu_of_a_pod_again_after_a_reboot(tmp_path: Path) -> None:
    """The pod has nothing of a GPU on its native driver, and waits for it; it is the pod's once it is bound."""
    async with running_node(natives(), tmp_path, WHOLE) as before:
        await before.report_account()
        await before.advance(10)
        admit(before, RTX4090, LEFT)
        await before.report_account()
        await before.advance(10)
    async with running_node(natives(boots=1), tmp_path, WHOLE) as node:
        await kept(node, before.recorded, before)
        audio = PciAddress(f"{LEFT[:-1]}1")
        assert {node.kernel.pci.functions[member].driver for member in (LEFT, audio)} == {"vfio-pci"}
        start(node, RTX4090, LEFT)
        assert node.offered[RTX4090] == {LEFT: True, RIGHT: True}


@pytest.mark.parametrize("driver", ["nvidia", None])
async def test_a_gpu_of_a_running_pod_is_not_bound_again_in_the_same_boot(tmp_path: Path, driver: str | None) -> None:
    """Only a reboot shows that no container has it."""
    async with running_node(natives(), tmp_path, WHOLE) as node:
        await node.report_account()
        await node.advance(10)
        admit(node, RTX4090, LEFT)
        await node.report_account()
        node.kernel.rebind(LEFT, driver)
        await node.advance(30)
        await node.report_account()
        await node.advance(30)
        assert node.kernel.pci.functions[LEFT].driver == driver


async def test_a_gpu_that_another_plugin_gave_is_not_bound_after_a_reboot(tmp_path: Path) -> None:
    """Its containers may use the native driver; the ledger knows such a pod from the kubelet alone."""
    async with running_node(natives(), tmp_path, WHOLE) as before:
        await before.report_account()
        await before.advance(10)
        before.hold(RTX4090, LEFT)
        await before.report_account()
        await before.advance(10)
    async with running_node(natives(boots=1), tmp_path, WHOLE) as node:
        await kept(node, before.recorded, before)
        assert node.kernel.pci.functions[LEFT].driver == "nvidia"
        assert node.kernel.pci.functions[RIGHT].driver == "vfio-pci"


@pytest.mark.parametrize(("groups", "starts"), [((12, 14), True), ((14, 12), False), ((12, 12), True)])
async def test_a_whole_gpu_has_its_own_groups_node_after_a_reboot(
    tmp_path: Path, groups: tuple[int, int], *, starts: bool
) -> None:
    """A card that was added or removed changes the numbers of groups; that of a group shared with another GPU, too."""
    async with running_node(gpus_in(12, 14), tmp_path) as before:
        await before.report_account()
        assert admit(before, RTX4090, LEFT).device_nodes[-1] == "/dev/vfio/12"
        await before.report_account()
    async with running_node(gpus_in(*groups, boots=1), tmp_path) as node:
        await kept(node, before.recorded, before)
        if starts:
            start(node, RTX4090, LEFT)
        else:
            assert why_refused(node, RTX4090, LEFT).code is ReasonCode.NODES_CHANGED


async def test_a_whole_gpu_has_its_own_vfio_device_after_a_reboot(simulated: Simulated, tmp_path: Path) -> None:
    """VFIO numbers devices as they are bound, which happens to several GPUs at once."""
    kernel = simulated("2xGH200")
    async with running_node(kernel, tmp_path) as node:
        await node.report_account()
        (resource, devices) = next((name, list(found)) for name, found in node.offered.items() if len(found) > 1)
        answer = admit(node, resource, devices[0])
        start(node, resource, devices[0])
        key = ResourceName(resource), DeviceId(devices[0])
        for own, foreign in (("/dev/vfio/devices/vfio", "/dev/vfio/devices/vfio77"), ("/dev/egm", "/dev/egm77")):
            assert any(path.startswith(own) for path in answer.device_nodes)
            nodes = tuple(HostPath(foreign) if path.startswith(own) else path for path in answer.device_nodes)
            stale = recorded(replace(answer, device_nodes=nodes))
            consumers = node.recorded.containers[key]
            node.recorded.containers[key] = frozenset(
                dataclasses.replace(consumer, answer=stale) for consumer in consumers
            )
            reason = why_refused(node, resource, devices[0])
            assert (reason.code, foreign in reason.text) == (ReasonCode.NODES_CHANGED, True)


async def test_a_container_of_this_boot_starts_while_the_record_is_unknown(tmp_path: Path) -> None:
    """Its nodes are those of the agent's own answer."""
    kernel = gpus_in(12, 14)
    async with running_node(kernel, tmp_path) as before:
        await before.report_account()
        admit(before, RTX4090, LEFT)
        await before.report_account()
        before.recorded.unread = True
        start(before, RTX4090, LEFT)
    async with running_node(kernel, tmp_path) as node:
        node.recorded.unread, node.held = True, before.held
        await node.report_account()
        start(node, RTX4090, LEFT)
        assert why_refused(node, RTX4090, RIGHT).code is ReasonCode.ALLOCATIONS_UNKNOWN, "no agent has allocated it"


@pytest.mark.parametrize("has_ledger", [True, False])
async def test_a_container_waits_for_the_record_if_it_may_be_older_than_this_boot(
    tmp_path: Path, *, has_ledger: bool
) -> None:
    async with running_node(gpus_in(12, 14), tmp_path) as before:
        await before.report_account()
        admit(before, RTX4090, LEFT)
        await before.report_account()
    if not has_ledger:
        (tmp_path / "ledger.json").unlink()
    async with running_node(gpus_in(12, 14, boots=1), tmp_path) as node:
        node.recorded.unread = True
        await kept(node, before.recorded, before)
        assert why_refused(node, RTX4090, LEFT).code is ReasonCode.ALLOCATIONS_UNKNOWN
        node.recorded.unread = False
        start(node, RTX4090, LEFT)
        node.recorded.containers = {}
        assert "does not have the device" in why_refused(node, RTX4090, LEFT).text


async def test_no_container_starts_before_the_host_was_observed(tmp_path: Path) -> None:
    async with running_node(gpus_in(12, 14), tmp_path) as node:
        await node.report_account()
        admit(node, RTX4090, LEFT)
        node.agent._state.picture = replace(node.agent._state.picture, inventory=None)
        assert why_refused(node, RTX4090, LEFT).code is ReasonCode.UNKNOWN_RESOURCE


async def test_the_answer_of_another_plugin_keeps_no_container_from_its_start(tmp_path: Path) -> None:
    """Its ids may be numbers of groups, and its answer names no device by gpuvirt's variables."""
    async with running_node(gpus_in(12, 14), tmp_path) as node:
        node.hold(RTX4090, "12", answer=PluginAnswer((unread_node(HostPath("/dev/vfio/12")),), (("TOKEN", "a"),)))
        await node.report_account()
        start(node, RTX4090, "12")


def test_a_device_whose_group_is_unknown_has_no_node(simulated: Simulated) -> None:
    """So has a VF of NVIDIA's without a vGPU: it is not a device of its own."""
    kernel = gpus_in(12, 14)
    answer = PluginAnswer((unread_node(HostPath("/dev/vfio/12")),), (("PCI_RESOURCE_X", LEFT),))
    assert foreign_nodes(build_inventory(scan(kernel)), answer) == ()
    kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{LEFT}/iommu_group"), errno.EIO)
    assert foreign_nodes(build_inventory(scan(kernel)), answer) == ("/dev/vfio/12",)
    inventory = build_inventory(scan(simulated("4xL40S")))
    vfs = (function for function in inventory.facts.functions.values() if function.physfn is not None)
    vf = next(function for function in vfs if VgpuId(function.address) not in inventory.vgpus)
    node = HostPath(f"/dev/vfio/{vf.iommu_group}")
    assert foreign_nodes(inventory, PluginAnswer((unread_node(node),), (("PCI_RESOURCE_X", vf.address),))) == (node,)


async def test_the_kubelet_does_not_start_a_container_with_another_gpus_node(short_path: Path) -> None:
    async with running(short_path, CLOCK) as kubelet:
        first = gpus_in(12, 14)
        async with agent_on(replace(options_for(first, short_path), change_host=None)):
            await until(lambda: kubelet.allocatable().get(RTX4090) == 2)
            pod = await kubelet.run_pod("a", Container("compute", {RTX4090: 2}))
            other = {path for path in pod.device_nodes() if path != "/dev/vfio/vfio"}
            assert other == {"/dev/vfio/12", "/dev/vfio/14"}
            assert (await start_container(kubelet, pod, "compute", short_path)).device_nodes == pod.device_nodes()
        again = gpus_in(13, 12, boots=1)
        options = options_for(again, short_path)
        async with agent_on(replace(options, change_host=change_host_in(short_path, again, SimTools(again)))):
            await until(lambda: kubelet.allocatable().get(RTX4090) == 2)
            with pytest.raises(StartError, match="/dev/vfio/14"):
                await start_container(kubelet, pod, "compute", short_path)
            kubelet.end_pod("a")
            pod = await kubelet.run_pod("b", Container("compute", {RTX4090: 2}))
            await start_container(kubelet, pod, "compute", short_path)
