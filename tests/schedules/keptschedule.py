"""The controller's task for schedules beside a day's API server, and the connections that it opens."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.model.workers.hypervisor import Hypervisor
from gpuvirt_schedules.controller.keeper import ScheduleKeeper
from gpuvirt_schedules.controller.secretconnection import FindSchedule
from tests.agent.kubelet.kubeletnode import until
from tests.kube.scriptedapi import scripted
from tests.schedules.modelhypervisor import Connection, Fault
from tests.schedules.scheduleday import SCHEDULE, Day
from tests.web.certificates import Pair


class Opened:
    """The connections that were opened."""

    def __init__(self, day: Day) -> None:
        self.keeper: ScheduleKeeper | None = None
        self.connections: list[Connection] = []
        self._day = day

    def __call__(self, schedule: FindSchedule) -> Hypervisor:
        assert schedule() is not None
        self.connections.append(Connection(self._day.hypervisor, lambda: True, self._before))
        return self.connections[-1]

    async def _before(self, what: str) -> Fault:
        assert what
        return Fault.NONE


@asynccontextmanager
async def keeping(day: Day, server: Pair, ca: Path, namespace: str = "gpuvirt") -> AsyncIterator[Opened]:
    opened = Opened(day)
    async with scripted(day.served.answer, server, ca) as api:
        client = Client(Credentials("127.0.0.1", api.port, "gpuvirt", ca=ca, token=b"x"))
        keeper = opened.keeper = ScheduleKeeper(client, namespace, day, opened, lambda: True)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(keeper.run(Random(1)))
            yield opened
            task.cancel()
        client.close()


async def reached(day: Day, phase: str) -> None:
    """Return once the status says that a phase was reached."""
    await until(lambda: "status" in day.served.objects[SCHEDULE] and day.status().get("phase") == phase)
