"""The part of the controller that runs VgpuSchedules: the distribution gpuvirt-schedules brings it."""

from collections.abc import AsyncIterator, Callable, Iterator
from random import Random
from typing import Protocol, cast

from gpuvirt.clock import Clock
from gpuvirt.controller.follower import Follower
from gpuvirt.controller.scheduledsource import ScheduledSource
from gpuvirt.distributions import SCHEDULES, load_part
from gpuvirt.kube.client import Client


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
