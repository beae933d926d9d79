"""When the agent scans the host: soon after a uevent, seldom otherwise; scans never write and never block the agent."""

import asyncio
import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typing_extensions import override

from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.loops.telemetry import Telemetry
from gpuvirt.agent.loops.watcher import Audience, Watcher
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.facts.snapshot import Facts
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.loops.serialworker import ThreadWorker
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.clock import SimClock
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import SimNode, running_node
from tests.inlineworker import InlineWorker
from tests.sim.simulated import Simulated

FIRST = PciAddress("0000:65:00.0")


async def test_a_burst_of_uevents_starts_one_scan(two_a10: SimNode) -> None:
    for _ in range(100):
        two_a10.kernel.rebind(FIRST, "nvidia")
        two_a10.kernel.rebind(FIRST, "vfio-pci")
    await two_a10.advance(0.2)
    assert two_a10.agent.telemetry.observations["whole", "uevent"] == 1


async def test_the_intervals_of_scans_without_uevents(two_a10: SimNode) -> None:
    await two_a10.advance(1200)
    observations = two_a10.agent.telemetry.observations
    assert observations["whole", "interval"] == 20
    assert 105 <= observations["brief", "interval"] <= 133
    assert observations["users", "interval"] == 21
    assert observations["whole", "uevent"] == 0


class KernelWithoutUevents(SimKernel):
    """A host without uevents."""

    @override
    def on_uevent(self, _wake: Callable[[], None], /) -> Callable[[], None]:
        raise OSError(93, "Protocol not supported")


class Observed:
    """Records the facts and problems that a watcher reports."""

    def __init__(self) -> None:
        self.facts: list[Facts] = []
        self.problems: list[Reason | None] = []

    @property
    def audience(self) -> Audience:
        return Audience(lambda facts, _: self.facts.append(facts), self.problems.append, lambda: False)


def watcher(kernel: Kernel, clock: SimClock, telemetry: Telemetry) -> Watcher:
    return Watcher(kernel, InlineWorker(), clock, Intervals(), telemetry=telemetry, sees_processes=False)


async def test_a_kernel_without_uevents_is_scanned_every_nine_seconds() -> None:
    clock, telemetry = SimClock(), Telemetry()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(watcher(KernelWithoutUevents(), clock, telemetry).run(Observed().audience))
        await clock.advance(100)
        task.cancel()
    assert telemetry.observations["whole", "interval"] == 11
    assert telemetry.observations["users", "interval"] == 0, (
        "an agent without the host's PID namespace does not scan processes"
    )


async def test_users_that_are_read_later_make_no_devices_newer(simulated: Simulated) -> None:
    """A vGPU that was created between the scan and the reading of users is not in these facts, and not gone."""
    clock, seen = SimClock(), list[tuple[float, bool]]()
    audience = Audience(
        lambda facts, since_s: seen.append((since_s, facts.users is not None)), lambda _: None, lambda: False
    )
    kernel, began_s, intervals = simulated("2xA10"), clock.monotonic_s(), Intervals(users_s=1.0)
    looks = Watcher(kernel, InlineWorker(), clock, intervals, telemetry=Telemetry(), sees_processes=True)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(looks.run(audience))
        await clock.advance(1.4)
        task.cancel()
    assert seen == [(began_s, False), (began_s, True), (began_s, True)]


async def test_a_failed_scan_is_reported_and_the_last_snapshot_is_kept(two_a10: SimNode) -> None:
    def fail() -> None:
        raise RuntimeError("an unexpected error of a scan")

    two_a10.kernel.faults.before_read(HostPath("/sys/bus/pci/devices"), fail)
    await two_a10.advance(11)
    assert [note.code for note in two_a10.view.problems] == [ReasonCode.SCAN_FAILED]
    assert two_a10.offered == {"nvidia.com/GA102GL_A10": {FIRST: True, "0000:ca:00.0": True}}
    await two_a10.advance(11)
    assert two_a10.view.problems == ()


async def test_a_blocked_scan_is_reported_and_the_watcher_goes_on(simulated: Simulated) -> None:
    """The worker is a real thread; its job waits for an event that the test sets."""

    wake, kernel, observed = threading.Event(), simulated("2xA10"), Observed()

    def sleep() -> None:
        wake.wait(100)

    kernel.faults.before_read(HostPath("/sys/bus/pci/devices"), sleep)
    worker = ThreadWorker("test")
    blocked = Watcher(kernel, worker, RealClock(), Intervals(nodes_s=0.01), telemetry=Telemetry(), sees_processes=False)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(blocked.run(observed.audience))
        await RealClock().sleep(0.05)
        assert observed.facts == []
        wake.set()
        while not observed.facts:
            await RealClock().sleep(0.01)
        task.cancel()


async def test_the_host_is_read_before_its_processes_where_the_first_scan_has_failed(simulated: Simulated) -> None:
    """A host that was not read yet is unknown: it is no host without devices."""
    kernel, clock, telemetry, observed = simulated("2xA10"), SimClock(), Telemetry(), Observed()

    def fail() -> None:
        raise RuntimeError("an unexpected error of a scan")

    kernel.faults.before_read(HostPath("/sys/bus/pci/devices"), fail)
    intervals = Intervals(users_s=0.5)
    failing = Watcher(kernel, InlineWorker(), clock, intervals, telemetry=telemetry, sees_processes=True)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(failing.run(observed.audience))
        await clock.advance(0.9)
        task.cancel()
    assert telemetry.observations["users", "interval"] > 0
    first = observed.facts[0]
    assert list(first.functions) == list(kernel.pci.functions)
    assert first.platform.boot_id is not None
    assert first.users is not None


@pytest.mark.parametrize("sees_processes", [True, False])
async def test_a_host_whose_devices_were_never_listed_is_no_host_without_devices(
    simulated: Simulated, *, sees_processes: bool
) -> None:
    """The agent would take the devices of pods for lost, and the kubelet refuses pods whose devices are unhealthy."""
    kernel, clock, observed = simulated("2xA10"), SimClock(), Observed()
    kernel.faults.fail(HostPath("/sys/bus/pci/devices"), errno.EIO)
    failing = Watcher(kernel, InlineWorker(), clock, Intervals(), telemetry=Telemetry(), sees_processes=sees_processes)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(failing.run(observed.audience))
        await clock.advance(61)
        assert observed.facts == []
        assert {problem.code for problem in observed.problems if problem is not None} == {ReasonCode.SCAN_FAILED}
        kernel.faults.heal()
        await clock.advance(61)
        task.cancel()
    assert list(observed.facts[0].functions) == list(kernel.pci.functions)
    assert observed.problems[-1] is None


async def test_an_agent_offers_nothing_before_it_has_listed_the_devices(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10")
    kernel.faults.fail(HostPath("/sys/bus/pci/devices"), errno.EIO)
    async with running_node(kernel, tmp_path) as node:
        await node.report_account()
        await node.advance(30)
        before = node.agent.host_observed
        assert [note.code for note in node.view.problems] == [ReasonCode.SCAN_FAILED]
        kernel.faults.heal()
        await node.advance(61)
        assert (before, node.agent.host_observed) == (False, True)
        assert node.offered == {"nvidia.com/GA102GL_A10": {FIRST: True, "0000:ca:00.0": True}}
        kernel.faults.fail(HostPath("/sys/bus/pci/devices"), errno.EIO)
        await node.advance(61)
        assert node.offered == {"nvidia.com/GA102GL_A10": {FIRST: True, "0000:ca:00.0": True}}


async def test_an_agent_without_a_desired_mode_never_writes_to_the_host(simulated: Simulated, tmp_path: Path) -> None:
    """The agent starts, is killed and starts again while a VM runs: no write, no request to the user of a device."""
    for name in ("2xA10", "4xT4", "4xL40S", "4xRTX2060"):
        kernel = simulated(name)
        kernel.start_vm(next(group for group in kernel.vfio.groups if kernel.vfio.groups[group].vfio_devices))
        for _ in range(3):
            async with running_node(kernel, tmp_path / name) as node:
                for resource, devices in node.offered.items():
                    for device in devices:
                        try:
                            node.allocate(resource, [device])
                        except Exception:  # noqa: BLE001, S112  refused is fine
                            continue
                await node.advance(120)
        assert kernel.writes == []
        assert kernel.vfio.requests == []
        assert all(group.user is None or group.user > 4000 for group in kernel.vfio.groups.values())


async def test_scans_do_not_open_iommu_groups(two_a10: SimNode) -> None:
    """Opening a group, even briefly, would keep a VM from starting; only Allocate may open it."""
    opened: list[IommuGroup] = []
    original = two_a10.kernel.vfio.open

    def watch(number: IommuGroup, pid: int) -> None:
        opened.append(number)
        original(number, pid)

    two_a10.kernel.vfio.open = watch  # type: ignore[method-assign]
    await two_a10.report_account()
    await two_a10.advance(600)
    assert opened == []
    two_a10.allocate("nvidia.com/GA102GL_A10", [FIRST])
    assert opened == [12]
