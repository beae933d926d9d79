"""A day of one schedule: a cluster with workers, their hypervisor, and a clock that both go by."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.model.workers.hypervisor import Hypervisor, Power, VmKey
from gpuvirt_schedules.controller.rounds import Rounds
from gpuvirt_schedules.controller.scheduleapi import ScheduleObjects
from gpuvirt_schedules.controller.vmcalls import VmCalls
from gpuvirt_sim.clock import SimTimer
from tests.kube.scriptedapi import Call as Request
from tests.kube.scriptedapi import Reply, scripted
from tests.schedules.modelhypervisor import Connection, Fault, ModelHypervisor, Vm
from tests.schedules.servedschedule import LEASES, NODES, SCHEDULES, Object, ServedSchedule
from tests.web.certificates import Pair

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


def uuid(number: int) -> str:
    """Return the system UUID of a worker."""
    return f"4217aaaa-0000-4000-8000-{number:012}"


class Day:
    """A cluster with workers of the day and one of the night, its hypervisor, and a clock that both go by."""

    def __init__(self, numbers: tuple[int, ...] = (1, 2, 3, 4)) -> None:
        self.served, self.now_s = ServedSchedule(), 100.0
        vms = {VmKey(f"key-{n}"): Vm(VmKey(f"key-{n}"), f"worker-{n}", uuid(n), 4) for n in numbers}
        for vm in vms.values():
            vm.power = Power.ON
        vms[VmKey("key-5")] = Vm(VmKey("key-5"), "worker-5", uuid(5), 16, Power.SUSPENDED)
        self.hypervisor = ModelHypervisor(vms, self.monotonic_s, lambda call, sender: None, pytest.fail)
        self.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": SPEC})
        for vm in vms.values():
            profile = "v100-16q" if vm.gpu == 16 else "v100-4q"
            content: Object = {
                "metadata": {"labels": {"vgpu.type": profile}},
                "spec": {"taints": [{"key": "own", "effect": "NoSchedule", "timeAdded": "2026-01-01T00:00:00Z"}]},
                "status": {"nodeInfo": {"systemUUID": vm.system_uuid.upper()}},
            }
            self.served.put(f"{NODES}/{vm.name}", content)
            self.set_ready(vm.name, is_ready=vm.power is Power.ON)
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
                if vm.gpu == 16:
                    self.set_ready(vm.name)

    def set_ready(self, name: str, *, is_ready: bool = True) -> None:
        node = self.served.objects[f"{NODES}/{name}"]
        assert isinstance(node["status"], dict)
        ready = [{"type": "Ready", "status": "True" if is_ready else "Unknown"}]
        self.served.put(f"{NODES}/{name}", {**node, "status": {**node["status"], "conditions": ready}})

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
    day: Day,
    server: Pair,
    ca: Path,
    connection: type[Connection] = Connection,
    *,
    answer: Callable[[Request], Reply] | None = None,
) -> AsyncIterator[tuple[Rounds, ScheduleObjects]]:
    async def before(what: str) -> Fault:
        assert what
        return Fault.NONE

    async def connect() -> Hypervisor:
        return connection(day.hypervisor, lambda: True, before)

    async with scripted(answer or day.served.answer, server, ca) as api:
        client = Client(Credentials("127.0.0.1", api.port, "gpuvirt", ca=ca, token=b"x")).rereading(day)
        objects = ScheduleObjects(client, "gpuvirt", "gpus", day)
        yield Rounds(objects, VmCalls(connect, day, lambda: True, 0.0), day), objects
        client.close()
