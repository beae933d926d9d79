"""When a pod gets no on-demand vGPU: what is refused leaves nothing, and says why."""

import asyncio
import dataclasses
import errno
import fcntl
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from gpuvirt.agent.change.allocationgate import AllocationGate
from gpuvirt.agent.change.gate.drainrequest import NoGate
from gpuvirt.agent.change.gate.gate import Gate, GateFailedError, UnitBusyError
from gpuvirt.agent.change.steps.changes import Change, Changes, StalePlanError
from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.agent.ondemand.ondemandallocator import ALLOCATE_S
from gpuvirt.clock import Clock
from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName, VgpuId, VgpuType, slot_of
from gpuvirt.facts.vgpu import UnnamedType
from gpuvirt.loops.serialworker import SerialWorker, WorkerBlockedError, WorkerBusyError
from gpuvirt.model.allocation.ledger import Entry, Stage
from gpuvirt.model.allocation.pluginanswers import PluginAnswer
from gpuvirt.model.change.plan import Scope, StepScope
from gpuvirt.model.desired.observed import GpuNodeSpec, Withheld
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.offers.ondemand.ondemandstarts import started
from gpuvirt.model.offers.ondemand.typesannotation import TypeChange, reason_of
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.clock import BEGINNING
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from gpuvirt_sim.kernel import SimKernel
from tests.agent.change.changes import UNGATED
from tests.agent.node.diskfaults import failing
from tests.agent.node.simnode import SimNode, running_node
from tests.agent.ondemand.pods import ON_DEMAND, P100, Pods, one_p100, settled, vgpus
from tests.inlineworker import InlineWorker
from tests.sim.simulated import Simulated

T = TypeVar("T")
V8Q, V16Q = "tencent.com/vgpu-86", "tencent.com/vgpu-87"
NEXT = "0000:d8:00.0"


def two_p100() -> SimKernel:
    slots = tuple(SlotSpec(at=at, board="P100", group=group, numa=0) for at, group in ((P100, 31), (NEXT, 32)))
    return build_host(HostSpec(about="two P100", slots=slots))


def create_of(gpu: str, number: int = 86) -> HostPath:
    return HostPath(f"/sys/class/mdev_bus/{gpu}/mdev_supported_types/nvidia-{number}/create")


def entries(node: SimNode) -> int:
    return len(node.agent._state.ledger.entries)


async def test_a_creation_that_the_kernel_refuses_goes_to_the_next_gpu(tmp_path: Path) -> None:
    kernel = two_p100()
    kernel.faults.refuse(create_of(P100), errno.EIO)
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        (vgpu,) = Pods(node).start("a", V8Q).vgpus
        assert kernel.mdev.devices[vgpu].slot == NEXT


async def test_a_creation_that_fails_everywhere_is_refused_with_the_kernels_error(tmp_path: Path) -> None:
    kernel = one_p100()
    kernel.faults.refuse(create_of(P100), errno.EIO)
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        text = await pods.refusal(V8Q, pods.free(V8Q))
        assert text.startswith("NoRoom: tencent.com/vgpu-86 has no room for another GRID P100-8Q")
        assert "failed at: 0000:3b:00.0: create GRID P100-8Q" in text
        assert entries(node) == 0
        kernel.faults.heal()
        pod = Pods(node).start("a", V8Q)
        assert vgpus(node) == pod.vgpus


async def test_a_gpu_that_was_filled_since_it_was_observed_is_refused_without_a_creation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By a creation that the kernel had blocked, and that Allocate gave up."""
    kernel = one_p100()
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        kernel.write(create_of(P100, 87), b"aaaaaaaa-0000-4000-8000-000000000001")
        kernel.faults.refuse(create_of(P100), errno.EIO)
        assert "failed at: 0000:3b:00.0: create GRID P100-8Q" in await pods.refusal(V8Q, pods.free(V8Q))
        assert "has no room for another GRID P100-8Q now; /sys/class/mdev_bus/0000:3b:00.0/mdev_supp" in caplog.text
        assert entries(node) == 0


async def test_a_creation_without_effect_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = one_p100()
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        monkeypatch.setattr(kernel.mdev, "create", lambda *_: None)
        text = await pods.refusal(V8Q, pods.free(V8Q))
        assert "failed at: 0000:3b:00.0: create GRID P100-8Q" in text
        assert entries(node) == 0


@pytest.mark.parametrize("attribute", ["mdev_type/name", "iommu_group"])
async def test_a_new_vgpu_that_cannot_be_read_is_refused_and_removed(tmp_path: Path, attribute: str) -> None:
    kernel = one_p100()
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods, uuid = Pods(node), "aaaaaaaa-0000-4000-8000-000000000001"
        parts = node.agent.allocators.on_demand._on  # type: ignore[union-attr]
        node.agent.allocators.on_demand._on = replace(parts, new_uuid=lambda: uuid)  # type: ignore[union-attr]
        kernel.faults.fail(HostPath(f"/sys/bus/mdev/devices/{uuid}/{attribute}"), errno.EIO)
        text = await pods.refusal(V8Q, pods.free(V8Q))
        assert "could not be read" in text
        assert entries(node) == 0
        kernel.faults.heal()
        await settled(node)
        assert vgpus(node) == []


async def test_a_vgpu_of_another_type_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = one_p100()
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods, create = Pods(node), kernel.mdev.create
        other = next(spec for spec in kernel.mdev._parents[PciAddress(P100)][0].types if spec.name.endswith("16Q"))
        monkeypatch.setattr(kernel.mdev, "create", lambda host, slot, _, text: create(host, slot, other, text))
        text = await pods.refusal(V8Q, pods.free(V8Q))
        assert "failed at: 0000:3b:00.0: create GRID P100-8Q" in text
        await settled(node)
        assert vgpus(node) == []


async def test_a_vgpu_without_a_group_is_refused(tmp_path: Path) -> None:
    kernel = one_p100()
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods, uuid = Pods(node), "aaaaaaaa-0000-4000-8000-000000000001"
        parts = node.agent.allocators.on_demand._on  # type: ignore[union-attr]
        node.agent.allocators.on_demand._on = replace(parts, new_uuid=lambda: uuid)  # type: ignore[union-attr]
        kernel.faults.fail(HostPath(f"/sys/bus/mdev/devices/{uuid}/iommu_group"), errno.ENOENT)
        assert "is in no IOMMU group" in await pods.refusal(V8Q, pods.free(V8Q))


async def test_a_ledger_that_cannot_be_written_refuses_before_the_creation(tmp_path: Path) -> None:
    kernel = one_p100()
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        with failing(tmp_path, errno.EROFS) as faults:
            faults.only = "ledger.json"
            text = await pods.refusal(V8Q, pods.free(V8Q))
        assert "can't be written; no vGPU is created for a pod" in text
        assert vgpus(node) == []


async def test_a_container_does_not_start_while_its_start_cannot_be_written(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        pod = pods.admit("a", V8Q)
        with failing(tmp_path, errno.EROFS), pytest.raises(AllocationRefusedError, match="LedgerNotWritten"):
            pods.pre_start(pod)


async def test_a_container_with_another_vgpu_in_the_record_does_not_start(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        pod = pods.admit("a", V8Q)
        key = ResourceName(pod.resource), DeviceId(pod.devices[0])
        other = PluginAnswer(env=(("MDEV_PCI_RESOURCE_X", "bbbbbbbb-0000-4000-8000-000000000001"),))
        node.recorded.containers[key] = frozenset(
            dataclasses.replace(consumer, answer=other) for consumer in node.recorded.containers[key]
        )
        with pytest.raises(AllocationRefusedError, match="names bbbbbbbb-0000-4000-8000-000000000001; expected"):
            pods.pre_start(pod)
        with pytest.raises(AllocationRefusedError, match="no vGPU was created for this id"):
            pods.pre_start(dataclasses.replace(pod, devices=("v00000000-7",)))


@pytest.mark.parametrize("observed", [False, True])
async def test_a_container_whose_vgpu_is_gone_does_not_start(tmp_path: Path, *, observed: bool) -> None:
    """Nor before the host is observed again, which takes up to 2 s."""
    kernel = one_p100()
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        pod = pods.admit("a", V8Q)
        kernel.write(HostPath(f"/sys/bus/mdev/devices/{pod.vgpus[0]}/remove"), b"1")
        if observed:
            await node.advance(1.0)
        with pytest.raises(AllocationRefusedError, match="does not exist on this host any more"):
            pods.pre_start(pod)
        await node.advance(0.5)
        (listed,) = [found for view in node.view.resources for found in view.devices if found.id == pod.devices[0]]
        assert (listed.healthy, listed.reasons[0].code) == (False, ReasonCode.DEVICE_GONE)


async def test_a_container_whose_vgpu_was_replaced_does_not_start(tmp_path: Path) -> None:
    kernel = one_p100()
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        pod = pods.start("a", V8Q)
        kernel.write(HostPath(f"/sys/bus/mdev/devices/{pod.vgpus[0]}/remove"), b"1")
        kernel.write(create_of(P100, 87), pod.vgpus[0].encode())
        with pytest.raises(AllocationRefusedError, match="is GRID P100-16Q now; expected GRID P100-8Q"):
            pods.pre_start(pod)


@pytest.mark.parametrize("attribute", ["mdev_type/name", "iommu_group"])
async def test_a_container_whose_vgpu_cannot_be_read_does_not_start(tmp_path: Path, attribute: str) -> None:
    kernel = one_p100()
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        pod = pods.start("a", V8Q)
        kernel.faults.fail(HostPath(f"/sys/bus/mdev/devices/{pod.vgpus[0]}/{attribute}"), errno.EIO)
        with pytest.raises(AllocationRefusedError, match="could not be read, so no container starts with it"):
            pods.pre_start(pod)
        kernel.faults.heal()
        pods.pre_start(pod)


NO_NAME = UnnamedType(HostPath("/sys/.../nvidia/current_vgpu_type"), seen="86, a type that no VF lists now", id="86")


@pytest.mark.parametrize(
    ("vgpu_type", "created", "group", "code"),
    [
        (NO_NAME, VgpuType("GRID P100-8Q"), 200, None),
        (VgpuType("GRID P100-8Q"), None, 200, None),
        (VgpuType("GRID P100-8Q"), VgpuType("GRID P100-8Q"), None, ReasonCode.NO_IOMMU_GROUP),
    ],
    ids=["full GPU", "adopted", "no group"],
)
async def test_a_container_starts_with_a_vgpu_that_is_not_known_to_be_another(
    tmp_path: Path,
    vgpu_type: VgpuType | UnnamedType,
    created: VgpuType | None,
    group: IommuGroup | None,
    code: ReasonCode | None,
) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pod, state = Pods(node).start("a", V8Q), node.agent._state
        assert state.inventory is not None
        ((vgpu, found),) = state.inventory.vgpus.items()
        changed = replace(found, live=replace(found.live, type=vgpu_type, group=group))
        inventory = replace(state.inventory, vgpus={vgpu: changed})
        allocated = [
            replace(entry, target=dataclasses.replace(entry.target, type=created)) for entry in state.ledger.entries
        ]
        reason = started(inventory, allocated, node.recorded.read(), ResourceName(V8Q), [DeviceId(pod.devices[0])])
        assert (reason.code if isinstance(reason, Reason) else None) is code


class SlowReads:
    """A worker for whose jobs the kernel takes a moment, or which it blocks."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.blocks = False

    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        if self.blocks:
            raise WorkerBlockedError(f"{name}: the kernel has blocked it for {timeout_s} s")
        found = job()
        await self.may_end.wait()
        return found


async def test_a_container_does_not_start_while_the_kernel_blocks_a_read_of_its_vgpu(
    simulated: Simulated, tmp_path: Path
) -> None:
    """A read of the type of a VF calls into its driver."""
    reads = SlowReads()

    def worker(name: str) -> SerialWorker:
        return reads if name.startswith("read on") else InlineWorker()

    async with running_node(simulated("4xL40S"), tmp_path, ON_DEMAND, change_worker=worker) as node:
        await settled(node)
        pods = Pods(node)
        pod = pods.admit("a", next(view.name for view in node.view.resources if view.on_demand == "NVIDIA L40S-24Q"))
        reads.blocks = True
        with pytest.raises(AllocationRefusedError) as refused:
            pods.pre_start(pod)
        assert refused.value.reason.code is ReasonCode.SCAN_BLOCKED
        reads.blocks = False
        reads.may_end.set()
        pods.pre_start(pod)
        node.kernel.write(HostPath(f"/sys/bus/pci/devices/{pod.vgpus[0]}/nvidia/current_vgpu_type"), b"0")
        with pytest.raises(AllocationRefusedError, match="does not exist on this host any more"):
            pods.pre_start(pod)


async def test_an_allocation_during_a_read_before_a_start_stays(simulated: Simulated, tmp_path: Path) -> None:
    reads = SlowReads()

    def worker(name: str) -> SerialWorker:
        return reads if name.startswith("read on") else InlineWorker()

    async with running_node(simulated("4xL40S"), tmp_path, ON_DEMAND, change_worker=worker) as node:
        await settled(node)
        pods = Pods(node)
        resource = next(view.name for view in node.view.resources if view.on_demand == "NVIDIA L40S-24Q")
        pod = pods.admit("a", resource)
        ids = [DeviceId(device) for device in pod.devices]
        async with asyncio.TaskGroup() as group:
            group.create_task(node.agent.allocators.pre_start(ResourceName(resource), ids))
            await node.clock.settle()
            other = pods.admit("b", resource, next(free for free in pods.free(resource) if free not in pod.devices))
            reads.may_end.set()
        stages = {entry.device: entry.stage for entry in node.agent._state.ledger.entries}
        assert stages == {pod.devices[0]: Stage.STARTED, other.devices[0]: Stage.CREATED}


async def test_a_request_of_which_one_vgpu_is_refused_leaves_nothing(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        (first,) = pods.free(V16Q)
        text = await pods.refusal(V16Q, [first, first.replace("-", "-99")])
        assert "UnknownDevice" in text
        assert entries(node) == 0
        await settled(node)
        assert vgpus(node) == []


async def test_an_unknown_resource_is_refused(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        text = await pods.refusal("tencent.com/vgpu-999", pods.free(V8Q))
        assert "is not a device of tencent.com/vgpu-999" in text


async def test_no_vgpu_is_created_before_the_host_was_observed(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        free = pods.free(V8Q)
        node.agent._state.picture = replace(node.agent._state.picture, inventory=None)
        assert "UnknownResource" in await pods.refusal(V8Q, free)


async def test_a_gpu_that_another_process_changes_gets_no_vgpu(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        free = pods.free(V8Q)
        other = Gate(node.agent._options.gates)
        with other.change("a unit", lambda: ("0000:3b:00",)):
            text = await pods.refusal(V8Q, free)
        assert "NoRoom" in text
        assert vgpus(node) == []


async def test_a_gates_file_that_cannot_be_written_refuses(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        with failing(node.agent._options.gates, errno.ENOSPC):
            text = await pods.refusal(V8Q, pods.free(V8Q))
        assert "NoRoom" in text
        assert vgpus(node) == []
        assert entries(node) == 0


async def test_an_id_that_the_kubelet_has_forgotten_is_refused(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        pod = pods.start("a", V8Q)
        key = ResourceName(pod.resource), DeviceId(pod.devices[0])
        parts = node.agent.allocators.on_demand._on  # type: ignore[union-attr]
        lost = replace(parts.kubelet, lost=lambda: {key: node.held[key]})
        node.agent.allocators.on_demand._on = replace(parts, kubelet=lost)  # type: ignore[union-attr]
        assert "which the kubelet has forgotten" in await pods.refusal(V8Q, pod.devices)
        assert node.agent._state.ledger.entries[0].stage is Stage.STARTED


class SlowKernel:
    """A worker for whose jobs the kernel takes a time; like others, it takes no job after one that took too long."""

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s
        self._is_blocked = False
        self.clock: Clock

    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        if self._is_blocked:
            raise WorkerBusyError(f"{name}: the kernel still blocks an earlier job")
        await self.clock.sleep(min(self._takes_s, timeout_s))
        if self._takes_s > timeout_s:
            self._is_blocked = True
            raise WorkerBlockedError(f"{name}: the kernel blocks it")
        return job()


@pytest.mark.parametrize(("takes_s", "requested"), [(1000.0, 1), (0.6 * ALLOCATE_S, 2)], ids=["blocked", "slow"])
async def test_a_creation_that_the_kernel_blocks_is_refused(tmp_path: Path, takes_s: float, requested: int) -> None:
    """All waits of a request share one deadline, and the next GPU is not tried: the creation may still go on."""
    slow = SlowKernel(takes_s)

    def worker(name: str) -> SerialWorker:
        return slow if name == f"create on {P100}" else InlineWorker()

    async with running_node(two_p100(), tmp_path, ON_DEMAND, change_worker=worker) as node:
        slow.clock = node.clock
        await settled(node)
        pods = Pods(node)
        text, took_s = await pods.refused(V8Q, pods.free(V8Q)[:requested])
        assert text.startswith("WriteBlocked: 0000:3b:00.0 has been blocked in the kernel since the step: 0000:3b:00.0")
        assert "create GRID P100-8Q" in text
        assert took_s == pytest.approx(ALLOCATE_S, abs=0.01)
        assert entries(node) == 0


@pytest.mark.parametrize("others", [True, False])
async def test_a_gpu_that_the_kernel_still_blocks_is_passed_over(tmp_path: Path, *, others: bool) -> None:
    """A later request begins no creation there; the reason is that GPU's where no other GPU has room."""
    slow = SlowKernel(1000.0)

    def worker(name: str) -> SerialWorker:
        return slow if name == f"create on {P100}" else InlineWorker()

    kernel = two_p100() if others else one_p100()
    async with running_node(kernel, tmp_path, ON_DEMAND, change_worker=worker) as node:
        slow.clock = node.clock
        await settled(node)
        pods = Pods(node)
        await pods.refused(V8Q, pods.free(V8Q)[:1])
        if others:
            (vgpu,) = pods.start("b", V8Q).vgpus
            assert kernel.mdev.devices[vgpu].slot == NEXT
        else:
            text, took_s = await pods.refused(V8Q, pods.free(V8Q)[:1])
            assert text.startswith("WriteBlocked: 0000:3b:00.0 has been blocked in the kernel")
            assert "still blocks an earlier job" in text
            assert took_s < ALLOCATE_S
            assert entries(node) == 0


async def test_a_tenant_that_would_be_forgotten_gets_no_vgpu(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        with failing(tmp_path, errno.EROFS) as faults:
            faults.only = "tenancy.json"
            assert "NoRoom" in await pods.refusal(V8Q, pods.free(V8Q))
        assert vgpus(node) == []


async def test_a_withheld_resource_is_refused_with_the_controllers_reason(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods, memory = Pods(node), node.agent._state.memory
        withheld = Withheld(V8Q, "ForeignProvider", "is offered by KubeVirt itself")
        desired = replace(memory.desired, spec=GpuNodeSpec("on-demand", withheld=(withheld,)))
        free = pods.free(V8Q)
        node.agent._state.memory = dataclasses.replace(memory, desired=desired)
        assert "is offered by KubeVirt itself" in await pods.refusal(V8Q, free)


async def test_a_gate_that_cannot_record_the_allocation_refuses(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        pods.end(pods.start("a", V8Q))  # the gate's file exists from now on
        await settled(node)
        with failing(node.agent._options.gates, errno.ENOSPC):
            assert "NoRoom" in await pods.refusal(V8Q, pods.free(V8Q))
        assert vgpus(node) == []


def test_an_agent_without_gates_creates_nothing() -> None:
    why = Reason(ReasonCode.GATE_FAILED, "agent", "has no gates")
    gate = AllocationGate(Changes(lambda: ()), lambda: NoGate(why))
    target, recorded = Target(PciAddress(P100), VgpuId("x")), list[str]()
    with (
        pytest.raises(RefusedError, match=r"0000:3b:00\.0 has no gates"),
        gate.creation(DeviceId("v00000000-0"), target, "0000:3b:00", lambda: recorded.append("x")),
    ):
        pass
    assert recorded == []


async def test_a_vgpu_that_was_removed_behind_a_pod_is_unhealthy(tmp_path: Path) -> None:
    kernel = one_p100()
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        pod = Pods(node).start("a", V8Q)
        kernel.write(HostPath(f"/sys/bus/mdev/devices/{pod.vgpus[0]}/remove"), b"1")
        await node.advance(1.0)
        assert node.offered[V8Q][pod.devices[0]] is False
        assert node.reasons(pod.devices[0]) == [ReasonCode.DEVICE_GONE]


async def test_the_kernels_error_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernel = one_p100()
    kernel.faults.refuse(create_of(P100), errno.EIO)
    async with running_node(kernel, tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        await pods.refusal(V8Q, pods.free(V8Q))
        assert "Input/output error" in caplog.text


def test_a_new_vgpu_is_covered_before_the_host_shows_it() -> None:
    """A change that was planned from an older account must not remove a vGPU that Allocate is creating."""
    target = Target(PciAddress(P100), VgpuId("x"), VgpuType("GRID P100-8Q"))
    new = Entry(
        ResourceName(V8Q), DeviceId("v00000000-0"), target, None, "allocate:x:1", BEGINNING, stage=Stage.INTENDED
    )
    allocated: list[Entry] = []
    change = Change(Changes(lambda: tuple(allocated)), "unit", lambda: True, None)
    scope = StepScope(frozenset({PciAddress(P100)}), Scope(vgpus=frozenset({VgpuId("x")})))
    with change.under_way(UNGATED):
        change.claim(scope)
        allocated.append(new)
        with pytest.raises(StalePlanError, match="is allocated to a pod that is being admitted"):
            change.claim(scope)
        allocated[:] = [replace(new, stage=Stage.CREATED)]  # of before a reboot: the host has not shown it since
        change.claim(scope)
        others = StepScope(frozenset({PciAddress(P100)}), Scope(vgpus=frozenset({VgpuId("y")})))
        allocated[:] = [new]
        change.claim(others)
        allocated[:] = [replace(new, target=Target(PciAddress(P100)), stage=UNSET)]  # a pod has the GPU whole
        with pytest.raises(StalePlanError):
            change.claim(others)


def test_a_creation_beside_a_change_of_this_process_is_recorded_or_refused(tmp_path: Path) -> None:
    gate, slot = Gate(tmp_path), "0000:3b:00"
    with gate.change("unit", lambda: (slot,)):
        with gate.creation(slot, "v00000000-0"):
            pass
        with failing(tmp_path, errno.ENOSPC), pytest.raises(GateFailedError), gate.creation(slot, "v00000000-1"):
            pass
    assert "v00000000-0" in (tmp_path / f"{slot}.lock").read_text()


def test_a_lent_lock_stays_until_the_creation_has_ended(tmp_path: Path) -> None:
    """A change of another process must not begin while the vGPU is created, also when our change has ended."""
    gate, other, slot = Gate(tmp_path), Gate(tmp_path), "0000:3b:00"
    with ExitStack() as creation:
        with gate.change("unit", lambda: (slot,)):
            creation.enter_context(gate.creation(slot, "v00000000-0"))
        with pytest.raises(UnitBusyError), other.change("unit", lambda: (slot,)):
            pass
    with other.change("unit", lambda: (slot,)) as passed:
        assert passed.slots == (slot,)


def test_a_changed_type_is_reported_and_a_gone_one_only_with_pods() -> None:
    resource, before, now = ResourceName(V8Q), VgpuType("GRID P100-8Q"), VgpuType("GRID P100-4Q")
    changed = reason_of(TypeChange(resource, before, now, None), ())
    assert changed is not None
    assert changed.code is ReasonCode.RESOURCE_TYPE_CHANGED
    gone = TypeChange(resource, before, None, None)
    assert reason_of(gone, ()) is None
    reason = reason_of(gone, ["default/a"])
    assert reason is not None
    assert "default/a" in reason.text


async def test_an_init_containers_id_waits_for_a_change_of_its_gpu(tmp_path: Path) -> None:
    """A killed agent's write may hold the gate; another vGPU for the pod's next container would be wrong."""
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        init = pods.admit("a", V8Q)
        with (tmp_path / "locks" / f"{slot_of(PciAddress(P100))}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert "is being changed" in await pods.refusal(V8Q, init.devices)
            assert vgpus(node) == init.vgpus
        assert pods.admit("a", V8Q, *init.devices).vgpus == init.vgpus == vgpus(node)
