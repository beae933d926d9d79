"""A scenario: a host, its desired state, and the actions of each actor."""

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

import msgspec

from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest
from gpuvirt.model.desired.settings import Settings
from gpuvirt_sim.hostspec import HostSpec
from tests.explore.intervals import INTERVALS
from tests.explore.reduction import ALL, Touches

if TYPE_CHECKING:
    from tests.explore.world import World


class Program(Enum):
    """The agent of a scenario."""

    NODE = "gpuvirt node"
    PLUGIN_ONLY = "gpuvirt node --plugin-only"
    WITHOUT_GATES = "gpuvirt node --plugin-only, which may not write its gates, or of an older version"

    VGPUS_ONLY = "nvidia-k8s-vgpu-dm, whose vGPUs the device plugin of another operator offers"

    @property
    def is_unprivileged(self) -> bool:
        """Whether the agent has the kubelet's folder alone."""
        return self in {Program.PLUGIN_ONLY, Program.WITHOUT_GATES}


class Action:
    """An action of an actor; the names of its class and fields describe it."""

    touches: ClassVar[Touches] = frozenset({ALL})
    """The state that the action touches."""
    is_by_hand: ClassVar[bool] = False
    """Whether the action takes a device without the kubelet, and so possibly during an allocation."""
    loses_power: ClassVar[bool] = False
    """Whether the host loses all writes without a sync."""

    def enabled(self, world: "World") -> bool:
        """Return whether the action is possible now."""
        del world
        return True

    def act(self, world: "World") -> None:
        """Carry out the action."""
        raise NotImplementedError


class Scenario(msgspec.Struct, frozen=True):
    """The input of a schedule: a host, its first desired state, and the actions of each actor in their order."""

    host: HostSpec
    spec: GpuNodeSpec
    actors: tuple[tuple[Action, ...], ...]
    first: tuple[Action, ...] = ()
    """Earlier actions, without a choice of the schedule."""
    settings: Settings = msgspec.field(default_factory=Settings)
    request: NodeRequest = msgspec.field(default_factory=NodeRequest)
    """The vGPU configs of the cluster."""
    vgpus: Mapping[str, Mapping[str, int]] = msgspec.field(default_factory=dict)
    """The number of vGPUs of each type that each config creates on the host."""
    judges_desired: bool = False
    """Whether each destructive step must lead to the desired state: no step fails or times out."""
    judges_count: bool = False
    """Whether the kubelet must not count a device any more when a destructive step begins."""
    begin_s: float = 3.0
    """How long the agent runs before the actors begin."""
    intervals: Intervals = INTERVALS
    program: Program = Program.NODE
    shares: bool = False
    """Whether the agent can share GPUs."""
    whole: bool = False
    """Whether each operation of the kernel is a point, and each ready handle may be the next."""
    job_ends: bool = False
    """Whether the end of each job of a serial worker is a point."""

    @property
    def loses_power(self) -> bool:
        """Whether the host may lose its power."""
        return any(action.loses_power for actions in (self.first, *self.actors) for action in actions)
