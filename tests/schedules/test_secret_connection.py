"""The connection of a schedule follows its Secret."""

import math
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpuvirt.clock import Clock
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.kinds.vgpuschedule import HypervisorSpec, PhaseSpec, SecretPlace, SecretRef, Spec, VgpuSchedule
from gpuvirt.kube.labels import LabelSelector
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.reasons import with_code
from gpuvirt.model.workers.connection import HypervisorCredentials, HypervisorKind, MayCallUntil
from gpuvirt.model.workers.hypervisor import Action, Call, Hypervisor, Refused, VmKey, VmProof, VmsUnknown
from gpuvirt_schedules.controller.objects import schedule_of
from gpuvirt_schedules.controller.secretconnection import Opener
from tests.kube.scriptedapi import Call as Request
from tests.kube.scriptedapi import Reply, scripted
from tests.schedules.modelhypervisor import Connection, Fault
from tests.schedules.scheduleday import Day
from tests.schedules.servedschedule import SECRETS, Object
from tests.web.certificates import Authority, Pair

WHOLE = {"server": "vcenter.example", "ca": "PEM", "user": "gpuvirt", "password": "pass-4711\n"}
FORBIDDEN: Reply = 403, {"kind": "Status", "message": "secrets is forbidden", "code": 403}


def places(place: SecretPlace, kinds: Sequence[HypervisorKind]) -> HypervisorSpec:
    """Name each of these hypervisors by the same Secret."""
    return HypervisorSpec(
        vsphere=place if HypervisorKind.VSPHERE in kinds else None,
        libvirt=place if HypervisorKind.LIBVIRT in kinds else None,
    )


class Cluster:
    """A cluster with one schedule, its Secret, and connections that are opened by it."""

    def __init__(self) -> None:
        self.day = Day((1,))
        self.schedule: VgpuSchedule | None = self.naming("vcenter")
        self.is_forbidden = False
        self.opened: list[tuple[HypervisorCredentials, Connection]] = []
        self.kinds: list[HypervisorKind] = []

    def naming(self, secret: str, *kinds: HypervisorKind) -> VgpuSchedule:
        place = SecretPlace(secret_ref=SecretRef(name=secret))
        spec = places(place, kinds or (HypervisorKind.VSPHERE,))
        return VgpuSchedule(Metadata("gpus", "gpuvirt"), Spec(hypervisor=spec))

    def put(self, name: str = "vcenter", **values: str) -> None:
        data: Object = {key: b64encode(text.encode()).decode() for key, text in {**WHOLE, **values}.items()}
        self.day.served.put(f"{SECRETS}/{name}", {"data": data, "type": "Opaque"})

    def answer(self, call: Request) -> Reply:
        return FORBIDDEN if self.is_forbidden else self.day.served.answer(call)

    async def open(
        self, kind: HypervisorKind, credentials: HypervisorCredentials, clock: Clock, may_call_until_s: MayCallUntil
    ) -> Hypervisor:
        assert (clock, may_call_until_s()) == (self.day, math.inf)
        self.kinds.append(kind)

        async def before(what: str) -> Fault:
            assert what
            return Fault.NONE

        self.opened.append((credentials, Connection(self.day.hypervisor, lambda: True, before)))
        return self.opened[-1][1]

    @property
    def alive(self) -> list[str]:
        """The passwords of the connections that are not closed."""
        return [credentials.password for credentials, connection in self.opened if connection.dead_at_s is None]


@asynccontextmanager
async def connected(cluster: Cluster, server: Pair, ca: Path) -> AsyncIterator[Hypervisor]:
    async with scripted(cluster.answer, server, ca) as api:
        client = Client(Credentials("127.0.0.1", api.port, "gpuvirt", ca=ca, token=b"x"))
        connection = Opener(client, "gpuvirt", cluster.day, cluster.open, lambda: math.inf).connect(
            lambda: cluster.schedule
        )
        yield connection
        await connection.close()
        client.close()
    assert cluster.alive == []


async def is_known(connection: Hypervisor) -> bool:
    reading = await connection.read()
    return not isinstance(reading, VmsUnknown) and VmKey("key-1") in reading


async def unknown(connection: Hypervisor) -> str:
    reading = await connection.read()
    assert isinstance(reading, VmsUnknown)
    return with_code(reading.code, reading.text)


async def test_one_connection_serves_while_the_secret_is_the_same(authority: Authority, server: Pair) -> None:
    cluster = Cluster()
    cluster.put()
    async with connected(cluster, server, authority.certificate) as connection:
        for _ in range(3):
            assert await is_known(connection)
        assert cluster.alive == ["pass-4711"]
        assert len(cluster.opened) == 1
        assert cluster.kinds == [HypervisorKind.VSPHERE]


async def test_another_hypervisor_with_the_same_secret_is_another_connection(
    authority: Authority, server: Pair
) -> None:
    cluster = Cluster()
    cluster.put(certificate="CERT", key="KEY")
    async with connected(cluster, server, authority.certificate) as connection:
        assert await is_known(connection)
        cluster.schedule = cluster.naming("vcenter", HypervisorKind.LIBVIRT)
        assert await is_known(connection)
        assert cluster.kinds == [HypervisorKind.VSPHERE, HypervisorKind.LIBVIRT]
        assert [credentials.key for credentials, _ in cluster.opened] == ["", "KEY"]
        assert cluster.alive == [""], "the first one is closed"
        cluster.put()
        text = await unknown(connection)
        assert "lacks certificate, key: expected the keys server, ca, certificate, key" in text
        cluster.schedule = cluster.naming("vcenter", *HypervisorKind)
        assert "names no Secret" in await unknown(connection), "two hypervisors are none"


async def test_a_changed_secret_opens_a_new_connection_and_closes_the_old_one(
    authority: Authority, server: Pair
) -> None:
    cluster = Cluster()
    cluster.put(password="wrong")  # noqa: S106  of no server
    async with connected(cluster, server, authority.certificate) as connection:
        await connection.read()
        cluster.put(password="right")  # noqa: S106  of no server
        assert await is_known(connection)
        assert cluster.alive == ["right"]
        cluster.put("other", password="of the other")  # noqa: S106  of no server
        cluster.schedule = cluster.naming("other")
        await connection.read()
        assert cluster.alive == ["of the other"]


async def test_without_credentials_nothing_is_known_and_the_reason_names_the_secret_alone(
    authority: Authority, server: Pair
) -> None:
    cluster = Cluster()
    async with connected(cluster, server, authority.certificate) as connection:
        assert await unknown(connection) == (
            "CredentialsIncomplete: the Secret vcenter of namespace gpuvirt does not exist; "
            "fix: create it in namespace gpuvirt, or correct spec.hypervisor of the schedule"
        )
        cluster.put(password="", user="")
        lacks = await unknown(connection)
        assert lacks.startswith("CredentialsIncomplete: the Secret vcenter lacks user, password")
        answer = await connection.call(Call(VmProof(VmKey("key-1")), Action.SUSPEND))
        assert isinstance(answer, Refused)
        cluster.schedule = None
        assert "does not exist" in await unknown(connection)
    assert cluster.opened == []


async def test_a_secret_that_is_deleted_ends_the_connection_and_one_that_is_unreadable_does_not(
    authority: Authority, server: Pair
) -> None:
    cluster = Cluster()
    cluster.put()
    async with connected(cluster, server, authority.certificate) as connection:
        await connection.read()
        cluster.is_forbidden = True
        assert await is_known(connection)
        cluster.is_forbidden = False
        del cluster.day.served.objects[f"{SECRETS}/vcenter"]
        await unknown(connection)
        assert cluster.alive == []
        cluster.is_forbidden = True
        assert "secrets is forbidden" in await unknown(connection)


@pytest.mark.parametrize(("kinds", "is_valid"), [((), False), *(((kind,), True) for kind in HypervisorKind)])
def test_exactly_one_hypervisor_is_named(kinds: tuple[HypervisorKind, ...], *, is_valid: bool) -> None:
    place = SecretPlace(secret_ref=SecretRef(name="hypervisor"))
    phase = PhaseSpec(name="day", start="0 7 * * *", workers=LabelSelector({"vgpu.type": "v100-4q"}))
    for named, expected in ((kinds, is_valid), (tuple(HypervisorKind), False)):
        spec = Spec(hypervisor=places(place, named), phases=(phase,))
        _, faults = schedule_of(VgpuSchedule(Metadata("gpus", "gpuvirt"), spec))
        assert [fault.code for fault in faults] == ([] if expected else ["ScheduleInvalid"])
