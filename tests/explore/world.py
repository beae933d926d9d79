"""The world of one schedule: a simulated host with its disk and kubelet, the agents, and the actors."""

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from gpuvirt.agent.known.requests import AllocationRefusedError, AllocationRequest
from gpuvirt.agent.kubelet import wire
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.desired.observed import NodeRequest, Observed
from gpuvirt.model.offers.view import NodeView, Registration
from gpuvirt.paths import KubeletPaths
from gpuvirt_sim import kernel as sim
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.clock import SimClock
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.explore.agenda import Option, PossibleEvents
from tests.explore.agents import Agents, Running
from tests.explore.blocking import ScheduledBlocking
from tests.explore.claims import ClaimKubelet
from tests.explore.disk import Disk
from tests.explore.kubelet import Key, Kubelet
from tests.explore.neighbourplugin import NeighbourPlugin
from tests.explore.observer import Observer
from tests.explore.ondemand import OnDemandKubelet
from tests.explore.readmission import Readmission, groups_behind
from tests.explore.reduction import DESIRED, KERNEL
from tests.explore.scenario import Action, Program, Scenario
from tests.explore.scheduler import KilledError, Process, Scheduler
from tests.explore.sharing import ShareKubelet
from tests.explore.strategies import Strategy

Lists = Mapping[ResourceName, Mapping[DeviceId, bool]]


class World:
    """The world of one schedule."""

    def __init__(self, scenario: Scenario, strategy: Strategy, folder: Path, *, traced: bool = False) -> None:
        self.scenario = scenario
        self.clock = SimClock()
        self.scheduler = Scheduler(strategy, self.possible_events, traced=traced)
        self.disk = Disk(folder, self.scheduler, may_lose_power=scenario.loses_power)
        self.spec = scenario.spec
        self.desired_generation = 0
        """How often the cluster's desired state has changed."""
        self.boots = 1
        self.horizon_s = self.patience_s = 0.0
        """The times until which time may pass: at any step, and if no other event is possible."""
        self.actors = [deque(actions) for actions in scenario.actors]
        self.agents = Agents(self)
        self.shares = ShareKubelet(self)
        self.on_demand = OnDemandKubelet(self)
        self.claims = ClaimKubelet(self)
        self.readmission = Readmission(self)
        self.neighbour = NeighbourPlugin(self) if scenario.program is Program.VGPUS_ONLY else None
        self.kernel: SimKernel
        self.tools: SimTools
        self.kubelet: Kubelet
        self.observer: Observer
        self.processes: dict[str, sim.Process] = {}
        """The processes that actors have started, by the actors' names for them."""
        self.is_at_rest = False
        """Whether all actors have acted, and nothing is held back any more."""
        self.refusing: str | None = None
        """The driver that refuses to bind."""
        self.by_hand_at = -1
        """The step at which an actor last took a device without the kubelet."""
        self.pulled: set[str] = set()
        """The GPUs that were unplugged, in use or not, and the vGPUs that were removed by hand."""
        self._resent = False
        """Whether the agent has sent its lists again."""
        self._listed: tuple[NodeView, Lists] | None = None
        """The device lists of the agent's view."""
        self.vgpu_ids: dict[str, frozenset[str]] = {}
        """The ids of the vGPUs when each config was first reached."""

    def _boot(self) -> None:
        kernel = self.kernel = build_host(self.scenario.host)
        blocking = ScheduledBlocking(self.scheduler)
        vars(kernel.blocking).update(vars(blocking), until=blocking.until)
        for _ in range(self.boots - 1):
            kernel.reboot_id()
        kernel.start_process("kubelet")
        self.tools = SimTools(kernel)

    def open(self) -> None:
        """Start the host, the kubelet and the agent, after the world's seams are installed."""
        self._boot()
        self.kubelet = Kubelet(KubeletPaths(self.disk.folder / "kubelet"), self.disk.keep, self.clock.monotonic_s)
        self.observer = Observer(
            self._observed,
            self.kubelet,
            self.scheduler,
            self._desired_by,
            judges_count=self.scenario.judges_count,
        )
        self.agents.start()

    def _observed(self) -> SimKernel:
        self.scheduler.touch(KERNEL)
        return self.kernel

    def _desired_by(self, process: Process) -> str | None:
        if not self.scenario.judges_desired:
            return None
        running = next((agent for agent in self.agents.all if agent.process is process), None)
        return running.mode if running is not None and running.loop.rests > running.mode_at else None

    def reboot(self) -> None:
        """Stop the host and boot it again: the disk has only synced writes, and all devices are reset."""
        self.agents.end_older()
        self.agents.end()
        self.kubelet.stop()
        self.disk.lose_power()
        self.boots += 1
        self._boot()
        self.observer.reboot()
        self.on_demand.reboot()
        self.claims.reboot()
        self.readmission.reboot()

    def close(self) -> None:
        """End all that still runs."""
        self.scheduler.stop()
        self.disk.mend()
        self.agents.close()

    @property
    def is_dying(self) -> bool:
        """Whether a killed agent still has a pending answer, or a write that the kernel blocks."""
        taking = (pod.answered and not (pod.known or pod.waits or pod.taken) for pod in self.kubelet.pods.values())
        return self.agents.are_dying or any(taking)

    # --- pods

    def admit(self, name: str, keys: tuple[Key, ...], *containers: str) -> None:
        """Have the kubelet call the agent's Allocate for a pod: for one container, or one after another for several."""
        running, kubelet = self.agents.serving or self.agents.running, self.kubelet
        if running is None:
            return
        pod = kubelet.begin(name, keys, *containers)
        reached_at = 0

        async def ask() -> None:
            ids = [DeviceId(device) for _, device in keys]
            try:
                (answer,) = await running.agent.allocators.allocate(AllocationRequest(keys[0][0], [ids]))
            except AllocationRefusedError as error:
                self.scheduler.add_line(f"  {name} is refused: {error}")
                kubelet.reject(pod)
                return
            if not kubelet.awaits(pod):
                self.scheduler.add_line(f"  nobody takes the answer for {name}")
                return
            pod.answered_s = self.clock.monotonic_s()
            pod.answered, pod.waits, pod.nodes = True, False, tuple(answer.device_nodes)
            pod.groups = groups_behind(self.kernel, pod.nodes)
            pod.answer = wire.allocate_response((answer,)).container_responses[0].SerializeToString()
            self.scheduler.add_line(f"  {name} is given {', '.join(ids)}")
            self.on_demand.take_answer(pod, answer)
            self.observer.given(pod, disturbed=self.by_hand_at >= reached_at)

        async def ask_unless_killed() -> None:
            try:
                await ask()
            except (KilledError, asyncio.CancelledError):
                if pod.waits or not pod.answered:
                    kubelet.reject(pod)

        def reach() -> None:
            nonlocal reached_at
            pod.asked, reached_at = None, len(self.scheduler.choices)
            running.ask(ask_unless_killed, lambda: kubelet.reject(pod))

        def ask_soon() -> None:
            pod.asked = reach

        pod.ask = ask_soon
        pod.ask()

    # --- events

    def possible_events(self) -> PossibleEvents:
        """Return the possible events other than strands that continue."""
        soon: list[Option] = []
        running, kubelet = self.agents.running, self.kubelet
        for agent in self.agents.all:
            if agent.observed != self.desired_generation:
                observe = partial(self._observe, agent)
                soon.append(
                    Option(f"{agent.process.name} observes the desired state", observe, ("desired", agent.process))
                )
        if running is not None and kubelet.up and not kubelet.is_silent and self._lists() != kubelet.lists:
            soon.append(Option("the kubelet takes the agent's lists", self._list, "lists"))
        elif self._resent and kubelet.up and kubelet.lists and not kubelet.is_silent and kubelet.is_waiting:
            soon.append(Option("the kubelet takes a list again", self._take_resent, "lists"))
        soon += kubelet.possible_events()
        soon += self.shares.possible_events()
        soon += self.readmission.possible_events()
        soon += self.on_demand.possible_events()
        soon += self.claims.possible_events()
        soon += self.on_demand.ending.possible_events()
        soon += self.neighbour.possible_events() if self.neighbour is not None else ()
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
        """Let time pass until the actors can act, or else until the begun operations have ended."""
        self.horizon_s = self.clock.monotonic_s() + ECHO_S
        self.patience_s = self.clock.monotonic_s() + WAIT_S if any(self.actors) else 0.0

    def _observe(self, running: Running) -> None:
        running.observed = self.desired_generation
        running.loop.call_soon(self._deliver, running)

    def _deliver(self, running: Running) -> None:
        """Deliver the present desired state: a later change is never followed by an earlier one."""
        self.scheduler.touch(DESIRED)
        running.mode, running.mode_at = self.spec.mode, running.loop.rests
        no_label: Observed[str] = Observed(None)
        spec = NodeRequest(spec=Observed(self.spec), enforcement=no_label)
        request = spec if self.neighbour is None else NodeRequest(Observed(self.spec.vgpu_config), enforcement=no_label)
        running.agent.observations.take_request(request.updated(self.scenario.request))

    def _lists(self) -> Lists:
        view, running = self.agents.view, self.agents.running
        if view is None or running is None or not view.host_observed or self.neighbour is not None:
            return self.kubelet.lists
        if running.sharing is not None:
            units = {running.sharing.shares.resource: running.sharing.units()}
            return {**self._devices(view), **units}
        return self._devices(view)

    def _devices(self, view: NodeView) -> Lists:
        if self._listed is None or self._listed[0] is not view:
            lists = {
                resource.name: {device.id: device.healthy for device in resource.devices}
                for resource in view.resources
                if resource.devices
            }
            self._listed = view, lists
        return self._listed[1]

    def resend(self) -> None:
        """Have the kubelet write its checkpoint, as each list does that a plugin sends again.

        Before the rest it does so at any later moment, or never: that is the slowest kubelet.
        """
        self._resent = True
        if self.is_at_rest and self.kubelet.up:
            self._take_resent()

    def _take_resent(self) -> None:
        self._resent = False
        self.kubelet.take_lists(self.kubelet.lists)

    def _list(self) -> None:
        running = self.agents.running
        if running is None:
            return
        lists = self._lists()
        for name in [device_list for device_list in lists if device_list not in self.kubelet.lists]:
            running.loop.call_soon(running.agent.reports.registration, name, Registration(registered=True))
        self.agents.serving = running
        self.kubelet.take_lists(lists)


WAIT_S = 100.0
"""How long an actor waits until its action is possible, before the schedule ends."""
ECHO_S = 7.0
"""How long the time after the last action is explored: longer than the pause before a first retry."""
