"""Shares in exploration: the agent's part for units, pods that request them, and what their containers see."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from gpuvirt.agent.agent import Agent
from gpuvirt.agent.known.requests import AllocationRefusedError, AllocationRequest
from gpuvirt.agent.kubelet import wire
from gpuvirt.agent.kubelet.units import RecordedUnits
from gpuvirt.agent.shares.nodeshares import NodeShares, stored_shares
from gpuvirt.agent.shares.shareallocator import Accounts, Dependencies, ShareAllocator
from gpuvirt.agent.shares.sharefiles import SpecFiles
from gpuvirt.facts.ids import DeviceId, PodUid
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.usage.podprocesses import read_running_pods
from gpuvirt.loops.serialworker import SerialWorker
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.shares.demand import ContainerDemand, ContainerKind, ContainerName, Demand, Units
from gpuvirt.model.shares.node.choice import PodOnNode
from gpuvirt.model.shares.node.records import unit_ids
from gpuvirt_sim.devices.nvidia import gpu_uuid
from tests.explore.agenda import Option
from tests.explore.kubelet import Key, Pod
from tests.explore.scheduler import KilledError

if TYPE_CHECKING:
    from tests.explore.agents import Running
    from tests.explore.world import World

MAIN = ContainerName("main")
SPECS_S = 5.0


@dataclass(frozen=True)
class Sharing:
    """The shares of one agent."""

    shares: NodeShares
    allocator: ShareAllocator
    accounts: Accounts

    def units(self) -> Mapping[DeviceId, bool]:
        """Return the units that the agent lists, all healthy."""
        capacity = self.shares.state.get().node.capacity
        recorded = self.accounts.recorded()
        taken = [allocation.ids for allocation in recorded] if not isinstance(recorded, Unknown) else []
        count = sum(capacity.values()) + self.shares.records.used_beside(capacity)
        return dict.fromkeys(unit_ids(count, frozenset().union(*taken)), True)


def open_shares(world: "World", name: str, worker: Callable[[str], SerialWorker]) -> NodeShares:
    """Return the shares of an agent that starts; NVIDIA's CDI spec names all GPUs of the host."""
    cdi = world.disk.volatile / "cdi"
    cdi.mkdir(exist_ok=True)
    gpus = sorted(gpu_uuid(address) for address in world.kernel.pci.functions)
    edits = [{"name": gpu, "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}} for gpu in gpus]
    spec = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": edits, "containerEdits": {}}
    (cdi / "nvidia.json").write_text(json.dumps(spec))
    path = world.disk.folder / f"state/shares of {name}.json"
    shares = stored_shares(path, SpecFiles(cdi, (cdi,)), worker("shares.json"), world.scenario.settings.shares)
    shares.observe_node("containerd://2.1.3")
    shares.pods.observe(world.shares.reported())
    return shares


def sharing_of(world: "World", agent: Agent, kernel: Kernel, worker: SerialWorker) -> Sharing | None:
    """Return the part for units of an agent that can share GPUs."""
    if (shares := agent.shares) is None:
        return None
    recorded = RecordedUnits(world.kubelet.paths, shares.resource)
    accounts = Accounts(recorded.read, lambda pods: read_running_pods(kernel, pods))
    dependencies = Dependencies(shares, world.clock, worker, accounts, agent.gpu_claims, agent.decide)
    return Sharing(shares, ShareAllocator(dependencies), accounts)


async def run_shares(world: "World", sharing: Sharing) -> None:
    """Run the loops of an agent's shares; the kubelet writes its record when the agent has it do so."""

    async def renew() -> None:
        while True:
            await sharing.accounts.outdated.wait()
            if world.kubelet.up:
                world.kubelet.write()

    async with asyncio.TaskGroup() as group:
        group.create_task(sharing.allocator.run())
        group.create_task(sharing.allocator.judge(SPECS_S))
        group.create_task(renew())


def on_node(pod: Pod) -> PodOnNode:
    """Return a pod as the API server reports it."""
    demand = Demand((ContainerDemand(MAIN, ContainerKind.APP, Units(len(pod.keys))),))
    return PodOnNode(PodUid(pod.uid), "default", pod.name, demand)


class ShareKubelet:
    """The kubelet's calls for pods with units, and the API server's pods."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.pods: dict[str, Pod] = {}
        """The pods that the API server has."""

    def reported(self) -> Mapping[PodUid, PodOnNode]:
        """Return the pods as the API server reports them."""
        return {PodUid(pod.uid): on_node(pod) for pod in self.pods.values()}

    def report(self) -> None:
        """Report the pods to each agent."""
        for running in self._world.agents.all:
            if running.sharing is not None:
                running.loop.call_soon(running.sharing.shares.pods.observe, self.reported())

    def admit(self, name: str, keys: tuple[Key, ...]) -> None:
        """Have the kubelet call Allocate for a pod with units, and PreStartContainer after the record."""
        world = self._world
        running = world.agents.serving or world.agents.running
        if running is None or running.sharing is None:
            return
        pod, allocator = world.kubelet.begin(name, keys), running.sharing.allocator
        self.pods[name] = pod
        self.report()

        async def ask() -> None:
            try:
                (answer,) = await allocator.allocate(AllocationRequest(keys[0][0], [[device for _, device in keys]]))
            except (AllocationRefusedError, KilledError, asyncio.CancelledError) as error:
                world.scheduler.add_line(f"  {name} is refused: {error}")
                world.kubelet.reject(pod)
                self.forget(name)
                return
            if not world.kubelet.awaits(pod):
                return
            pod.answered_s = world.clock.monotonic_s()
            pod.answer = wire.allocate_response((answer,)).container_responses[0].SerializeToString()
            pod.answered = pod.may_start = True
            world.scheduler.add_line(f"  {name} has {len(keys)} units")

        def reach() -> None:
            pod.asked = None
            self._asking = running.loop.create_task(ask())

        pod.asked = reach

    def forget(self, name: str) -> None:
        """Remove a pod from the API server."""
        self.pods.pop(name, None)
        self.report()

    def possible_events(self) -> Iterator[Option]:
        """Yield the starts of containers whose units the kubelet has recorded."""
        serving, kubelet = self._world.agents.serving, self._world.kubelet
        if serving is None or serving.sharing is None or not kubelet.up:
            return
        for pod in kubelet.pods.values():
            if pod.known and pod.may_start and not pod.vgpus and not (pod.deleted or pod.ended):
                start = partial(self._start, pod, serving)
                yield Option(f"the kubelet starts {pod.name}", start, ("start", pod.name))

    def _start(self, pod: Pod, running: "Running") -> None:
        assert running.sharing is not None
        pod.may_start = False
        self._starting = running.loop.create_task(self._call(pod, running.sharing))

    async def _call(self, pod: Pod, sharing: Sharing) -> None:
        world = self._world
        try:
            await sharing.allocator.pre_start(pod.keys[0][0], [device for _, device in pod.keys])
        except (AllocationRefusedError, KilledError, asyncio.CancelledError) as error:
            world.scheduler.add_line(f"  {pod.name} does not start: {error}")
            return
        used = sharing.shares.store.records.get().pods[PodUid(pod.uid)].placement.used
        # A GPU may have been unplugged since the call: the observer says so.
        functions = (*world.kernel.pci.functions, *world.kernel.pci.removed)
        gpus = {gpu_uuid(address): address for address in functions}
        pod.functions = frozenset(gpus[gpu] for gpu in used)
        world.processes[pod.name] = world.kernel.start_process("train", pod=pod.uid)
        world.scheduler.add_line(f"  {pod.name} starts with {', '.join(pod.functions)}")
        world.observer.given_share(pod)
