"""The device plugin of another operator, which offers the vGPUs that `nvidia-k8s-vgpu-dm` creates.

It lists the vGPUs that exist when it starts, has no gates, and is stopped by a label of the node: first the label, then
its pod goes. The agent observes both later.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.kube.labels import AGENT, deploy_label
from gpuvirt.model.desired.observed import OperandsObserved
from tests.explore.agenda import Option
from tests.explore.agents import Running
from tests.explore.scenario import Action

if TYPE_CHECKING:
    from tests.explore.world import World

LABEL, POD = deploy_label(AGENT), "gpu-operator/nvidia-sandbox-device-plugin-daemonset-7xk2q"


class NeighbourPlugin:
    """The plugin of one node, with its label."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.is_selected = True
        """Whether the node's label selects the node for the plugin."""
        self.runs = False
        self._observed: dict[str, OperandsObserved] = {}
        """The last observation of each agent."""

    @property
    def _state(self) -> OperandsObserved:
        return OperandsObserved((LABEL,) if self.is_selected else (), (POD,) if self.runs else ())

    def possible_events(self) -> Iterator[Option]:
        """Yield what happens to the plugin by itself, and what the agent observes of it."""
        running = self._world.agents.running
        if running is not None and running.agent.observations.operands_away.get() is self.is_selected:
            yield Option("the label of the other plugin follows", self._follow, "label")
        if not self.is_selected and self.runs:
            yield Option("the other plugin ends", self.end, "plugin")
        if self.is_selected and not self.runs and self._world.kubelet.up:
            yield Option("the other plugin starts", self._start, "plugin")
        if running is not None and self._observed.get(running.process.name) != self._state:
            yield Option("the agent observes the other plugin", lambda: self._deliver(running), "observes the plugin")

    def end(self) -> None:
        """End the plugin's pod: the kubelet then has no list of it."""
        self.runs = False
        self._world.kubelet.take_lists({})

    def _follow(self) -> None:
        self.is_selected = not self.is_selected

    def _start(self) -> None:
        self.runs = True
        lists: defaultdict[ResourceName, dict[DeviceId, bool]] = defaultdict(dict)
        for carrier in self._world.kernel.vfs.carriers.values():
            for vgpu, (spec, _) in sorted(carrier.vgpu_host.live.items()):
                lists[ResourceName(f"nvidia.com/{spec.name.replace(' ', '_')}")][DeviceId(vgpu)] = True
        self._world.kubelet.take_lists(lists)

    def _deliver(self, running: Running) -> None:
        self._observed[running.process.name] = self._state
        running.loop.call_soon(running.agent.observations.observe_operands, self._state)


@dataclass(frozen=True)
class AdmitByNeighbour(Action):
    """The kubelet admits a pod with a vGPU that the other plugin lists, which gives it at once."""

    pod: str

    @override
    def enabled(self, world: "World") -> bool:
        found = world.neighbour
        return found is not None and found.runs and not world.kubelet.is_admitting and any(world.kubelet.free())

    @override
    def act(self, world: "World") -> None:
        key = next(world.kubelet.free())
        pod = world.kubelet.begin(self.pod, (key,))
        mdev = world.kernel.mdev.devices.get(str(key[1]))
        pod.answered, pod.groups = True, frozenset({int(mdev.group)} if mdev is not None else ())
        world.kubelet.take_answer(pod)


@dataclass(frozen=True)
class RestartNeighbour(Action):
    """The pod of the other plugin is deleted; its DaemonSet starts it again where the label selects the node."""

    @override
    def enabled(self, world: "World") -> bool:
        return world.neighbour is not None and world.neighbour.runs

    @override
    def act(self, world: "World") -> None:
        assert world.neighbour is not None
        world.neighbour.end()
