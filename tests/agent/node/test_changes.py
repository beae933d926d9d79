"""Desired state and allocations that change during a change of drivers or vGPUs: no allocated device is touched."""

import errno
import fcntl
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from gpuvirt.agent.change.gate.gate import Gate
from gpuvirt.agent.change.steps.changes import Change, Changes, StalePlanError
from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, slot_of
from gpuvirt.hardware.scan import scan
from gpuvirt.loops.serialworker import ThreadWorker
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.allocation.podallocations import PodAllocations
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.change.plan import StepScope
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import ConfigText, NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.model.reasons import ReasonCode, refusals
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import Process, SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import NOBODY, UNGATED, change_drivers, change_host_in, driver_state
from tests.agent.node.allocatedgpus import A10, FIRST, SECOND, entry_of
from tests.agent.node.nodewithvgpus import VGPU
from tests.agent.node.pacedworker import OPERATION_S
from tests.agent.node.simnode import SimNode, Workers, running_node
from tests.sim.simulated import Simulated

GPU, OTHER = PciAddress("0000:b1:00.0"), PciAddress("0000:4b:00.0")
SMALL, LARGE = "A10-4Q", "A10-12Q"
CONFIGS = ConfigText(
    "version: v1\nvgpu-configs:\n"
    "  A10-4Q: [{devices: [1], vgpu-devices: {A10-4Q: 6}}]\n"
    "  A10-12Q: [{devices: [1], vgpu-devices: {A10-12Q: 2}}]\n",
    "a ConfigMap",
)


@pytest.fixture(autouse=True)
def _paced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers, "paced", True)


def live(kernel: SimKernel) -> dict[str, str]:
    """The types of the GPU's vGPUs, by their ids."""
    found = kernel.mdev.devices.items()
    return {vgpu: str(mdev.spec.name).rpartition(" ")[2] for vgpu, mdev in found if mdev.slot.startswith("0000:b1:")}


async def want(node: SimNode, name: str) -> None:
    node.agent.observations.take_request(NodeRequest(Observed(name), Observed(CONFIGS)))
    await node.settle()


async def reached(node: SimNode, done: Callable[[], bool]) -> None:
    """Let time pass, an operation of a change at a time, until a condition holds."""
    for turn in range(3000):
        if done():
            return
        if turn % 50 == 0:
            await node.report_account()
        await node.advance(OPERATION_S)
    raise AssertionError("never reached")


def give_all(node: SimNode, given: set[str]) -> None:
    """Have pods request every device that is offered and not allocated."""
    for resource, devices in node.offered.items():
        for device, healthy in devices.items():
            if healthy and device not in given:
                try:
                    node.allocate(resource, [device])
                except AllocationRefusedError:
                    continue
                given.add(device)
                node.hold(resource, device, pod=f"vm-{len(given)}")


@pytest.mark.parametrize("removals", [0, 1, 5])
async def test_a_label_reverted_during_a_change_takes_no_vgpu_from_a_pod(
    simulated: Simulated, tmp_path: Path, removals: int
) -> None:
    kernel = simulated("2xA10-vgpu")
    async with running_node(kernel, tmp_path, VGPU) as node:
        await want(node, SMALL)
        await reached(node, lambda: list(live(kernel).values()) == [SMALL] * 6)
        await node.advance(30)
        before = set(live(kernel))
        await want(node, LARGE)
        await reached(node, lambda: node.agent.reports.vgpus.get() is not None and len(live(kernel)) <= 6 - removals)
        given: set[str] = set()
        await want(node, SMALL)
        for _ in range(120):
            give_all(node, given)
            await node.advance(OPERATION_S)
            assert given & before <= set(live(kernel)), "an allocated vGPU was removed"
        for _ in range(6):
            await node.report_account()
            await node.advance(10)
            give_all(node, given)
            assert given & before <= set(live(kernel))
        assert set(live(kernel)) == before, "the removed vGPUs are back, with the same ids"
        assert given >= before
        assert {note.code for note in node.view.problems} == set()


async def test_allocate_refuses_a_vgpu_that_a_change_is_about_to_remove(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10-vgpu")
    async with running_node(kernel, tmp_path, VGPU) as node:
        await want(node, SMALL)
        await reached(node, lambda: list(live(kernel).values()) == [SMALL] * 6)
        await node.advance(30)
        await want(node, LARGE)
        await reached(node, lambda: len(live(kernel)) == 5)
        await want(node, SMALL)
        await node.advance(0.2 * OPERATION_S)
        vgpu = min(live(kernel))
        assert node.refused("nvidia.com/NVIDIA_A10-4Q", [vgpu]) is ReasonCode.UNIT_BUSY


async def test_allocate_refuses_a_gpu_that_another_process_is_changing(simulated: Simulated, tmp_path: Path) -> None:
    """The locks exclude a command beside the agent; the agent's own changes don't block its allocations."""
    async with running_node(simulated("2xA10"), tmp_path) as node:
        resource = node.view.resources[0]
        first, second = (device.id for device in resource.devices)
        other = Gate(tmp_path / "locks")
        with other.change("a command's", lambda: (slot_of(PciAddress(first)),)):
            assert node.refused(resource.name, [first]) is ReasonCode.UNIT_BUSY
            node.allocate(resource.name, [second])
        node.allocate(resource.name, [first])


async def test_a_gpu_that_a_blocked_step_of_a_killed_agent_holds_is_not_offered(
    simulated: Simulated, tmp_path: Path
) -> None:
    async with running_node(simulated("2xA10"), tmp_path) as node:
        resource = node.view.resources[0].name
        first, second = (device.id for device in node.view.resources[0].devices)
        slot = slot_of(PciAddress(first))
        gate = Gate(tmp_path / "locks")
        with gate.change(first, lambda: (slot,)) as passed:
            passed.note("unbind it")
            record = gate.path_of(slot, "json").read_bytes()
        gate.path_of(slot, "json").write_bytes(record)  # as a killed process leaves the record
        with (tmp_path / f"locks/{slot}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            await node.advance(30)
            assert [(note.code, note.subject) for note in node.view.problems] == [(ReasonCode.WRITE_BLOCKED, first)]
            assert [device.id for device in node.view.resources[0].devices] == [second]
            assert node.refused(resource, [first]) is ReasonCode.WRITE_BLOCKED
            node.allocate(resource, [second])
        await node.advance(30)
        assert node.view.problems == ()
        node.allocate(resource, [first])


def driver(kernel: SimKernel, address: PciAddress) -> str | None:
    return kernel.pci.functions[address].driver


async def mode(node: SimNode, name: str) -> None:
    node.agent.observations.take_request(NodeRequest(Observed(None), Observed(None), Observed(name)))
    await node.settle()


async def test_a_mode_reverted_during_a_change_takes_no_gpu_from_a_pod(simulated: Simulated, tmp_path: Path) -> None:
    for operation in range(1, 12):
        kernel = simulated("2xA10")
        folder = tmp_path / str(operation)
        folder.mkdir()
        async with running_node(kernel, folder, Settings(workload_label=True)) as node:
            await mode(node, "vm-passthrough")
            await node.report_account()
            await node.advance(30)
            assert [driver(kernel, gpu) for gpu in (FIRST, SECOND)] == ["vfio-pci"] * 2
            kernel.writes.clear()
            await mode(node, "container")
            await node.report_account()
            for _ in range(operation):
                await node.advance(OPERATION_S)
            await mode(node, "vm-passthrough")
            given: set[str] = set()
            for _ in range(60):
                give_all(node, given)
                await node.advance(OPERATION_S)
                assert {driver(kernel, PciAddress(address)) for address in given} <= {"vfio-pci"}, (
                    "an allocated GPU lost its driver"
                )
            for _ in range(4):
                await node.report_account()
                await node.advance(10)
                give_all(node, given)
                assert {driver(kernel, PciAddress(address)) for address in given} <= {"vfio-pci"}
            assert given == {FIRST, SECOND}
            for gpu in (FIRST, SECOND):
                override = HostPath(f"/sys/bus/pci/devices/{gpu}/driver_override")
                was_touched = any(gpu in path or gpu.encode() in content for path, content in kernel.writes)
                assert kernel.read(override).strip() == (b"vfio-pci" if was_touched else b"(null)")
            assert {note.code for note in node.view.problems} == set()


SIZES = ConfigText(
    "version: v1\nvgpu-configs:\n  mine: [{devices: [0], vgpu-devices: {A10-12Q: 1, A10-4Q: 1}, sizes: mixed}]\n",
    "a ConfigMap",
)
A10_4Q = "nvidia.com/NVIDIA_A10-4Q"


def placed(kernel: SimKernel) -> dict[str, str]:
    """The slots of the other GPU's vGPUs, by their ids."""
    return {device: mdev.slot for device, mdev in kernel.mdev.devices.items() if mdev.slot.startswith("0000:4b:")}


async def test_an_allocated_vgpu_keeps_its_slot_while_allocations_are_unknown(
    simulated: Simulated, tmp_path: Path
) -> None:
    """A larger vGPU of the same GPU is missing; the plan that restores it would move this vGPU if it were free."""
    kernel = simulated("2xA10-vgpu")
    allocated = next(vgpu for vgpu, mdev in kernel.mdev.devices.items() if mdev.spec.name.endswith(SMALL))
    other = next(vgpu for vgpu in placed(kernel) if vgpu != allocated)
    async with running_node(kernel, tmp_path) as node:
        node.hold(A10_4Q, allocated)
        await node.report_account()
        node.allocate(A10_4Q, [allocated])
        await node.report_account()
        held = dict(node.held)
    place = placed(kernel)[allocated]
    kernel.write(HostPath(f"/sys/bus/mdev/devices/{other}/remove"), b"1")
    async with running_node(kernel, tmp_path, VGPU) as node:
        node.held = held
        node.agent.observations.take_request(NodeRequest(Observed("mine"), Observed(SIZES)))
        await node.advance(60)
        assert placed(kernel)[allocated] == place
        assert not any(str(path).endswith(f"{allocated}/remove") for path, _ in kernel.writes)
        for _ in range(4):
            await node.report_account()
            await node.advance(10)
        assert placed(kernel)[allocated] == place


RTX, AUDIO = PciAddress("0000:04:00.0"), PciAddress("0000:04:00.1")


@pytest.mark.parametrize("reported", [False, True])
async def test_a_failed_change_rolls_back_only_the_functions_it_changed(
    simulated: Simulated, tmp_path: Path, *, reported: bool
) -> None:
    """The audio function of an allocated card has lost its driver, and a VFIO driver does not bind to it."""
    kernel = simulated("4xRTX2060")
    passthrough = Settings(modes={RTX: DesiredMode.PASSTHROUGH})
    async with running_node(kernel, tmp_path, passthrough) as node:
        await node.report_account()
        await node.advance(30)
        assert (driver(kernel, RTX), driver(kernel, AUDIO)) == ("vfio-pci", "vfio-pci")
        resource = next(name for name, devices in node.offered.items() if RTX in devices)
        node.allocate(resource, [RTX])
        node.hold(resource, RTX)
        await node.report_account()
        held = dict(node.held)
    kernel.rebind(AUDIO, None)
    kernel.faults.refuse(HostPath("/sys/bus/pci/drivers_probe"), errno.EIO)
    kernel.writes.clear()
    async with running_node(kernel, tmp_path, passthrough) as node:
        node.held = held
        if reported:
            await node.report_account()
        await node.advance(60)
        assert driver(kernel, RTX) == "vfio-pci"
        assert not any(str(path).endswith("/unbind") for path, _ in kernel.writes)
        assert not any(RTX in str(path) for path, _ in kernel.writes), "not even its override"


def is_unbind(write: tuple[HostPath, bytes]) -> bool:
    return str(write[0]).endswith("/unbind")


async def test_a_change_that_was_blocked_takes_no_further_step_of_its_plan(tmp_path: Path) -> None:
    kernel = build_host(load_host("4xT4"), wait=True)
    gpu = PciAddress("0000:86:00.0")
    started: list[Process] = []
    lock = HostPath(f"/proc/driver/nvidia/gpus/{gpu}/unbindLock")
    kernel.faults.before_read(lock, lambda: started.append(kernel.start_process("python3", "/dev/nvidia2")))
    settings = Settings(modes={gpu: DesiredMode.PASSTHROUGH})
    async with running_node(
        kernel, tmp_path, settings, change_worker=ThreadWorker, intervals=Intervals(driver_change_s=0.2)
    ) as node:

        async def until(done: Callable[[], bool]) -> None:
            for _ in range(4000):
                if done():
                    return
                await RealClock().sleep(0.01)
                await node.advance(1)
                await node.report_account()  # an account is old within seconds, and the thread takes its own time
            raise AssertionError([note.text for note in node.view.problems])

        await until(lambda: bool(started) and ReasonCode.WRITE_BLOCKED in {note.code for note in node.view.problems})
        since = len(kernel.writes)
        kernel.end_vm(started[0])
        await until(lambda: driver(kernel, gpu) == "vfio-pci")
        await until(lambda: not node.view.problems)
    after = [write for write in kernel.writes[since:] if "unbindLock" not in write[0]]
    override = HostPath(f"/sys/bus/pci/devices/{gpu}/driver_override")
    bind = HostPath("/sys/bus/pci/drivers/nvidia/bind")
    put_back = [write for write in after if not is_unbind(write)][:2]
    assert put_back == [(override, b"\n"), (bind, gpu.encode())], "the old plan would probe for vfio-pci"


def test_a_change_does_not_lease_the_group_of_an_allocated_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod got the GPU while the plan was made: its VM may be starting, and would find the IOMMU group busy."""
    kernel = build_host(load_host("2xA10"))
    leased: list[IommuGroup] = []

    def lease(group: IommuGroup) -> AbstractContextManager[None]:
        leased.append(group)
        return nullcontext()

    monkeypatch.setattr(kernel, "lease", lease)
    change_host = change_host_in(tmp_path, kernel, SimTools(kernel))
    unit = driver_state(change_host, NOBODY).inventory.gpus[FIRST].unit
    kernel.writes.clear()
    entries = [entry_of(FIRST)]
    change = Change(Changes(lambda: entries), unit, lambda: True, None)
    reasons = change_drivers(change_host, unit, {FIRST: DesiredDriver.NATIVE}, NOBODY, lambda _: None, change)
    assert [reason.code for reason in reasons] == [ReasonCode.PLAN_OUTDATED]
    assert (leased, kernel.writes) == ([], [])
    entries.clear()
    change = Change(Changes(lambda: entries), unit, lambda: True, None)
    assert change_drivers(change_host, unit, {FIRST: DesiredDriver.NATIVE}, NOBODY, lambda _: None, change) == ()
    assert leased


async def test_allocate_opens_no_group_with_an_allocated_device(
    simulated: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = simulated("2xA10")
    async with running_node(kernel, tmp_path) as node:
        await node.report_account()
        node.allocate(A10, [FIRST])
        node.write(A10, FIRST, uid="a")
        opened: list[IommuGroup] = []

        def lease(group: IommuGroup) -> AbstractContextManager[None]:
            opened.append(group)
            return nullcontext()

        monkeypatch.setattr(kernel, "lease", lease)
        node.allocate(A10, [FIRST])
        assert opened == []
        node.allocate(A10, [SECOND])
        assert len(opened) == 1


def test_devices_can_be_allocated_after_their_change_has_ended() -> None:
    entries: list[Entry] = []
    changes = Changes(lambda: entries)
    given = [(DeviceId(FIRST), Target(FIRST))]
    change = Change(changes, "unit", lambda: True, None)
    with change.under_way(UNGATED):
        changes.allocate(given, lambda: None)  # nothing is claimed yet
        change.claim(StepScope.of([FIRST]))
        with pytest.raises(RefusedError) as refused:
            changes.allocate(given, lambda: entries.append(entry_of(FIRST)))
        assert refused.value.reason.code is ReasonCode.UNIT_BUSY
        assert refused.value.reason.fix is not None
        changes.allocate([(DeviceId(SECOND), Target(SECOND))], lambda: None)
        change.expire()
        with pytest.raises(StalePlanError), change.step(StepScope.of([SECOND]), "a step"):
            raise AssertionError("taken")
        change.roll_back()
        with change.step(StepScope.of([FIRST]), "a step that puts back"):
            pass
    changes.allocate(given, lambda: entries.append(entry_of(FIRST)))
    with change.under_way(UNGATED), pytest.raises(StalePlanError, match="is allocated to"):
        change.claim(StepScope.of([FIRST]))


def test_a_step_that_restores_a_touched_function_is_refused_by_no_account() -> None:
    """A function without its driver is of no use to the pod, and the account may be of a kubelet that restarts."""
    entries: list[Entry] = []
    account = PodAllocations({FIRST: ("cuda/job",)}, unknown=refusals.allocations_unknown(FIRST))
    change = Change(Changes(lambda: entries), "unit", lambda: True, lambda _: account if entries else PodAllocations())
    inventory = build_inventory(scan(build_host(load_host("2xA10"))))
    with change.under_way(UNGATED):
        change.plan_from(inventory, ())
        with change.step(StepScope.of([FIRST]), "unbind it"):
            entries.append(entry_of(FIRST))
        with pytest.raises(StalePlanError), change.step(StepScope.of([FIRST]), "probe it", restores=True):
            raise AssertionError("only a rollback restores")
        change.roll_back()
        change.claim(StepScope.of([FIRST]), StepScope.of([FIRST]))
        with change.step(StepScope.of([FIRST]), "probe it", restores=True):
            pass
        with pytest.raises(StalePlanError), change.step(StepScope.of([FIRST]), "unbind it again"):
            raise AssertionError("an unbind takes")
        with pytest.raises(StalePlanError), change.step(StepScope.of([SECOND]), "probe another", restores=True):
            raise AssertionError("the change has not touched it")
