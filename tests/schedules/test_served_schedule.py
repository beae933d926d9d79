"""A day of one schedule over HTTPS: what is read, written and asked of the hypervisor, and what the status says."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from typing_extensions import override

from gpuvirt.cluster.access.credentials import Credentials
from gpuvirt.cluster.client import Client
from gpuvirt.cluster.failures import ConflictError
from gpuvirt.cluster.labelselector import LabelSelector, Requirement
from gpuvirt.cluster.operator.schedules.objects import duration_s
from gpuvirt.cluster.operator.schedules.rounds import Rounds
from gpuvirt.cluster.operator.schedules.scheduleapi import ScheduleObjects, selector_text
from gpuvirt.cluster.operator.schedules.vmcalls import VmCalls
from gpuvirt.facts.ids import NodeName
from gpuvirt.model.schedules.actions import MarkNode
from gpuvirt.model.schedules.hypervisor import Answer, Call, Hypervisor, Power, VmKey
from gpuvirt_sim.clock import SimTimer
from tests.apiserver.scriptedapi import scripted
from tests.schedules.modelhypervisor import Connection, Fault, ModelHypervisor, Vm
from tests.schedules.servedschedule import LEASES, NODES, SCHEDULES, Object, ServedSchedule
from tests.web.certificates import Authority, Pair

EVENING = datetime.fromisoformat("2026-01-05T19:00:01+00:00")
"""20:00 in Berlin."""
SCHEDULE = f"{SCHEDULES}/gpus"
SPEC: Object = {
    "timeZone": "Europe/Berlin",
    "hypervisor": {"vsphere": {"secretRef": {"name": "vcenter"}}},
    "phases": [
        {"name": "day", "start": "0 7 * * 1-5", "workers": {"matchLabels": {"vgpu.type": "v100-4q"}}},
        {"name": "night", "start": "0 20 * * 1-5", "workers": {"matchLabels": {"vgpu.type": "v100-16q"}}},
    ],
    "drain": {"timeout": "10m"},
}


class Day:
    """A cluster with workers of the day and one of the night, its hypervisor, and a clock that both go by."""

    def __init__(self, numbers: tuple[int, ...] = (1, 2, 3, 4)) -> None:
        self.served, self.now_s = ServedSchedule(), 100.0
        vms = {VmKey(f"key-{n}"): Vm(VmKey(f"key-{n}"), f"worker-{n}", "", 4) for n in numbers}
        for vm in vms.values():
            vm.power = Power.ON
        vms[VmKey("key-5")] = Vm(VmKey("key-5"), "worker-5", "", 16, Power.SUSPENDED)
        self.hypervisor = ModelHypervisor(vms, self.monotonic_s, lambda call, sender: None, pytest.fail)
        self.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": SPEC})
        for vm in vms.values():
            profile = "v100-16q" if vm.gpu == 16 else "v100-4q"
            ready = [{"type": "Ready", "status": "True" if vm.power is Power.ON else "Unknown"}]
            content: Object = {
                "metadata": {"labels": {"vgpu.type": profile}},
                "spec": {"taints": [{"key": "own", "effect": "NoSchedule", "timeAdded": "2026-01-01T00:00:00Z"}]},
                "status": {"conditions": ready},
            }
            self.served.put(f"{NODES}/{vm.name}", content)
        self.put_pod("train-0", "worker-1")

    def put_pod(self, name: str, node: str, **more: object) -> None:
        owners = [{"kind": "Job", "name": "train", "controller": True}]
        metadata = {"namespace": "default", "ownerReferences": owners, **more}
        self.served.put(
            f"/api/v1/namespaces/default/pods/{name}",
            {"metadata": metadata, "spec": {"nodeName": node, "volumes": None}},
        )

    def now(self) -> datetime:
        return EVENING + timedelta(seconds=self.now_s - 100.0)

    def monotonic_s(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[[], None], /) -> SimTimer:
        assert delay_s > 0.0
        return SimTimer(call)  # time passes by sleeps alone

    async def sleep(self, seconds: float, /) -> None:
        await asyncio.sleep(0)  # noqa: TID251  other tasks have their turns
        self.now_s += max(seconds, 0.1)
        self.hypervisor.pass_time()
        for vm in self.hypervisor.vms.values():
            if vm.power is Power.ON and vm.becomes is None:
                self.served.put(f"{LEASES}/{vm.name}", {"spec": {"renewTime": f"{self.now():%Y-%m-%dT%H:%M:%S.%fZ}"}})
                node = self.served.objects[f"{NODES}/{vm.name}"]
                if vm.gpu == 16:
                    self.served.put(
                        f"{NODES}/{vm.name}", {**node, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
                    )

    def status(self) -> Object:
        found = self.served.objects[SCHEDULE]["status"]
        assert isinstance(found, dict)
        return found

    def events(self) -> list[tuple[object, object]]:
        return [(event["type"], event["reason"]) for event in self.served.events]

    def conditions(self) -> dict[str, tuple[str, str]]:
        found = self.status()["conditions"]
        assert isinstance(found, list)
        return {condition["type"]: (condition["status"], condition["reason"]) for condition in found}

    def node(self, name: str) -> tuple[object, object]:
        node = self.served.objects[f"{NODES}/{name}"]
        spec, metadata = node["spec"], node["metadata"]
        assert isinstance(spec, dict)
        assert isinstance(metadata, dict)
        return spec.get("unschedulable"), metadata["labels"].get("gpuvirt.io/cordoned-by")


@asynccontextmanager
async def playing(
    day: Day, server: Pair, ca: Path, connection: type[Connection] = Connection
) -> AsyncIterator[tuple[Rounds, ScheduleObjects]]:
    async def before(what: str) -> Fault:
        assert what
        return Fault.NONE

    async def connect() -> Hypervisor:
        return connection(day.hypervisor, lambda: True, before)

    async with scripted(day.served.answer, server, ca) as api:
        client = Client(Credentials("127.0.0.1", api.port, "gpuvirt", ca=ca, token=b"x"))
        objects = ScheduleObjects(client, "gpuvirt", "gpus", day)
        yield Rounds(objects, VmCalls(connect, day, lambda: True, 0.0), day), objects
        client.close()


async def test_the_evening_of_the_document(authority: Authority, server: Pair) -> None:
    day = Day()
    async with playing(day, server, authority.certificate) as (rounds, _):
        await rounds.run()
    powers = {vm.name: vm.power for vm in day.hypervisor.vms.values()}
    assert powers == {**{f"worker-{n}": Power.SUSPENDED for n in (1, 2, 3, 4)}, "worker-5": Power.ON}
    assert {day.node(f"worker-{n}") for n in (1, 2, 3, 4)} == {(True, "gpus")}
    assert day.node("worker-5") == (None, None)
    assert "POST /api/v1/namespaces/default/pods/train-0/eviction" in day.served.writes
    status = day.status()
    assert (status["phase"], status["nextPhase"], status["nextSwitch"]) == ("night", "day", "2026-01-06T06:00:00Z")
    assert day.conditions() == {
        "Ready": ("True", "PhaseReached"),
        "Valid": ("True", "Valid"),
        "Held": ("False", "NotHeld"),
    }
    assert day.events() == [("Normal", "Switching"), ("Normal", "PhaseReached")]
    regarding = day.served.events[0]["regarding"]
    assert regarding == {
        "apiVersion": "gpuvirt.io/v1alpha1",
        "kind": "VgpuSchedule",
        "name": "gpus",
        "uid": "uid-gpus",
        "namespace": "gpuvirt",
    }
    took_s = day.now_s - 100.0
    assert took_s < 5.0 + 2 * 30.0 + 15.0, "settled cordon, suspension and start, and little more"


class Together(Connection):
    """A connection whose calls are answered once four are under way, as suspensions that take time."""

    begun = 0

    @override
    async def call(self, call: Call) -> Answer:
        self.begun += 1
        for _ in range(100):
            await asyncio.sleep(0)  # noqa: TID251  the other calls have their turns
        assert self.begun >= 4
        return await super().call(call)


async def test_the_workers_of_a_phase_are_suspended_together(authority: Authority, server: Pair) -> None:
    day = Day()
    async with playing(day, server, authority.certificate, Together) as (rounds, _):
        await rounds.run()
    assert day.status()["phase"] == "night"


async def test_a_budget_holds_the_transition_and_its_reason_is_in_the_status(
    authority: Authority, server: Pair
) -> None:
    day = Day((1,))
    day.served.budget_allows = False
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": {**SPEC, "drain": {"timeout": "1m"}}})
    async with playing(day, server, authority.certificate) as (rounds, _):
        while day.now_s < 100.0 + 100.0:
            pause_s = await rounds.round()
            assert pause_s is not None
            await day.sleep(pause_s)
    assert day.conditions()["Held"] == ("True", "PodsLeft")
    assert day.conditions()["Ready"] == ("False", "PodsLeft")
    assert day.events() == [("Normal", "Switching"), ("Warning", "PodsLeft")], "each once"
    evictions = [write for write in day.served.writes if write.endswith("eviction")]
    assert 8 < len(evictions) < 14, "every 5 s for a minute, as kubectl drain"
    assert day.hypervisor.vms[VmKey("key-5")].power is Power.SUSPENDED


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"timeZone": "Europe/Berlim"}, "TimeZoneUnknown"),
        ({"announce": "soon"}, "ScheduleInvalid"),
        ({"drain": {"timeout": "10"}}, "ScheduleInvalid"),
        ({"hypervisor": None}, "ScheduleInvalid"),
        ({"overrides": [{"phase": "day", "from": "now", "until": "2026-01-01T00:00"}]}, "ScheduleInvalid"),
        ({"phases": [{"name": "day", "start": "0 7 * * *", "workers": {}}]}, "ScheduleInvalid"),
    ],
)
async def test_nothing_happens_for_a_spec_with_faults(
    authority: Authority, server: Pair, changes: Object, code: str
) -> None:
    day = Day()
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": {**SPEC, **changes}})
    async with playing(day, server, authority.certificate) as (rounds, _):
        assert await rounds.round() is None
        assert await rounds.round() is None
    assert day.conditions()["Valid"] == ("False", code)
    assert day.events() == [("Warning", code)]
    assert day.served.writes == [f"PATCH {SCHEDULE}/status"]


async def test_a_worker_of_two_schedules_is_touched_by_neither(authority: Authority, server: Pair) -> None:
    day = Day()
    day.served.put(f"{SCHEDULES}/more", {"metadata": {"generation": 1}, "spec": SPEC})
    async with playing(day, server, authority.certificate) as (rounds, _):
        await rounds.round()
    assert day.conditions()["Valid"] == ("False", "WorkerInTwoSchedules")
    assert day.served.writes == [f"PATCH {SCHEDULE}/status"]


async def test_marks_keep_other_taints_and_need_the_version_that_was_read(authority: Authority, server: Pair) -> None:
    day = Day()
    async with playing(day, server, authority.certificate) as (_, objects):
        stored = await objects.schedule()
        assert stored is not None
        reading = await objects.read(stored)
        version = reading.nodes[NodeName("worker-1")].version
        await objects.mark(MarkNode(NodeName("worker-1"), version, taint=True))
        spec = day.served.objects[f"{NODES}/worker-1"]["spec"]
        assert isinstance(spec, dict)
        assert spec["taints"] == [
            {"key": "own", "effect": "NoSchedule", "timeAdded": "2026-01-01T00:00:00Z"},
            {"key": "gpuvirt.io/leaves-soon", "effect": "PreferNoSchedule"},
        ]
        with pytest.raises(ConflictError):
            await objects.mark(MarkNode(NodeName("worker-1"), version, cordon=True))


@pytest.mark.parametrize(
    ("text", "seconds"), [("15m", 900.0), ("1h30m", 5400.0), ("0.5h", 1800.0), ("10", None), ("", None), ("-5m", None)]
)
def test_durations_are_those_of_go(text: str, seconds: float | None) -> None:
    assert duration_s(text) == seconds


def test_a_selector_is_written_as_a_query_has_it() -> None:
    requirements = (Requirement("tier", "NotIn", ("test", "dev")), Requirement("gpu", "Exists"))
    assert selector_text(LabelSelector({"a": "b"}, requirements)) == "a=b,tier notin (test,dev),gpu"
