"""Refusals of Allocate and their reasons; a request with one refused device gets no device."""

import errno
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from gpuvirt.agent.known.requests import AllocationRefusedError, AllocationRequest
from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName, VgpuType
from gpuvirt.loops.serialworker import ThreadWorker
from gpuvirt.model.desired.settings import Compat, Settings
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.files.tree import Folder, Link, constant
from gpuvirt_sim.hostspec import CardSpec, FunctionSpec, HostSpec, SlotSpec
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

T = TypeVar("T")

A10 = "nvidia.com/GA102GL_A10"
FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
FOLDER = f"/sys/bus/pci/devices/{FIRST}"


def replace_card(kernel: SimKernel) -> None:
    """Put a T4 into the place of the first A10, as its configuration space and the kernel's attributes show it."""
    answer_in_config(kernel, 0x1EB8)
    kernel.faults.answer(HostPath(f"{FOLDER}/device"), b"0x1eb8\n")


def answer_in_config(kernel: SimKernel, device: int) -> None:
    """Make the first GPU answer with another device id, which the kernel has not read yet."""
    content = kernel.read(HostPath(f"{FOLDER}/config"))
    kernel.faults.answer(HostPath(f"{FOLDER}/config"), content[:2] + device.to_bytes(2, "little") + content[4:])


def request_for(resource: str, device: str) -> AllocationRequest:
    return AllocationRequest(ResourceName(resource), [[DeviceId(device)]])


async def test_unknown_devices_and_resources_are_refused(two_a10: SimNode) -> None:
    assert two_a10.refused(A10, ["0000:01:00.0"]) is ReasonCode.UNKNOWN_DEVICE
    assert two_a10.refused(A10, ["../../etc/passwd"]) is ReasonCode.UNKNOWN_DEVICE
    assert two_a10.refused("nvidia.com/GH100", [FIRST]) is ReasonCode.UNKNOWN_RESOURCE


async def test_an_unhealthy_device_is_refused(two_a10: SimNode) -> None:
    two_a10.kernel.delete_node(IommuGroup(12))
    await two_a10.advance(2)
    assert two_a10.refused(A10, [FIRST]) is ReasonCode.NODE_MISSING


# The following faults occur between the last scan of the host and the request.


async def test_a_device_rebound_since_the_last_scan_is_refused(two_a10: SimNode) -> None:
    two_a10.kernel.rebind(FIRST, "nvidia")
    with pytest.raises(AllocationRefusedError, match="is bound to nvidia now") as refusal:
        two_a10.allocate(A10, [FIRST])
    assert refusal.value.reason.code is ReasonCode.DRIVER_CHANGED


async def test_a_device_unplugged_since_the_last_scan_is_refused(two_a10: SimNode) -> None:
    two_a10.kernel.unplug(FIRST)
    assert two_a10.refused(A10, [FIRST]) is ReasonCode.DEVICE_GONE


async def test_another_card_in_the_same_slot_is_refused(two_a10: SimNode) -> None:
    replace_card(two_a10.kernel)
    assert two_a10.refused(A10, [FIRST]) is ReasonCode.IDENTITY_CHANGED


async def test_the_ids_that_the_kernel_shows_decide_where_the_device_answers_with_others(two_a10: SimNode) -> None:
    answer_in_config(two_a10.kernel, 0x1EB8)
    two_a10.kernel.faults.fail(HostPath(f"{FOLDER}/device"), errno.EIO)
    assert two_a10.refused(A10, [FIRST]) is ReasonCode.UNREAD
    two_a10.kernel.faults.fail(HostPath(f"{FOLDER}/device"), errno.ENOENT)
    assert two_a10.refused(A10, [FIRST]) is ReasonCode.DEVICE_GONE
    two_a10.kernel.faults.errors.clear()
    two_a10.allocate(A10, [FIRST])


async def test_the_ids_are_not_read_where_the_device_itself_answers_with_them(two_a10: SimNode) -> None:
    two_a10.kernel.reads.clear()
    two_a10.allocate(A10, [FIRST, SECOND])
    assert two_a10.kernel.reads == {f"/sys/bus/pci/devices/{gpu}/config" for gpu in (FIRST, SECOND)}


async def test_a_device_in_another_iommu_group_is_refused(two_a10: SimNode) -> None:
    function = two_a10.kernel.pci.functions[FIRST]
    two_a10.kernel.tree.link(HostPath(f"{function.folder}/iommu_group"), HostPath("/sys/kernel/iommu_groups/22"))
    assert two_a10.refused(A10, [FIRST]) is ReasonCode.GROUP_CHANGED


async def test_a_device_with_an_unreadable_driver_is_refused(two_a10: SimNode) -> None:
    two_a10.kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{FIRST}/driver"), errno.EIO)
    assert two_a10.refused(A10, [FIRST]) is ReasonCode.UNREAD


async def test_a_gpu_is_refused_after_its_audio_function_returned_to_the_host(
    simulated: Simulated, tmp_path: Path
) -> None:
    async with running_node(simulated("4xRTX2060"), tmp_path) as node:
        node.kernel.rebind(PciAddress("0000:04:00.1"), "snd_hda_intel")
        name = "nvidia.com/TU106_GEFORCE_RTX_2060_REV__A"
        assert node.refused(name, ["0000:04:00.0"]) is ReasonCode.GROUP_NOT_VIABLE


async def test_a_device_in_use_is_refused_and_the_process_is_named(two_a10: SimNode) -> None:
    process = two_a10.kernel.start_vm(IommuGroup(12))
    with pytest.raises(AllocationRefusedError, match=rf"in use by qemu-system-x86 \(pid {process.pid}\)"):
        two_a10.allocate(A10, [FIRST])
    two_a10.kernel.end_vm(process)
    assert two_a10.allocate(A10, [FIRST])


async def test_a_device_whose_use_is_unknown_is_allocated(two_a10: SimNode) -> None:
    two_a10.kernel.faults.fail(HostPath("/dev/vfio/12"), errno.EPERM)
    assert two_a10.allocate(A10, [FIRST])


async def test_a_request_with_one_bad_device_is_refused_as_a_whole(two_a10: SimNode) -> None:
    two_a10.kernel.rebind(SECOND, "nvidia")
    assert two_a10.refused(A10, [FIRST], [SECOND]) is ReasonCode.DRIVER_CHANGED
    await two_a10.advance(1)
    assert two_a10.gpu(FIRST).users == ()


async def test_a_refusal_starts_a_scan_at_once(two_a10: SimNode) -> None:
    replace_card(two_a10.kernel)
    two_a10.refused(A10, [FIRST])
    await two_a10.advance(0.2)
    assert two_a10.offered == {A10: {SECOND: True}, "nvidia.com/TU104GL_TESLA_T4": {FIRST: True}}


async def test_an_mdev_of_another_type_and_a_removed_mdev_are_refused(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("4xT4"), tmp_path) as node:
        name = "nvidia.com/GRID_T4-8Q"
        first, second, *_ = node.offered[name]
        node.kernel.faults.answer(HostPath(f"/sys/bus/mdev/devices/{first}/mdev_type/name"), b"GRID T4-16Q\n")
        node.kernel.write(HostPath(f"/sys/bus/mdev/devices/{second}/remove"), b"1")
        assert node.refused(name, [first]) is ReasonCode.TYPE_CHANGED
        assert node.refused(name, [second]) is ReasonCode.DEVICE_GONE


async def test_the_compat_setting_drops_mismatched_vgpus_from_the_answer(simulated: Simulated, tmp_path: Path) -> None:
    settings = Settings(compat=Compat(drop_mismatched_vgpus=True))
    async with running_node(simulated("4xT4"), tmp_path, settings) as node:
        name = "nvidia.com/GRID_T4-8Q"
        first, second, *_ = node.offered[name]
        node.kernel.write(HostPath(f"/sys/bus/mdev/devices/{second}/remove"), b"1")
        (answer,) = node.allocate(name, [first, second])
        assert answer.env == {"MDEV_PCI_RESOURCE_NVIDIA_COM_GRID_T4-8Q": first}


async def test_a_vf_that_lost_its_vgpu_type_is_refused(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("4xL40S"), tmp_path) as node:
        node.kernel.write(HostPath("/sys/bus/pci/devices/0000:25:00.4/nvidia/current_vgpu_type"), b"0")
        assert node.refused("nvidia.com/NVIDIA_L40S-12Q", ["0000:25:00.4"]) is ReasonCode.TYPE_CHANGED


async def test_refusals_are_counted_by_their_reason(two_a10: SimNode) -> None:
    two_a10.refused(A10, ["0000:01:00.0"])
    two_a10.allocate(A10, [FIRST])
    assert two_a10.agent.telemetry.allocations == {(A10, "UnknownDevice"): 1, (A10, "given"): 1}


async def test_a_device_whose_group_node_was_deleted_is_refused(two_a10: SimNode) -> None:
    two_a10.kernel.delete_node(IommuGroup(12))
    assert two_a10.refused(A10, [FIRST]) is ReasonCode.NODE_MISSING


async def test_every_device_is_refused_without_the_vfio_container_node(two_a10: SimNode) -> None:
    two_a10.kernel.tree.remove(HostPath("/dev/vfio/vfio"))
    assert two_a10.refused(A10, [FIRST]) is ReasonCode.NODE_MISSING
    await two_a10.advance(2)
    assert two_a10.offered == {A10: {FIRST: False, "0000:ca:00.0": False}}


def with_iommufd(*, group_nodes: bool = True) -> SimKernel:
    slots = (
        SlotSpec(at=FIRST, board="A10", driver="vfio-pci", group=12),
        SlotSpec(at="0000:ca:00.0", board="A10", driver="vfio-pci", group=22),
    )
    return build_host(HostSpec(about="two A10", iommufd=True, group_nodes=group_nodes, slots=slots))


async def test_a_device_whose_device_node_was_renamed_is_refused(tmp_path: Path) -> None:
    """The old node may now be another tenant's device: the kernel numbers device nodes in the order of binding."""
    kernel = with_iommufd()
    async with running_node(kernel, tmp_path) as node:
        folder = kernel.pci.functions[FIRST].folder
        kernel.tree.remove(HostPath(f"{folder}/vfio-dev"))
        kernel.tree.place(HostPath(f"{folder}/vfio-dev/vfio1"), Folder())
        assert node.refused(A10, [FIRST]) is ReasonCode.NODE_MISSING


async def test_a_removed_device_node_makes_the_device_unhealthy_within_two_seconds(tmp_path: Path) -> None:
    kernel = with_iommufd(group_nodes=False)
    async with running_node(kernel, tmp_path) as node:
        kernel.tree.remove(HostPath("/dev/vfio/devices/vfio0"))
        assert node.refused(A10, [FIRST]) is ReasonCode.NODE_MISSING
        await node.advance(2)
        assert node.offered == {A10: {FIRST: False, "0000:ca:00.0": True}}


async def test_a_device_in_use_is_refused_on_a_kernel_without_vfio_groups(tmp_path: Path) -> None:
    kernel = with_iommufd(group_nodes=False)
    kernel.tree.place(HostPath("/proc/777/comm"), constant("qemu"))
    async with running_node(kernel, tmp_path) as node:
        kernel.tree.place(HostPath("/proc/777/fd/5"), Link("/dev/vfio/devices/vfio0"))
        assert node.refused(A10, [FIRST]) is ReasonCode.IN_USE_ELSEWHERE
        assert node.allocate(A10, ["0000:ca:00.0"])


async def test_a_vgpu_in_a_pci_domain_that_kubevirt_refuses_is_not_offered(tmp_path: Path) -> None:
    slot = SlotSpec(at="10000:25:00.0", board="L40S", group=12, vfs=4, vgpus={VgpuType("NVIDIA L40S-12Q"): 1})
    async with running_node(build_host(HostSpec(about="behind VMD", slots=(slot,))), tmp_path) as node:
        assert node.offered == {}
        assert node.reasons("10000:25:00.4") == [ReasonCode.ADDRESS_NOT_ACCEPTED]


async def test_a_driver_that_sleeps_refuses_one_pod_and_delays_no_other_request(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel, wake = simulated("4xL40S"), threading.Event()

    def sleep() -> None:
        wake.wait(100)

    async with running_node(kernel, tmp_path, allocating=ThreadWorker("allocating")) as node:
        path = HostPath("/sys/bus/pci/devices/0000:25:00.4/nvidia/current_vgpu_type")
        kernel.faults.before_read(path, sleep)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gpuvirt.agent.allocation.allocator.READ_TIMEOUT_S", 0.01)
            with pytest.raises(AllocationRefusedError, match="ScanBlocked"):
                await node.agent.allocators.existing.allocate(request_for("nvidia.com/NVIDIA_L40S-12Q", "0000:25:00.4"))
        wake.set()


def walks_of(node: SimNode) -> list[HostPath]:
    """Return a list that grows with each walk through all processes."""
    walks: list[HostPath] = []

    def note_walk() -> None:
        walks.append(HostPath("/proc"))
        node.kernel.faults.before_read(HostPath("/proc"), note_walk)

    note_walk()
    walks.clear()
    return walks


async def test_a_request_for_allocated_devices_reads_proc_once(two_a10: SimNode) -> None:
    two_a10.allocate(A10, [FIRST, SECOND])
    two_a10.write(A10, FIRST, SECOND, uid="a")
    walks = walks_of(two_a10)
    assert two_a10.allocate(A10, [FIRST, SECOND])
    assert len(walks) == 1


async def test_the_group_of_a_device_whose_pod_cannot_have_started_is_opened(two_a10: SimNode) -> None:
    """The kubelet records a container's devices before it starts the container: until then no VM can open the group."""
    two_a10.allocate(A10, [FIRST])
    walks = walks_of(two_a10)
    assert two_a10.allocate(A10, [FIRST])
    assert walks == []
    process = two_a10.kernel.start_vm(IommuGroup(12))
    assert two_a10.refused(A10, [FIRST]) is ReasonCode.IN_USE_ELSEWHERE
    two_a10.kernel.end_vm(process)
    two_a10.recorded.unread = True
    walks.clear()
    assert two_a10.allocate(A10, [FIRST])
    assert len(walks) == 1, "an unreadable checkpoint doesn't prove that the container has not started"


async def test_a_request_reads_the_device_numbers_of_its_own_groups_only(two_a10: SimNode) -> None:
    two_a10.allocate(A10, [SECOND])
    two_a10.write(A10, SECOND, uid="a")
    two_a10.kernel.reads.clear()
    assert two_a10.allocate(A10, [SECOND])
    read = {path for path in two_a10.kernel.reads if path.startswith("/sys/class/vfio/")}
    assert read == {"/sys/class/vfio/22/dev"}


async def test_a_request_for_two_allocated_devices_names_the_device_in_use(two_a10: SimNode) -> None:
    two_a10.allocate(A10, [FIRST, SECOND])
    process = two_a10.kernel.start_vm(IommuGroup(22))
    with pytest.raises(AllocationRefusedError, match=rf"{SECOND} is in use by qemu-system-x86 \(pid {process.pid}\)"):
        two_a10.allocate(A10, [FIRST, SECOND])
    assert two_a10.allocate(A10, [FIRST])


@pytest.mark.parametrize("cause", ["ledger", "checkpoint", "denied group", "busy group"])
async def test_a_blocked_read_of_proc_delays_no_other_request(simulated: Simulated, tmp_path: Path, cause: str) -> None:
    kernel, wake = simulated("2xA10"), threading.Event()

    def sleep() -> None:
        wake.wait(100)

    async with running_node(kernel, tmp_path, allocating=ThreadWorker("allocating")) as node:
        match cause:
            case "ledger":
                node.hold(A10, FIRST)
                await node.report_account()
                node.free(FIRST)
            case "checkpoint":
                node.write(A10, FIRST, uid="uid-a")
            case "denied group":
                kernel.faults.fail(HostPath("/dev/vfio/12"), errno.EPERM)
            case _:
                kernel.start_vm(IommuGroup(12))
        kernel.faults.before_read(HostPath("/proc"), sleep)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gpuvirt.agent.allocation.allocator.READ_TIMEOUT_S", 0.01)
            with pytest.raises(AllocationRefusedError, match="ScanBlocked"):
                await node.agent.allocators.existing.allocate(request_for(A10, FIRST))
        wake.set()


async def test_a_vgpu_created_during_a_scan_can_be_allocated_at_once(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xL40S")
    current = HostPath("/sys/bus/pci/devices/0000:25:00.4/nvidia/current_vgpu_type")
    type_id = kernel.read(current)
    kernel.write(current, b"0")
    kernel.faults.before_read(current, lambda: kernel.write(current, type_id))
    async with running_node(kernel, tmp_path) as node:
        (answer,) = node.allocate("nvidia.com/NVIDIA_L40S-12Q", ["0000:25:00.4"])
        (own,) = kernel.listdir(HostPath("/sys/bus/pci/devices/0000:25:00.4/vfio-dev"))
        assert f"/dev/vfio/devices/{own}" in answer.device_nodes


@pytest.mark.parametrize("driver", ["vfio-pci", "snd_hda_intel"])
async def test_the_audio_function_of_a_chipset_is_not_offered(tmp_path: Path, driver: str) -> None:
    board = CardSpec(functions=(FunctionSpec(id="8086:a348", class_code="040300", native_driver="snd_hda_intel"),))
    slot = SlotSpec(at="0000:00:1f.3", board="audio", driver=driver, group=2)
    kernel = build_host(HostSpec(about="no GPU", boards={"audio": board}, slots=(slot,)))
    async with running_node(kernel, tmp_path, Settings(compat=Compat(offer_companions=True))) as node:
        assert (node.offered, node.view.functions) == ({}, ())


class LateWorker:
    """A worker whose reading takes so long that the agent continues before the result arrives."""

    def __init__(self) -> None:
        self.meanwhile: list[Callable[[], Awaitable[object]]] = []
        """The functions that are called after the reading, and before its result arrives; each once."""

    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        del name, timeout_s
        found = job()
        while self.meanwhile:
            await self.meanwhile.pop()()
        return found


async def test_a_device_that_becomes_unhealthy_after_its_reading_is_refused(tmp_path: Path) -> None:
    kernel, worker = with_iommufd(group_nodes=False), LateWorker()
    async with running_node(kernel, tmp_path, allocating=worker) as node:

        async def lose_node() -> None:
            kernel.tree.remove(HostPath("/dev/vfio/devices/vfio0"))
            await node.advance(2)

        worker.meanwhile.append(lose_node)
        with pytest.raises(AllocationRefusedError) as refusal:
            await node.agent.allocators.existing.allocate(request_for(A10, FIRST))
        assert refusal.value.reason.code is ReasonCode.NODE_MISSING
        assert worker.meanwhile == []


async def test_the_sibling_of_a_device_that_is_allocated_after_its_reading_is_refused(tmp_path: Path) -> None:
    slots = tuple(SlotSpec(at=gpu, board="A10", group=12, numa=0, driver="vfio-pci") for gpu in (FIRST, SECOND))
    kernel = build_host(HostSpec(about="two A10 in one group", iommufd=True, group_nodes=False, slots=slots))
    worker = LateWorker()
    async with running_node(kernel, tmp_path, allocating=worker) as node:
        await node.report_account()
        worker.meanwhile.append(lambda: node.agent.allocators.existing.allocate(request_for(A10, SECOND)))
        with pytest.raises(AllocationRefusedError) as refusal:
            await node.agent.allocators.existing.allocate(request_for(A10, FIRST))
        assert refusal.value.reason.code is ReasonCode.GROUP_ALLOCATED
