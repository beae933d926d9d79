"""An agent on a simulated host, in simulated time and without a kubelet: the test acts as the kubelet."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from gpuvirt.agent.agent import Agent
from gpuvirt.agent.change.gate.gate import plugin_gates
from gpuvirt.agent.known.kubeletrecord import KubeletRecord, PodStarts
from gpuvirt.agent.known.requests import AllocationRefusedError, AllocationRequest
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.options import NodeOptions
from gpuvirt.agent.shares.nodeshares import NodeShares
from gpuvirt.facts.ids import DeviceId, NodeName, PodUid, ResourceName
from gpuvirt.hardware.access.tools import Tools
from gpuvirt.loops.serialworker import SerialWorker
from gpuvirt.model.allocation.allocations import Recorded, Unknown
from gpuvirt.model.allocation.attachment import Attachment
from gpuvirt.model.allocation.ledger import UNSETTLED, Consumer, KubeletAccount, SettledAt
from gpuvirt.model.allocation.pluginanswers import PluginAnswer
from gpuvirt.model.allocation.recordhistory import devices_of_several
from gpuvirt.model.desired.observed import NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory import pciids
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.node.desirednode import RequestTerms
from gpuvirt.model.node.picture import NodeTerms
from gpuvirt.model.offers.namereview import ReviewTerms
from gpuvirt.model.offers.view import AgentView, GpuView, NodeView
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import KubeletPaths
from gpuvirt_sim.clock import BEGINNING, SimClock
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import change_host_in
from tests.agent.node.pacedworker import PacedKernel, PacedTools, PacedWorker
from tests.inlineworker import InlineWorker

T = TypeVar("T")

IDS = PciIds((pciids.shipped(),))


def at_once(work: Coroutine[None, None, T]) -> T:
    """Return the result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise AssertionError("the coroutine waits")


class Workers:
    """How the jobs of a node's changes run, unless a test chooses it."""

    paced = False
    """Whether the event loop continues at each kernel operation of a job."""


class Record:
    """The kubelet's checkpoint, which it writes when a container has all its devices."""

    def __init__(self) -> None:
        self.containers: dict[tuple[ResourceName, DeviceId], frozenset[Consumer]] = {}
        self.unread = False
        self.started: int | None = 0
        """How many pods of the node have started, None if that can't be read."""

    def read(self) -> Recorded | Unknown:
        return Unknown() if self.unread else dict(self.containers)

    def pod_starts(self) -> PodStarts | None:
        return (0, self.started, 0) if self.started is not None else None


class SimNode:
    """The agent, its simulated host and its clock."""

    def __init__(self, kernel: SimKernel, clock: SimClock, agent: Agent, recorded: "Record") -> None:
        self.kernel = kernel
        self.clock = clock
        self.agent = agent
        self.held: dict[tuple[ResourceName, DeviceId], Consumer] = {}
        self.recorded = recorded
        self.counted: frozenset[tuple[ResourceName, DeviceId]] = frozenset()
        self.registered: dict[ResourceName, frozenset[DeviceId]] = {}

    @property
    def view(self) -> NodeView:
        return self.agent.views.get()

    @property
    def offered(self) -> Mapping[str, Mapping[str, bool]]:
        """The health of the devices by resource and device id."""
        return {
            resource.name: {device.id: device.healthy for device in resource.devices}
            for resource in self.view.resources
        }

    def gpu(self, address: str) -> GpuView:
        return next(gpu for gpu in (*self.view.gpus, *self.view.functions) if gpu.address == address)

    def reasons(self, address: str) -> list[ReasonCode]:
        """Return the codes of the reasons against a GPU, or against one of its vGPUs."""
        for gpu in (*self.view.gpus, *self.view.functions):
            if gpu.address == address:
                return [reason.code for reason in gpu.reasons]
            for vgpu in gpu.vgpus:
                if vgpu.id == address:
                    return [reason.code for reason in vgpu.reasons]
        for resource in self.view.resources:
            for device in resource.devices:
                if device.id == address:
                    return [reason.code for reason in device.reasons]
        raise AssertionError(f"{address} is not in the view")

    async def advance(self, seconds: float) -> None:
        await self.clock.advance(seconds)

    async def settle(self) -> None:
        await self.clock.settle()

    def allocate(self, resource: str, *containers: Sequence[str]) -> tuple[Attachment, ...]:
        ids = [[DeviceId(device) for device in container] for container in containers]
        return at_once(self.agent.allocators.allocate(AllocationRequest(ResourceName(resource), ids)))

    def refused(self, resource: str, *containers: Sequence[str]) -> ReasonCode:
        """Request devices that must be refused, and return the reason's code."""
        try:
            self.allocate(resource, *containers)
        except AllocationRefusedError as error:
            return error.reason.code
        raise AssertionError(f"{containers} of {resource} were allocated")

    def hold(self, resource: str, *devices: str, pod: str = "vm-a", answer: PluginAnswer | UnsetType = UNSET) -> None:
        """Let the kubelet start a pod with these devices and this answer of their plugin, and report it from now on."""
        self.recorded.started = self.recorded.started + 1 if self.recorded.started is not None else None
        self.write(resource, *devices, uid=f"uid-of-{pod}", answer=answer)
        for device in devices:
            key = (ResourceName(resource), DeviceId(device))
            self.held[key] = Consumer(namespace="default", pod=pod, container="compute", answer=answer)

    def write(
        self,
        resource: str,
        *devices: str,
        uid: str,
        container: str = "compute",
        answer: PluginAnswer | UnsetType = UNSET,
    ) -> None:
        """Let the kubelet record these devices as a container's, before it reports them."""
        for device in devices:
            key = (ResourceName(resource), DeviceId(device))
            before = self.recorded.containers.get(key, frozenset())
            self.recorded.containers[key] = before | {Consumer(pod_uid=PodUid(uid), container=container, answer=answer)}

    def free(self, *devices: str) -> None:
        """Let the kubelet report from now on that no pod has these devices."""
        self.held = {key: consumer for key, consumer in self.held.items() if key[1] not in devices}
        recorded = self.recorded.containers
        self.recorded.containers = {key: consumers for key, consumers in recorded.items() if key[1] not in devices}

    def count(self, resource: str, *devices: str) -> None:
        """Let the kubelet report from now on that it counts these devices of a resource, and no others of any."""
        self.counted = frozenset((ResourceName(resource), DeviceId(device)) for device in devices)

    def register(self, resource: str, *devices: str) -> None:
        """Let the kubelet report from now on that a plugin has registered these devices of a resource."""
        self.registered[ResourceName(resource)] = frozenset(DeviceId(device) for device in devices)

    async def report_account(self, *, settled: bool = False) -> None:
        """Let the kubelet report its allocations now; `settled`: it has recorded all answers to Allocate so far."""
        recorded = self.recorded.containers.items()
        account = KubeletAccount(
            self.clock.now(),
            self.clock.monotonic_s(),
            dict(self.held),
            self.counted,
            dict(self.registered),
            of_several=devices_of_several((key, consumer) for key, consumers in recorded for consumer in consumers),
            settled_s=SettledAt(self.clock.monotonic_s()) if settled else UNSETTLED,
        )
        self.agent.observations.observe_account(account)
        await self.settle()


OWN_WORKERS = frozenset({"watching", "writing", "allocating"})
"""The serial workers of the agent itself; all others are of isolation units."""


def _paced(clock: SimClock) -> Callable[[str], SerialWorker]:
    return lambda _: PacedWorker(clock)


@asynccontextmanager
async def running_node(
    kernel: SimKernel,
    folder: Path,
    settings: Settings | None = None,
    *,
    ids: PciIds = IDS,
    allocating: SerialWorker | None = None,
    tools: Tools | None = None,
    change_worker: Callable[[str], SerialWorker] | None = None,
    intervals: Intervals | None = None,
    vgpus_only: bool = False,
    writes_node_counts: bool = False,
    watches_gpu_node: bool = False,
    awaits_controller: bool = False,
    plugin_only: bool = False,
    shares: NodeShares | None = None,
) -> AsyncIterator[SimNode]:
    """Run an agent for as long as the context lasts; a second agent on the same folder is a restart of the first."""
    clock = SimClock()
    host = change_host_in(folder, kernel, tools or SimTools(kernel))
    if change_worker is None and Workers.paced:
        host = replace(host, kernel=PacedKernel(kernel), tools=PacedTools(host.tools))
        change_worker = _paced(clock)
    recorded = Record()

    def worker(name: str) -> SerialWorker:
        if name == "allocating" and allocating is not None:
            return allocating
        return InlineWorker() if change_worker is None or name in OWN_WORKERS else change_worker(name)

    options = NodeOptions(
        kernel=kernel,
        kubelet=KubeletPaths(folder / "kubelet"),
        terms=NodeTerms(
            settings or Settings(),
            ids,
            notice=(intervals or Intervals()).of_notice if writes_node_counts else None,
            review=ReviewTerms(expected=awaits_controller),
            vgpus_only=vgpus_only,
            request=RequestTerms(in_cluster=True, follows_spec=watches_gpu_node),
        ),
        clock=clock,
        intervals=intervals or Intervals(),
        workers=worker,
        ledger=folder / "ledger.json",
        gates=plugin_gates(host.device_plugins) if plugin_only else host.locks,
        state_file=folder / "node.json",
        cdi_folder=folder / "cdi",
        desired_state=folder / "desired.json",
        node_name=NodeName("node01"),
        plugin_only=plugin_only,
        change_host=host if not plugin_only else None,
        tools=host.tools if not plugin_only else None,
    )
    who = AgentView(version="test", pid=1, started=BEGINNING, plugin_only=False)
    agent = Agent(options, KubeletRecord(recorded.read, pod_starts=recorded.pod_starts), who, shares)
    failure: Exception | None = None
    async with asyncio.TaskGroup() as group:
        running = group.create_task(agent.run())
        await clock.settle()
        try:
            yield SimNode(kernel, clock, agent, recorded)
        except Exception as error:  # noqa: BLE001  raised again below, without the group around it
            failure = error
        running.cancel()
    if failure is not None:
        raise failure


@asynccontextmanager
async def sharing_node(
    kernel: SimKernel, folder: Path, settings: Settings, shares: NodeShares | None = None
) -> AsyncIterator[SimNode]:
    """Run an agent whose node has no label with the enforcement of shares, which it has observed."""
    async with running_node(kernel, folder, settings, shares=shares) as node:
        node.agent.observations.take_request(NodeRequest(enforcement=Observed(None)))
        await node.settle()
        yield node
