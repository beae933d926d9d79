"""The agent brings GPUs to where they are wanted, keeps them there, and touches nothing that anybody has."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.model.allocation.ledger import KubeletAccount
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import Reason, ReasonCode, Seen
from gpuvirt.node.loops.intervals import Intervals
from gpuvirt.node.loops.serialworker import ThreadWorker
from gpuvirt.node.store import originaldrivers
from gpuvirt.paths import HostPath
from gpuvirt.sim.builder import build_host
from gpuvirt.sim.hostspec import load_host
from gpuvirt.sim.kernel import Process, SimKernel
from gpuvirt.sim.tools import SimTools
from tests.simnode import SimNode, running_node
from tests.simulated import Simulated

pytestmark = pytest.mark.usefixtures("worker")

T4 = [PciAddress(f"0000:{bus}:00.0") for bus in ("3b", "5e", "86", "af")]
FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
A10 = "nvidia.com/GA102GL_A10"
PASSTHROUGH = Settings(mode=DesiredMode.PASSTHROUGH)
CONTAINER = Settings(mode=DesiredMode.CONTAINER)


def driver(kernel: SimKernel, address: PciAddress) -> str | None:
    return kernel.pci.functions[address].driver


def notes(node: SimNode) -> set[ReasonCode]:
    return {note.code for note in node.view.notes}


async def observed(node: SimNode) -> None:
    """Have the kubelet say who has what, as it does all the while."""
    for _ in range(4):
        await node.report_account()
        await node.advance(10)


async def test_what_is_free_is_bound_and_offered_and_the_rest_has_its_reason(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, PASSTHROUGH) as node:
        await node.advance(5)
        assert kernel.writes == [], "it is unknown whether a pod has what its native driver serves"
        assert notes(node) == {ReasonCode.ALLOCATIONS_UNKNOWN}
        node.count("nvidia.com/GRID_T4-8Q", *kernel.mdev.devices)
        await node.report_account()
        await node.advance(5)
        assert driver(kernel, T4[2]) == "vfio-pci"
        assert node.offered["nvidia.com/TU104GL_TESLA_T4"] == {T4[2]: True}
        assert notes(node) >= {ReasonCode.VGPU_IN_USE}
        assert [driver(kernel, one) for one in (T4[0], T4[1], T4[3])] == ["nvidia"] * 3
        assert node.gpu(T4[0]).desired == "passthrough"
        assert node.agent.telemetry.moves["passthrough", "done"] == 1
        node.count("nvidia.com/GRID_T4-8Q")
        await observed(node)
        assert [driver(kernel, one) for one in T4] == ["vfio-pci"] * 4
        assert notes(node) == set()


async def test_a_gpu_that_is_desired_whole_waits_for_the_vms_that_have_parts_of_it(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    vgpu = min(kernel.mdev.devices)
    mine = kernel.mdev.devices[vgpu]
    carrier = mine.slot
    guest = kernel.start_vm(mine.group)
    async with running_node(kernel, tmp_path, PASSTHROUGH) as node:
        await observed(node)
        others = [one for one in T4 if one != carrier]
        assert [driver(kernel, one) for one in others] == ["vfio-pci"] * 3
        assert driver(kernel, PciAddress(carrier)) == "nvidia"
        assert notes(node) == {ReasonCode.VGPU_IN_USE}
        assert set(kernel.mdev.devices) == {vgpu}, "what is free on it goes"
        assert kernel.vfio.requests == []
        kernel.end_vm(guest)
        await node.advance(70)
        await observed(node)
        assert [driver(kernel, one) for one in T4] == ["vfio-pci"] * 4
        assert notes(node) == set()


@pytest.mark.parametrize("name", ["2xA10-sriov", "4xL40S"])
async def test_vfs_go_before_a_gpu_is_had_whole_and_come_back_for_vgpus(
    simulated: Simulated, tmp_path: Path, name: str
) -> None:
    kernel = simulated(name)
    apply_vgpus = Settings(mode=DesiredMode.VGPU)
    gpus = [one.address for one in kernel.pci.functions.values() if one.physfn is None and one.address.endswith("00.0")]

    async def keeps(settings: Settings) -> None:
        async with running_node(kernel, tmp_path, settings) as node:
            node.agent.take_request(NodeRequest(Observed(None), Observed(None)))
            await observed(node)
            assert notes(node) == set()

    await keeps(apply_vgpus)
    assert all(kernel.pci.functions[PciAddress(gpu)].virtfns for gpu in gpus)
    await keeps(PASSTHROUGH)
    assert not any(kernel.pci.functions[PciAddress(gpu)].virtfns for gpu in gpus)
    assert {driver(kernel, PciAddress(gpu)) for gpu in gpus} == {"vfio-pci"}
    await keeps(apply_vgpus)
    assert all(kernel.pci.functions[PciAddress(gpu)].virtfns for gpu in gpus)


async def test_no_desired_state_means_leave_alone(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, Settings()) as node:
        await node.advance(60)
    assert kernel.writes == []


async def test_single_gpus_have_modes_of_their_own(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, Settings(modes={T4[2]: DesiredMode.PASSTHROUGH})) as node:
        await node.report_account()
        await node.advance(5)
        assert driver(kernel, T4[2]) == "vfio-pci"
        assert notes(node) == set()
        assert node.gpu(T4[0]).desired is None


async def test_what_another_program_rebinds_comes_back(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10")
    async with running_node(kernel, tmp_path, PASSTHROUGH) as node:
        await node.report_account()
        await node.advance(5)
        kernel.rebind(FIRST, "nvidia")
        await node.advance(5)
        assert driver(kernel, FIRST) == "vfio-pci"
        kernel.unplug(SECOND)
        await node.advance(5)
        kernel.plug_in(SECOND)
        await node.advance(5)
        assert driver(kernel, SECOND) == "vfio-pci"
        assert node.offered[A10] == {FIRST: True, SECOND: True}


async def test_a_restart_writes_nothing(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10")
    async with running_node(kernel, tmp_path, PASSTHROUGH) as node:
        await node.advance(5)
    kernel.writes.clear()
    async with running_node(kernel, tmp_path, PASSTHROUGH) as node:
        await node.advance(60)
    assert kernel.writes == []


async def test_a_gpu_that_a_container_uses_waits_until_it_is_free(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    process = kernel.start_process("python3", "/dev/nvidia2")
    async with running_node(kernel, tmp_path, Settings(modes={T4[2]: DesiredMode.PASSTHROUGH})) as node:
        await node.report_account()
        await node.advance(60)
        assert driver(kernel, T4[2]) == "nvidia"
        assert notes(node) == {ReasonCode.IN_USE}
        assert any(f"pid {process.pid}" in note.text for note in node.view.notes)
        kernel.end_vm(process)
        await node.advance(301)
        assert driver(kernel, T4[2]) == "vfio-pci"
        assert notes(node) == set()


async def test_back_to_the_host_is_withdrawn_first_and_waits_for_the_kubelet(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("2xA10")
    async with running_node(kernel, tmp_path) as node:
        await node.report_account()
        assert node.offered[A10] == {FIRST: True, SECOND: True}
    async with running_node(kernel, tmp_path, CONTAINER) as node:
        await node.advance(20)
        assert node.offered.get(A10, {}) == {}
        assert node.reasons(FIRST) == [ReasonCode.WITHDRAWN]
        assert node.refused(A10, [FIRST]) is ReasonCode.UNKNOWN_RESOURCE
        assert driver(kernel, FIRST) == "vfio-pci", "who has what is not known yet"
        assert notes(node) == {ReasonCode.ALLOCATIONS_UNKNOWN}
        await node.report_account()
        await node.advance(10)
        assert [driver(kernel, one) for one in (FIRST, SECOND)] == ["nvidia", "nvidia"]
        assert notes(node) == set()


async def test_half_an_account_of_pods_keeps_gpus_where_they_are(simulated: Simulated, tmp_path: Path) -> None:
    """They are offered and given all the same: an agent without the pod-resources API is of use where nothing moves."""
    kernel = simulated("2xA10")
    half = Reason(ReasonCode.ALLOCATIONS_UNKNOWN, "the kubelet", "may have given pods more", (Seen.absent("socket"),))
    async with running_node(kernel, tmp_path) as node:
        node.agent.observe_account(KubeletAccount(node.clock.now(), {}, partial=half))
        await node.settle()
        assert node.allocate(A10, [FIRST])
    async with running_node(kernel, tmp_path, CONTAINER) as node:
        await node.advance(2)
        for _ in range(3):
            node.agent.observe_account(KubeletAccount(node.clock.now(), {}, partial=half))
            await node.advance(60)
        assert [driver(kernel, one) for one in (FIRST, SECOND)] == ["vfio-pci"] * 2
        assert notes(node) == {ReasonCode.ALLOCATIONS_UNKNOWN}
        for _ in range(3):
            await node.report_account()
            await node.advance(60)
        assert [driver(kernel, one) for one in (FIRST, SECOND)] == ["nvidia"] * 2


GROUP_OF_SECOND = "22"


async def test_back_to_the_host_waits_until_the_kubelet_counts_it_no_more(simulated: Simulated, tmp_path: Path) -> None:
    """A pod can be admitted by what the kubelet counts, however empty the list was that it was sent."""
    kernel = simulated("2xA10")
    async with running_node(kernel, tmp_path) as node:
        await node.report_account()
    async with running_node(kernel, tmp_path, CONTAINER) as node:
        await node.advance(2)
        node.count(A10, SECOND)
        await node.report_account()
        await node.advance(60)
        assert [driver(kernel, one) for one in (FIRST, SECOND)] == ["nvidia", "vfio-pci"]
        assert notes(node) == {ReasonCode.STILL_ALLOCATABLE}
        for resource, device in (("nvidia.com/GA102GL_A10", SECOND), ("devices.kubevirt.io/a10", GROUP_OF_SECOND)):
            node.count(resource, device)
            await node.report_account()
            await node.advance(60)
            assert driver(kernel, SECOND) == "vfio-pci", "another plugin offers it, and a pod can be admitted by that"
            (note,) = node.view.notes
            assert note.code is ReasonCode.STILL_ALLOCATABLE
            assert f"{resource} ({device})" in (note.seen or "")
        node.count("example.com/other", "0000:01:00.0")
        await node.report_account()
        await node.advance(10)
        assert driver(kernel, SECOND) == "nvidia"
        assert notes(node) == set()


async def test_back_to_the_host_waits_for_pods_and_vms(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10")
    async with running_node(kernel, tmp_path) as node:
        node.hold(A10, FIRST)
        await node.report_account()
        held = dict(node.held)
    stranger = kernel.start_vm(IommuGroup(22))
    kernel.writes.clear()
    async with running_node(kernel, tmp_path, CONTAINER) as node:
        node.held = held
        await node.advance(2)
        await node.report_account()
        await node.advance(60)
        assert [driver(kernel, one) for one in (FIRST, SECOND)] == ["vfio-pci", "vfio-pci"]
        assert notes(node) == {ReasonCode.HELD_BY_POD, ReasonCode.IN_USE}
        assert node.offered[A10] == {FIRST: False}, "it stays listed while a pod has it"
        assert kernel.writes == []
        assert kernel.vfio.requests == []
        node.free(FIRST)
        await node.report_account()
        await node.report_account()
        await node.advance(10)
        assert driver(kernel, FIRST) == "nvidia", [note.text for note in node.view.notes]
        kernel.end_vm(stranger)
        await node.advance(400)
        assert driver(kernel, SECOND) == "nvidia", [note.text for note in node.view.notes]
        assert notes(node) == set()


async def test_a_driver_that_is_not_there_is_reported_and_tried_again(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    kernel.pci.forget_driver("vfio-pci")
    missing = SimTools(kernel, ())
    async with running_node(kernel, tmp_path, Settings(modes={T4[2]: DesiredMode.PASSTHROUGH}), tools=missing) as node:
        await node.report_account()
        await node.advance(5)
        assert notes(node) == {ReasonCode.STEP_FAILED}
        kernel.pci.add_driver("vfio-pci")
        await node.advance(301)
        assert driver(kernel, T4[2]) == "vfio-pci"
        assert notes(node) == set()


async def test_a_move_that_sleeps_in_the_kernel_is_a_state_and_all_else_goes_on(tmp_path: Path) -> None:
    """A process takes a GPU after its driver was locked, so that the driver waits for it."""
    kernel = build_host(load_host("4xT4"), wait=True)
    kernel.rebind(T4[1], None)  # its vGPUs are gone with its driver
    kernel.rebind(T4[1], "nvidia")
    started: list[Process] = []

    def sneak_in() -> None:
        started.append(kernel.start_process("python3", "/dev/nvidia2"))

    kernel.faults.before_read(HostPath(f"/proc/driver/nvidia/gpus/{T4[2]}/unbindLock"), sneak_in)
    modes: dict[str, DesiredMode] = dict.fromkeys((T4[1], T4[2]), DesiredMode.PASSTHROUGH)
    intervals = Intervals(move_s=0.2)
    async with running_node(kernel, tmp_path, Settings(modes=modes), moving=ThreadWorker, intervals=intervals) as node:
        await node.report_account()
        for _ in range(400):
            await RealClock().sleep(0.01)
            await node.advance(0.1)
            if ReasonCode.WRITE_BLOCKED in notes(node) and driver(kernel, T4[1]) == "vfio-pci":
                break
        assert notes(node) == {ReasonCode.WRITE_BLOCKED}
        assert any("unbind from nvidia" in note.text for note in node.view.notes)
        assert driver(kernel, T4[1]) == "vfio-pci"
        kernel.end_vm(started[0])
        for _ in range(400):
            await RealClock().sleep(0.01)
            await node.advance(1)
            if driver(kernel, T4[2]) == "vfio-pci" and not notes(node):
                break
        assert driver(kernel, T4[2]) == "vfio-pci"
        assert notes(node) == set()


def test_units_that_move_side_by_side_lose_none_of_each_others_drivers(tmp_path: Path) -> None:
    """Seen under load: one took the other's new file away."""
    record = tmp_path / "drivers.json"

    def add(number: int) -> None:
        gpu = PciAddress(f"0000:{number:02x}:00.0")
        originaldrivers.update(record, lambda before: replace(before, drivers={**before.drivers, gpu: "nvidia"}))

    adding = [threading.Thread(target=add, args=(number,)) for number in range(32)]
    for one in adding:
        one.start()
    for one in adding:
        one.join()
    assert len(originaldrivers.read(record).drivers) == 32
