"""An evening on a host with libvirt: the controller's rounds with the real connection, and `gpuvirt schedule check`."""

import asyncio
import base64
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from lab.libvirt.host import LibvirtHost
from typing_extensions import override

from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import Namespace
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.kinds.vgpuschedule import HypervisorSpec, SecretPlace, SecretRef, Spec, VgpuSchedule
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.workers.connection import HypervisorCredentials
from gpuvirt.model.workers.hypervisor import Hypervisor, Power
from gpuvirt_schedules.commands.schedulequestions import ScheduleQuestions
from gpuvirt_schedules.controller.rounds import Rounds
from gpuvirt_schedules.controller.scheduleapi import ScheduleObjects
from gpuvirt_schedules.controller.secretconnection import Opener
from gpuvirt_schedules.controller.vmcalls import VmCalls
from gpuvirt_schedules.hypervisors.connection import open_hypervisor
from tests.hypervisors.libvirthost import Server
from tests.hypervisors.libvirthost import server as running_server
from tests.kube.scriptedapi import scripted
from tests.schedules.scheduleday import SCHEDULE, SPEC, Day, uuid
from tests.schedules.servedcommands import answering
from tests.schedules.servedschedule import LEASES
from tests.web.certificates import Authority, Pair

pytestmark = pytest.mark.ring("libvirt")
SECRET = "/api/v1/namespaces/gpuvirt/secrets/host"  # noqa: S105  a path
NAMES = {1: "worker-1", 2: "worker-2", 5: "worker-5"}
"""The first two run by day, the last one by night."""


class LibvirtDay(Day):
    """A cluster whose workers are VMs of a host; the kubelets of those that run renew their Leases."""

    def __init__(self, host: LibvirtHost, credentials: HypervisorCredentials) -> None:
        super().__init__((1, 2))
        self._host = host
        for number, name in NAMES.items():
            host.define(name, UUID(uuid(number)))
            host.virsh("start", name)
        host.virsh("managedsave", NAMES[5])
        self.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": {**SPEC, "hypervisor": _LIBVIRT}})
        self.put_secret(credentials)

    def put_secret(self, given: HypervisorCredentials) -> None:
        values = {"server": given.server, "ca": given.ca, "certificate": given.certificate, "key": given.key}
        data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
        self.served.put(SECRET, {"type": "Opaque", "data": data})

    def states(self) -> dict[str, str]:
        return {name: self._host.virsh("domstate", name) for name in NAMES.values()}

    @override
    async def sleep(self, seconds: float, /) -> None:
        await asyncio.sleep(0)  # noqa: TID251  other tasks have their turns
        self.now_s += max(seconds, 0.1)
        for name, state in self.states().items():
            if state == "running":
                self.served.put(f"{LEASES}/{name}", {"spec": {"renewTime": f"{self.now():%Y-%m-%dT%H:%M:%S.%fZ}"}})
                self.set_ready(name)


_LIBVIRT = {"libvirt": {"secretRef": {"name": "host"}}}
_SCHEDULE = VgpuSchedule(
    Metadata("gpus", "gpuvirt"),
    Spec(hypervisor=HypervisorSpec(libvirt=SecretPlace(secret_ref=SecretRef(name="host")))),
)


@pytest.fixture(name="host")
def _host(short_path: Path, authority: Authority) -> Iterator[Server]:
    with running_server(short_path, authority) as running:
        yield running


@asynccontextmanager
async def clients(day: LibvirtDay, server: Pair, ca: Path) -> AsyncIterator[Client]:
    async with scripted(answering(day.served), server, ca) as api:
        client = Client(Credentials("127.0.0.1", api.port, "gpuvirt", ca=ca, token=b"x"))
        yield client
        client.close()


async def test_workers_are_saved_and_another_one_is_resumed(host: Server, authority: Authority, server: Pair) -> None:
    day = LibvirtDay(host.host, host.credentials)
    async with clients(day, server, authority.certificate) as client:
        opener = Opener(client, "gpuvirt", RealClock(), open_hypervisor, lambda: math.inf)

        async def connect() -> Hypervisor:
            return opener.connect(lambda: _SCHEDULE)

        calls = VmCalls(connect, day, lambda: True, 0.0)
        await Rounds(ScheduleObjects(client, "gpuvirt", "gpus", day), calls, day).run()
        await calls.close()
    assert day.states() == {"worker-1": "shut off", "worker-2": "shut off", "worker-5": "running"}
    assert day.conditions()["Ready"] == ("True", "PhaseReached")
    saved = host.host.virsh("list", "--all", "--managed-save")
    found = {tuple(line.split()[-2:]) for line in saved.splitlines() if "worker-" in line}
    assert found == {("worker-1", "saved"), ("worker-2", "saved"), ("worker-5", "running")}


async def test_a_check_asks_the_host(host: Server, authority: Authority, server: Pair) -> None:
    day = LibvirtDay(host.host, host.credentials)
    async with clients(day, server, authority.certificate) as client:
        questions = ScheduleQuestions(client, Namespace("gpuvirt"), day)
        check = await questions.check("gpus")
        assert check.holds
        found = {str(worker.node): worker for worker in check.workers}
        assert found["worker-1"].power is Power.ON
        assert found["worker-1"].suspend is not None
        assert found["worker-1"].suspend.is_possible is True
        assert found["worker-5"].power is Power.SUSPENDED
        assert (await questions.detail("gpus")).hypervisor == "libvirt host"
        assert day.states()["worker-1"] == "running"
        day.put_secret(replace(host.credentials, ca="no CA"))
        lost = await questions.check("gpus")
        assert not lost.holds
        assert lost.hypervisor is not None
        assert lost.hypervisor.code == "HypervisorNotTrusted"
    assert day.served.writes == []
