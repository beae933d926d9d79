"""The questions of `gpuvirt schedule` to a day's API server and hypervisor, and the hypervisor's Secret."""

import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import Namespace
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.model.workers.connection import HypervisorCredentials, HypervisorKind
from gpuvirt.model.workers.hypervisor import Hypervisor
from gpuvirt_schedules.commands.schedulequestions import ScheduleQuestions
from tests.kube.scriptedapi import Call, Reply, scripted
from tests.schedules.modelhypervisor import Connection, Fault
from tests.schedules.scheduleday import Day
from tests.schedules.servedcommands import answering
from tests.web.certificates import Pair

VCENTER = "/api/v1/namespaces/gpuvirt/secrets/vcenter"
PASSWORD = "hunter2-of-the-vcenter"  # noqa: S105  of the model


def put_secret(day: Day, **without: str) -> None:
    values = {"server": "vcenter:443", "ca": "PEM", "user": "gpuvirt", "password": PASSWORD, **without}
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items() if value}
    day.served.put(VCENTER, {"type": "Opaque", "data": data})


@asynccontextmanager
async def asking(
    day: Day, server: Pair, ca: Path, answer: Callable[[Call], Reply] | None = None
) -> AsyncIterator[ScheduleQuestions]:
    """Yield the questions at 18:00 in Berlin, two hours before the night."""
    opened: list[Connection] = []

    async def before(what: str) -> Fault:
        assert what
        return Fault.NONE

    async def connect(
        kind: HypervisorKind, credentials: HypervisorCredentials, clock: Clock, may_call_until_s: Callable[[], float]
    ) -> Hypervisor:
        assert (kind, credentials.password, clock) == (HypervisorKind.VSPHERE, PASSWORD, day)
        assert may_call_until_s() == float("inf")
        opened.append(Connection(day.hypervisor, lambda: True, before))
        return opened[-1]

    day.now_s -= 7200.0
    async with scripted(answer or answering(day.served), server, ca) as api:
        client = Client(Credentials("127.0.0.1", api.port, "gpuvirt", ca=ca, token=b"x"))
        yield ScheduleQuestions(client, Namespace("gpuvirt"), day, connect)
        client.close()
    assert all(connection.dead_at_s is not None for connection in opened), "each connection is closed"
