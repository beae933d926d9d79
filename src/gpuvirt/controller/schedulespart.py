"""The part of the controller that runs VgpuSchedules: the distribution gpuvirt-schedules brings it.

It takes the controller's observations, so that no object is watched twice.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from random import Random
from typing import Protocol, cast

from gpuvirt.clock import Clock, Signal
from gpuvirt.controller.nodes.resolve import OwnedGpuNode, ScheduledConfigs
from gpuvirt.controller.picture import Picture
from gpuvirt.controller.store import AnyStore
from gpuvirt.distributions import SCHEDULES, load_part
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import Client
from gpuvirt.kube.kinds.core import ReadNode


class Follower(Protocol):
    """Receives the controller's observations; each method returns at once."""

    def observe_nodes(self, delta: Delta[ReadNode]) -> None:
        """Record changes of nodes."""
        ...

    def observe_gpu_nodes(self, delta: Delta[OwnedGpuNode]) -> None:
        """Record changes of GpuNodes."""
        ...

    def observe_picture(self, picture: Picture) -> None:
        """Record the observed state that decisions follow from."""
        ...


class ScheduledSource(Protocol):
    """The VgpuSchedules of one term as the leader."""

    def store(self, changed: Signal) -> AnyStore:
        """Return the store of the schedules, which the controller follows; it sets `changed`."""
        ...

    def at(self, now: datetime) -> ScheduledConfigs:
        """Return what the schedules that the store has say at a moment."""
        ...


class Schedules(Follower, Protocol):
    """The schedules of one term as the leader."""

    async def run(self, random: Random) -> None:
        """Run schedules until cancelled, which ends each connection to a hypervisor."""
        ...

    def metrics(self) -> Iterator[str]:
        """Yield the lines of the metrics."""
        ...


class SchedulesConstructor(Protocol):
    """The constructor of `Schedules`."""

    def __call__(
        self, leading: Client, namespace: str, clock: Clock, *, may_call_until_s: Callable[[], float]
    ) -> Schedules:
        """Writes of `leading` are sent with the lease alone; `may_call_until_s` is when it ends without a renewal."""
        ...


class SchedulesPart(Protocol):
    """The module that the distribution names."""

    @property
    def Schedules(self) -> SchedulesConstructor:  # noqa: N802  a class of the module
        """Make the schedules of a term that has just begun."""
        ...

    def scheduled_configs(self, namespace: str) -> ScheduledSource:
        """Return where a controller reads what the schedules of its namespace say of nodes' vGPU configs."""
        ...

    def unmark_workers(self, client: Client, clock: Clock) -> AsyncIterator[str]:
        """Remove the marks of schedules from nodes, and yield a line for each node; raises ApiError."""
        ...


def load_schedules() -> SchedulesPart:
    """Return the part; raises MissingPartError."""
    return cast("SchedulesPart", load_part("gpuvirt.parts", "schedules", SCHEDULES))
