"""The world of one schedule: a simulated host with its disk and kubelet, the agent on it, and who acts on both."""

import asyncio
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpuvirt.facts.ids import DeviceId, NodeName, ResourceName
from gpuvirt.kubelet.accountwatch import AccountWatch
from gpuvirt.kubelet.recordedallocations import RecordedAllocations
from gpuvirt.model.desired.observed import NodeRequest, Observed
from gpuvirt.model.offers.view import AgentView, NodeView, Registration
from gpuvirt.node.agent import Agent
from gpuvirt.node.allocation.allocator import AllocationRefusedError, Request
from gpuvirt.node.change.gate.gate import gate_at
from gpuvirt.node.change.gate.gaterecord import Owner
from gpuvirt.node.change.site import Site as ChangeSite
from gpuvirt.node.site import Moving, Site
from gpuvirt.paths import KubeletPaths
from gpuvirt.sim import kernel as sim
from gpuvirt.sim.builder import build_host
from gpuvirt.sim.clock import BEGINNING, SimClock
from gpuvirt.sim.kernel import SimKernel
from gpuvirt.sim.tools import SimTools
from gpuvirt.tasks import keep_going
from tests.explore.agenda import Option, PossibleEvents
from tests.explore.blocking import ScheduledBlocking
from tests.explore.disk import Disk
from tests.explore.intervals import INTERVALS
from tests.explore.jobs import ExploredWorker
from tests.explore.kubelet import Key, Kubelet
from tests.explore.loop import ExploredLoop
from tests.explore.observer import Observer
from tests.explore.reduction import DESIRED, KERNEL
from tests.explore.scenario import Action, Scenario
from tests.explore.scheduler import KilledError, Process, Scheduler
from tests.explore.seam import ExploredKernel, ExploredTools
from tests.explore.strategies import Strategy
from tests.simnode import IDS

Lists = Mapping[ResourceName, Mapping[DeviceId, bool]]


@dataclass(eq=False)
class Running:
    """One run of the agent."""

    process: Process
    loop: ExploredLoop
    agent: Agent
    observed: int = -1
    """Which desired state of the cluster it has observed."""
    mode: str | None = None
    """What is desired by the last of them."""
    mode_at: int = 0
    """How often its event loop had come to rest when it heard that; it has concluded from it at the next rest."""
    main_task: asyncio.Task[None] | None = None


class World:
    """One schedule's."""

    def __init__(self, scenario: Scenario, strategy: Strategy, folder: Path, *, told: bool = False) -> None:
        self.scenario = scenario
        self.clock = SimClock()
        self.scheduler = Scheduler(strategy, self.possible_events, told=told)
        self.disk = Disk(folder, self.scheduler, may_lose_power=scenario.loses_power)
        self.spec = scenario.spec
        self.desired_by_gpu = 0
        """How often the cluster's desired state has changed."""
        self.boots = 1
        self.horizon_s = self.patience_s = 0.0
        """Until when time may pass by itself, and until when if nothing else can happen."""
        self.actors = [deque(actions) for actions in scenario.actors]
        self.running: Running | None = None
        self.older: Running | None = None
        """The agent that runs on beside the one that was started after it."""
        self.serving: Running | None = None
        """The agent whose devices the kubelet lists, and which it asks for them."""
        self.starts = 0
        self._dead: list[Process] = []
        self._owners: dict[Process, Owner] = {}
        """The processes that there were, as the gates know them."""
        self._gates: dict[Process, Path] = {}
        self._loops: list[ExploredLoop] = []
        self.kernel: SimKernel
        self.tools: SimTools
        self.kubelet: Kubelet
        self.observer: Observer
        self.processes: dict[str, sim.Process] = {}
        """The processes that actors have started, by what actors call them."""
        self.refusing: str | None = None
        """The driver that takes no function."""
        self.by_hand_at = -1
        """The step at which somebody last took a device without asking anybody."""
        self.pulled: set[str] = set()
        """The GPUs that were taken out of the host, in use or not."""
        self._listed: tuple[NodeView, Lists] | None = None
        """What the agent lists by its picture."""
        self.vgpu_ids: dict[str, frozenset[str]] = {}
        """The ids of the vGPUs when each config was reached first."""

    def _boot(self) -> None:
        kernel = self.kernel = build_host(self.scenario.host)
        blocking = ScheduledBlocking(self.scheduler)
        vars(kernel.blocking).update(vars(blocking), until=blocking.until)
        for _ in range(self.boots - 1):
            kernel.reboot_id()
        kernel.start_process("kubelet")
        self.tools = SimTools(kernel)

    def open(self) -> None:
        """Start the host, the kubelet and the agent, once the world's seams are in place."""
        self._boot()
        self.kubelet = Kubelet(KubeletPaths(self.disk.folder / "kubelet"), self.disk.keep)
        self.observer = Observer(self._observed, self.kubelet, self.scheduler, self._desired_by)
        self.start_agent()

    def _observed(self) -> SimKernel:
        self.scheduler.touch(KERNEL)
        return self.kernel

    def _desired_by(self, process: Process) -> str | None:
        if not self.scenario.judges_desired:
            return None
        running = next((one for one in self._agents() if one.process is process), None)
        return running.mode if running is not None and running.loop.rests > running.mode_at else None

    def _agents(self) -> Iterator[Running]:
        return (one for one in (self.running, self.older) if one is not None)

    def owner(self, process: Process) -> Owner:
        """Return a process as the gates know it."""
        return self._owners.setdefault(process, Owner(len(self._owners) + 1, 0))

    # --- the agent

    def seen_by(self, process: Process) -> tuple[ExploredKernel, ExploredTools]:
        """Return the kernel and the programs as a process has them."""
        kernel = ExploredKernel(lambda: self.kernel, self.scheduler, process, self.observer, whole=self.scenario.whole)
        return kernel, ExploredTools(lambda: self.tools, self.scheduler, process, self.observer)

    def host_of(self, process: Process) -> ChangeSite:
        """Return where a process changes drivers."""
        kernel, tools = self.seen_by(process)
        return ChangeSite(kernel, tools, self.disk.folder / "state/drivers.json", self._gates_of(process))

    def _gates_of(self, process: Process) -> Path:
        """Return the folder of the gates by a path that only this process uses: what it keeps in memory is its own."""
        folder = self.disk.volatile / "units"
        own = self.disk.volatile / f"units of process {self.owner(process).pid}"
        folder.mkdir(exist_ok=True)
        own.symlink_to(folder)
        self._gates[process] = own
        return own

    def start_beside(self) -> None:
        """Start an agent beside the one that runs: the kubelet asks it as soon as it has listed its devices.

        Its ledger is its own. Where both have one folder, the lock on it lets only one of them run.
        """
        self.older = self.running
        self.start_agent(ledger="state/ledger of another.json")

    def start_agent(self, ledger: str = "state/ledger.json") -> None:
        """Start the agent as a new process."""
        self.starts += 1
        process = Process(f"agent {self.starts}")
        loop = ExploredLoop(self.scheduler, process, self.clock, reorders=self.scenario.whole)
        self._loops.append(loop)
        host = self.host_of(process)

        def worker(name: str) -> ExploredWorker:
            return ExploredWorker(name, self.scheduler, process, loop)

        recorded = RecordedAllocations(self.kubelet.paths)
        site = Site(
            recorded=recorded.read,
            kernel=host.kernel,
            clock=self.clock,
            watching=worker("watching"),
            writing=worker("writing"),
            giving=worker("giving"),
            ledger=self.disk.folder / ledger,
            state_file=None,
            desired_by_gpu=(self.disk.folder / ledger).with_name(f"wishes.json beside {Path(ledger).name}"),
            node_name=NodeName("node01"),
            hears_spec=True,
            moving=Moving(host, worker),
        )
        who = AgentView(version="test", pid=1, started=BEGINNING, plugin_only=False)
        agent = Agent(site, self.scenario.settings, IDS, who, INTERVALS)
        kubelets = self.kubelet.pids
        account = AccountWatch(self.kubelet.paths, recorded, kubelets, self.clock, INTERVALS, lambda: None)

        async def live() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(agent.run())
                group.create_task(keep_going("holders", lambda: account.run(agent), self.clock))

        self.running = Running(process, loop, agent, main_task=loop.create_task(live()))

    def end_agent(self) -> None:
        """Kill the agent, the newer one where there are two."""
        if (running := self.running) is not None:
            self.running = self.older
            self.older = None
            self._end(running)

    def end_older(self) -> None:
        """Kill the older of two agents."""
        if (older := self.older) is not None:
            self.older = None
            self._end(older)

    def _end(self, running: Running) -> None:
        self._dead.append(running.process)
        self.scheduler.kill(running.process)
        close_drains(self._gates[running.process])
        if self.serving in {running, None}:
            self.serving = None
            self.kubelet.lose_plugins()

    def reboot(self) -> None:
        """Stop the host, and start it again: nothing is on disk that was not synced, and no device is as it was."""
        self.end_older()
        self.end_agent()
        self.kubelet.stop()
        self.disk.lose_power()
        self.boots += 1
        self._boot()

    def close(self) -> None:
        """End all that still runs."""
        self.scheduler.stop()
        for loop in self._loops:
            loop.close()
        for gates in self._gates.values():
            close_drains(gates)

    @property
    def is_dying(self) -> bool:
        """Whether something of a killed agent is still under way: an answer, or a write that the kernel blocks."""
        return any(pod.answered and not pod.known for pod in self.kubelet.pods.values()) or any(
            self.scheduler.has_strands(process) for process in self._dead
        )

    @property
    def view(self) -> NodeView | None:
        """What the agent shows, None where none runs."""
        return self.running.agent.views.get() if self.running is not None else None

    # --- pods

    def admit(self, name: str, keys: tuple[Key, ...]) -> None:
        """Have the kubelet ask the agent for a pod's devices."""
        running, kubelet = self.serving or self.running, self.kubelet
        if running is None:
            return
        pod = kubelet.begin(name, keys)
        reached_at = 0

        async def ask() -> None:
            ids = [DeviceId(device) for _, device in keys]
            try:
                (answer,) = await running.agent.allocator.allocate(Request(keys[0][0], [ids]))
            except AllocationRefusedError as error:
                self.scheduler.tell(f"  {name} is refused: {error}")
                kubelet.reject(pod)
                return
            pod.answered_s = self.clock.monotonic_s()
            pod.answered, pod.nodes = True, tuple(answer.device_nodes)
            pod.groups = frozenset(int(node.rpartition("/")[2]) for node in pod.nodes if node[-1:].isdigit())
            self.scheduler.tell(f"  {name} is given {', '.join(ids)}")
            self.observer.given(pod, disturbed=self.by_hand_at >= reached_at)

        async def ask_unless_killed() -> None:
            try:
                await ask()
            except (KilledError, asyncio.CancelledError):
                if not pod.answered:
                    kubelet.reject(pod)

        def reach() -> None:
            nonlocal reached_at
            pod.asked, reached_at = None, len(self.scheduler.choices)
            self._asking = running.loop.create_task(ask_unless_killed())

        pod.asked = reach

    # --- what happens

    def possible_events(self) -> PossibleEvents:
        """Return what can happen now besides strands that go on."""
        soon: list[Option] = []
        running, kubelet = self.running, self.kubelet
        for one in self._agents():
            if one.observed != self.desired_by_gpu:
                observe = partial(self._observe, one)
                soon.append(Option(f"{one.process.name} hears what is desired", observe, ("desired", one.process)))
        if running is not None and kubelet.up and self._lists() != kubelet.lists:
            soon.append(Option("the kubelet takes the agent's lists", self._list, "lists"))
        soon += kubelet.possible_events()
        next_s = self.clock.next_s
        if next_s is not None and next_s > min((pod.taken_by_s for pod in kubelet.pods.values()), default=next_s):
            next_s = None
        time = Option(f"time passes until {next_s:.2f} s", self.clock.ring_next) if next_s is not None else None
        return PossibleEvents(
            soon,
            time if next_s is not None and next_s <= self.horizon_s else None,
            tuple(self._acts()) if self.scheduler.exploring else (),
            time if next_s is not None and next_s <= self.patience_s else None,
        )

    def _acts(self) -> Iterator[Option]:
        for actions in self.actors:
            if actions and actions[0].enabled(self):
                yield Option(f"{actions[0]}", partial(self._act, actions), touches=actions[0].touches)

    def _act(self, actions: "deque[Action]") -> None:
        action = actions.popleft()
        if action.is_by_hand:
            self.by_hand_at = len(self.scheduler.choices)
        action.act(self)
        self.look_ahead()

    def look_ahead(self) -> None:
        """Let time pass for as long as actors may wait for what they need, or else until what was begun is over."""
        self.horizon_s = self.clock.monotonic_s() + ECHO_S
        self.patience_s = self.clock.monotonic_s() + WAIT_S if any(self.actors) else 0.0

    def _observe(self, running: Running) -> None:
        running.observed = self.desired_by_gpu
        running.loop.call_soon(self._deliver, running)

    def _deliver(self, running: Running) -> None:
        """Deliver what is desired by now: of two changes the later one is never overtaken."""
        self.scheduler.touch(DESIRED)
        running.mode, running.mode_at = self.spec.mode, running.loop.rests
        running.agent.take_request(NodeRequest(spec=Observed(self.spec)).updated(self.scenario.request))

    def _lists(self) -> Lists:
        view = self.view
        if view is None or not view.looked:
            return self.kubelet.lists
        if self._listed is None or self._listed[0] is not view:
            lists = {
                one.name: {device.id: device.healthy for device in one.devices} for one in view.resources if one.devices
            }
            self._listed = view, lists
        return self._listed[1]

    def _list(self) -> None:
        running = self.running
        if running is None:
            return
        lists = self._lists()
        for name in [one for one in lists if one not in self.kubelet.lists]:
            running.loop.call_soon(running.agent.observe_registration, name, Registration(registered=True))
        self.serving = running
        self.kubelet.take_lists(lists)


WAIT_S = 100.0
"""How long an actor waits for what it needs before the schedule is over."""
ECHO_S = 7.0
"""How long what follows the last action is explored: longer than the pause before a first retry."""


def close_drains(gates: Path) -> None:
    """Close the files by which a process that has ended drained slots, as the kernel does."""
    draining = gate_at(gates).draining
    while draining:
        os.close(draining.popitem()[1])
