"""The entry point of the controller: runs VgpuSchedules while it leads, and removes their marks at an uninstall."""

from collections.abc import Iterator
from random import Random

from gpuvirt.clock import Clock
from gpuvirt.controller.nodes.resolve import OwnedGpuNode
from gpuvirt.controller.picture import Picture
from gpuvirt.controller.schedulespart import ScheduledSource
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import Client
from gpuvirt.kube.kinds.core import ReadNode
from gpuvirt.model.workers.connection import MayCallUntil
from gpuvirt_schedules.controller.configurednodes import StoredConfigs
from gpuvirt_schedules.controller.keeper import ScheduleKeeper
from gpuvirt_schedules.controller.nodemarks import unmark_workers
from gpuvirt_schedules.controller.schedulemetrics import of_schedules
from gpuvirt_schedules.controller.secretconnection import Opener
from gpuvirt_schedules.hypervisors.connection import SharedHypervisors

__all__ = ["Schedules", "scheduled_configs", "unmark_workers"]


class Schedules:
    """The schedules of one term as the leader, which has just begun."""

    def __init__(self, leading: Client, namespace: str, clock: Clock, *, may_call_until_s: MayCallUntil) -> None:
        """Writes of `leading` are sent with the lease alone; `may_call_until_s` is when it ends without a renewal."""
        leading = leading.rereading(clock)
        opener = Opener(leading, namespace, clock, SharedHypervisors().open, may_call_until_s)
        self._keeper = ScheduleKeeper(
            leading, namespace, clock, opener.connect, lambda: clock.monotonic_s() < may_call_until_s()
        )

    async def run(self, random: Random) -> None:
        """Run schedules until cancelled, which ends each connection to a hypervisor."""
        await self._keeper.run(random)

    def observe_nodes(self, delta: Delta[ReadNode]) -> None:
        """Record changes of nodes, of which some are workers."""
        self._keeper.observe_nodes(delta)

    def observe_gpu_nodes(self, delta: Delta[OwnedGpuNode]) -> None:
        """Record changes of GpuNodes, whose vGPU configs may follow phases."""
        self._keeper.observe_gpu_nodes(delta)

    def observe_picture(self, picture: Picture) -> None:
        """Record the ClusterPolicy and the ConfigMaps, which name the vGPU configs of the cluster."""
        self._keeper.observe_picture(picture)

    def metrics(self) -> Iterator[str]:
        """Yield the lines of the metrics."""
        return of_schedules(self._keeper.schedules, self._keeper.telemetry)


def scheduled_configs(namespace: str) -> ScheduledSource:
    """Return where a controller reads what the schedules of its namespace say of nodes' vGPU configs."""
    return StoredConfigs(namespace)
