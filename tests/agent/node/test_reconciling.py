"""The agent binds GPUs to the desired drivers, corrects drift, and never touches a device that is in use."""

import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.store import hostfiles
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.loops.serialworker import ThreadWorker
from gpuvirt.model.allocation.ledger import KubeletAccount
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import Reason, ReasonCode, Seen
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import Process, SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

pytestmark = pytest.mark.usefixtures("worker")

T4 = [PciAddress(f"0000:{bus}:00.0") for bus in ("3b", "5e", "86", "af")]
FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
A10 = "nvidia.com/GA102GL_A10"
PASSTHROUGH = Settings(mode=DesiredMode.PASSTHROUGH)
CONTAINER = Settings(mode=DesiredMode.CONTAINER)


def driver(kernel: SimKernel, address: PciAddress) -> str | None:
    return kernel.pci.functions[address].driver


def notes(node: SimNode) -> set[ReasonCode]:
    return {note.code for note in node.view.problems}


async def observed(node: SimNode) -> None:
    """Have the kubelet report the allocations repeatedly."""
    for _ in range(4):
        await node.report_account()
        await node.advance(10)


async def test_free_gpus_are_bound_and_offered_and_gpus_in_use_are_reported(
    simulated: Simulated, tmp_path: Path
) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, PASSTHROUGH) as node:
        await node.advance(5)
        assert kernel.writes == [], "a pod may have a device that the native driver serves"
        assert notes(node) == {ReasonCode.ALLOCATIONS_UNKNOWN}
        node.count("nvidia.com/GRID_T4-8Q", *kernel.mdev.devices)
        await node.report_account()
        await node.advance(5)
        assert driver(kernel, T4[2]) == "vfio-pci"
        assert node.offered["nvidia.com/TU104GL_TESLA_T4"] == {T4[2]: True}
        assert notes(node) >= {ReasonCode.STILL_ALLOCATABLE}
        assert ReasonCode.VGPU_IN_USE not in notes(node), "another plugin's count is no user whom anybody could stop"
        assert [driver(kernel, gpu) for gpu in (T4[0], T4[1], T4[3])] == ["nvidia"] * 3
        assert node.gpu(T4[0]).desired == "passthrough"
        assert node.agent.telemetry.gpu_changes["passthrough", "done"] == 1
        node.count("nvidia.com/GRID_T4-8Q")
        await observed(node)
        assert [driver(kernel, gpu) for gpu in T4] == ["vfio-pci"] * 4
        assert notes(node) == set()


async def test_passthrough_waits_for_the_vms_that_use_vgpus_of_the_gpu(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    vgpu = min(kernel.mdev.devices)
    mdev = kernel.mdev.devices[vgpu]
    carrier = mdev.slot
    guest = kernel.start_vm(mdev.group)
    async with running_node(kernel, tmp_path, PASSTHROUGH) as node:
        await observed(node)
        others = [gpu for gpu in T4 if gpu != carrier]
        assert [driver(kernel, other_pod) for other_pod in others] == ["vfio-pci"] * 3
        assert driver(kernel, PciAddress(carrier)) == "nvidia"
        assert notes(node) == {ReasonCode.VGPU_IN_USE}
        assert set(kernel.mdev.devices) == {vgpu}, "the agent removes the free vGPUs of the GPU"
        assert kernel.vfio.requests == []
        kernel.end_vm(guest)
        await node.advance(70)
        await observed(node)
        assert [driver(kernel, gpu) for gpu in T4] == ["vfio-pci"] * 4
        assert notes(node) == set()


@pytest.mark.parametrize("name", ["2xA10-sriov", "4xL40S"])
async def test_vfs_are_disabled_for_passthrough_and_enabled_for_vgpus(
    simulated: Simulated, tmp_path: Path, name: str
) -> None:
    kernel = simulated(name)
    apply_vgpus = Settings(mode=DesiredMode.VGPU)
    gpus = [
        function.address
        for function in kernel.pci.functions.values()
        if function.physfn is None and function.address.endswith("00.0")
    ]

    async def reconcile_with(settings: Settings) -> None:
        async with running_node(kernel, tmp_path, settings) as node:
            node.agent.observations.take_request(NodeRequest(Observed(None), Observed(None)))
            await observed(node)
            assert notes(node) == set()

    await reconcile_with(apply_vgpus)
    assert all(kernel.pci.functions[PciAddress(gpu)].virtfns for gpu in gpus)
    await reconcile_with(PASSTHROUGH)
    assert not any(kernel.pci.functions[PciAddress(gpu)].virtfns for gpu in gpus)
    assert {driver(kernel, PciAddress(gpu)) for gpu in gpus} == {"vfio-pci"}
    await reconcile_with(apply_vgpus)
    assert all(kernel.pci.functions[PciAddress(gpu)].virtfns for gpu in gpus)


async def test_gpus_without_a_desired_mode_stay_as_they_are(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, Settings()) as node:
        await node.advance(60)
    assert kernel.writes == []


async def test_a_mode_can_be_set_for_a_single_gpu(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, Settings(modes={T4[2]: DesiredMode.PASSTHROUGH})) as node:
        await node.report_account()
        await node.advance(5)
        assert driver(kernel, T4[2]) == "vfio-pci"
        assert notes(node) == set()
        assert node.gpu(T4[0]).desired is None


async def test_a_gpu_that_another_program_rebinds_gets_its_driver_back(simulated: Simulated, tmp_path: Path) -> None:
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


async def test_a_gpu_in_use_by_a_process_is_bound_after_the_process_ends(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    process = kernel.start_process("python3", "/dev/nvidia2")
    async with running_node(kernel, tmp_path, Settings(modes={T4[2]: DesiredMode.PASSTHROUGH})) as node:
        await node.report_account()
        await node.advance(60)
        assert driver(kernel, T4[2]) == "nvidia"
        assert notes(node) == {ReasonCode.IN_USE}
        assert any(f"pid {process.pid}" in note.text for note in node.view.problems)
        kernel.end_vm(process)
        await node.advance(301)
        assert driver(kernel, T4[2]) == "vfio-pci"
        assert notes(node) == set()


async def test_a_gpu_is_withdrawn_before_it_returns_to_its_native_driver(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10")
    async with running_node(kernel, tmp_path) as node:
        await node.report_account()
        assert node.offered[A10] == {FIRST: True, SECOND: True}
    async with running_node(kernel, tmp_path, CONTAINER) as node:
        await node.advance(20)
        assert node.offered.get(A10, {}) == {}
        assert node.reasons(FIRST) == [ReasonCode.WITHDRAWN]
        assert node.refused(A10, [FIRST]) is ReasonCode.UNKNOWN_RESOURCE
        assert driver(kernel, FIRST) == "vfio-pci", "the kubelet has not reported the allocations yet"
        assert notes(node) == {ReasonCode.ALLOCATIONS_UNKNOWN}
        await node.report_account()
        await node.advance(10)
        assert [driver(kernel, gpu) for gpu in (FIRST, SECOND)] == ["nvidia", "nvidia"]
        assert notes(node) == set()


async def test_no_driver_is_changed_while_the_account_of_allocations_is_partial(
    simulated: Simulated, tmp_path: Path
) -> None:
    """The agent still offers and allocates the GPUs: without the pod-resources API, it only changes no driver."""
    kernel = simulated("2xA10")
    half = Reason(ReasonCode.ALLOCATIONS_UNKNOWN, "the kubelet", "may have given pods more", (Seen.absent("socket"),))
    async with running_node(kernel, tmp_path) as node:
        node.agent.observations.observe_account(
            KubeletAccount(node.clock.now(), node.clock.monotonic_s(), {}, partial=half)
        )
        await node.settle()
        assert node.allocate(A10, [FIRST])
    async with running_node(kernel, tmp_path, CONTAINER) as node:
        await node.advance(2)
        for _ in range(3):
            node.agent.observations.observe_account(
                KubeletAccount(node.clock.now(), node.clock.monotonic_s(), {}, partial=half)
            )
            await node.advance(60)
        assert [driver(kernel, gpu) for gpu in (FIRST, SECOND)] == ["vfio-pci"] * 2
        assert notes(node) == {ReasonCode.ALLOCATIONS_UNKNOWN}
        for _ in range(3):
            await node.report_account(settled=True)
            await node.advance(60)
        assert [driver(kernel, gpu) for gpu in (FIRST, SECOND)] == ["nvidia"] * 2


GROUP_OF_SECOND = "22"


async def test_no_gpu_returns_to_its_native_driver_while_the_kubelet_counts_it(
    simulated: Simulated, tmp_path: Path
) -> None:
    """The kubelet may admit a pod by its old count, even after the agent has sent an empty list."""
    kernel = simulated("2xA10")
    async with running_node(kernel, tmp_path) as node:
        await node.report_account()
    async with running_node(kernel, tmp_path, CONTAINER) as node:
        await node.advance(2)
        node.count(A10, SECOND)
        await node.report_account()
        await node.advance(60)
        assert [driver(kernel, gpu) for gpu in (FIRST, SECOND)] == ["nvidia", "vfio-pci"]
        assert notes(node) == {ReasonCode.STILL_ALLOCATABLE}
        for resource, device in (("nvidia.com/GA102GL_A10", SECOND), ("devices.kubevirt.io/a10", GROUP_OF_SECOND)):
            node.count(resource, device)
            await node.report_account()
            await node.advance(60)
            assert driver(kernel, SECOND) == "vfio-pci", (
                "another plugin offers the GPU, so the kubelet may still admit a pod"
            )
            (note,) = node.view.problems
            assert note.code is ReasonCode.STILL_ALLOCATABLE
            assert f"{resource} ({device})" in (note.seen or "")
        node.count("example.com/other", "0000:01:00.0")
        await node.report_account()
        await node.advance(10)
        assert driver(kernel, SECOND) == "nvidia"
        assert notes(node) == set()


async def test_no_gpu_returns_to_its_native_driver_while_the_kubelet_does_not_say_what_it_counts(
    simulated: Simulated, tmp_path: Path
) -> None:
    """A busy kubelet answers List, but GetAllocatableResources fails: it may still admit a pod by its old count."""
    kernel = simulated("2xA10")
    silent = Unread(HostPath("/var/lib/kubelet/pod-resources/kubelet.sock"), seen="RESOURCE_EXHAUSTED: rejected")
    async with running_node(kernel, tmp_path) as node:
        await node.report_account()
    async with running_node(kernel, tmp_path, CONTAINER) as node:
        await node.advance(2)
        for _ in range(3):
            node.agent.observations.observe_account(
                KubeletAccount(node.clock.now(), node.clock.monotonic_s(), {}, silent)
            )
            await node.advance(60)
        assert [driver(kernel, gpu) for gpu in (FIRST, SECOND)] == ["vfio-pci"] * 2
        assert notes(node) == {ReasonCode.STILL_ALLOCATABLE}
        for note in node.view.problems:
            assert "RESOURCE_EXHAUSTED" in (note.seen or "")
            assert "GetAllocatableResources" in (note.fix or "")
        await node.report_account()
        await node.advance(10)
        assert [driver(kernel, gpu) for gpu in (FIRST, SECOND)] == ["nvidia"] * 2


async def test_no_gpu_of_a_pod_or_a_vm_returns_to_its_native_driver(simulated: Simulated, tmp_path: Path) -> None:
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
        assert [driver(kernel, gpu) for gpu in (FIRST, SECOND)] == ["vfio-pci", "vfio-pci"]
        assert notes(node) == {ReasonCode.ALLOCATED_TO_POD, ReasonCode.IN_USE}
        assert node.offered[A10] == {FIRST: False}, "the GPU stays listed while it is allocated"
        assert kernel.writes == []
        assert kernel.vfio.requests == []
        node.free(FIRST)
        await node.report_account()
        await node.report_account()
        await node.advance(10)
        assert driver(kernel, FIRST) == "nvidia", [note.text for note in node.view.problems]
        kernel.end_vm(stranger)
        await node.advance(400)
        assert driver(kernel, SECOND) == "nvidia", [note.text for note in node.view.problems]
        assert notes(node) == set()


async def test_a_missing_driver_is_reported_and_tried_again(simulated: Simulated, tmp_path: Path) -> None:
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


async def test_a_driver_change_blocked_in_the_kernel_is_reported_and_other_gpus_go_on(tmp_path: Path) -> None:
    """A process opens a GPU after its driver was locked, so that the driver waits for the process."""
    kernel = build_host(load_host("4xT4"), wait=True)
    kernel.rebind(T4[1], None)  # its vGPUs are gone with its driver
    kernel.rebind(T4[1], "nvidia")
    started: list[Process] = []

    def sneak_in() -> None:
        started.append(kernel.start_process("python3", "/dev/nvidia2"))

    kernel.faults.before_read(HostPath(f"/proc/driver/nvidia/gpus/{T4[2]}/unbindLock"), sneak_in)
    modes: dict[str, DesiredMode] = dict.fromkeys((T4[1], T4[2]), DesiredMode.PASSTHROUGH)
    intervals = Intervals(driver_change_s=0.2)
    async with running_node(
        kernel, tmp_path, Settings(modes=modes), change_worker=ThreadWorker, intervals=intervals
    ) as node:
        for _ in range(4000):
            await RealClock().sleep(0.01)
            await node.advance(0.1)
            await node.report_account()
            if ReasonCode.WRITE_BLOCKED in notes(node) and driver(kernel, T4[1]) == "vfio-pci":
                break
        assert notes(node) == {ReasonCode.WRITE_BLOCKED}
        assert any("unbind from nvidia" in note.text for note in node.view.problems)
        assert driver(kernel, T4[1]) == "vfio-pci"
        kernel.end_vm(started[0])
        for _ in range(4000):
            await RealClock().sleep(0.01)
            await node.advance(1)
            await node.report_account()  # after the rollback the GPU may have been offered and withdrawn again
            if driver(kernel, T4[2]) == "vfio-pci" and not notes(node):
                break
        assert driver(kernel, T4[2]) == "vfio-pci"
        assert notes(node) == set()


def test_concurrent_updates_of_the_driver_record_lose_no_entry(tmp_path: Path) -> None:
    """Observed under load: a process removed another process's new file."""
    record = tmp_path / "drivers.json"

    def add(number: int) -> None:
        gpu = PciAddress(f"0000:{number:02x}:00.0")
        hostfiles.journal(record).update(lambda before: replace(before, drivers={**before.drivers, gpu: "nvidia"}))

    adding = [threading.Thread(target=add, args=(number,)) for number in range(32)]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    assert len(hostfiles.journal(record).value.drivers) == 32
