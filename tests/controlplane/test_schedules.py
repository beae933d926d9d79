"""A day of a VgpuSchedule on a real API server, scheduler and controllers, with kwok's nodes and a vCenter."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from gpuvirt.clock import RealClock
from tests.cluster.controllerlab import NAMESPACE, controlled
from tests.cluster.documentsday import DAY, Day, schedules_served
from tests.cluster.labnamespace import LabNamespace
from tests.cluster.workernodes import WORKERS, WorkerNodes
from tests.hypervisors.simulated import center
from tests.web.certificates import Authority

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.ring("vsphere"), pytest.mark.xdist_group("controlplane")]


@pytest.fixture
def day(node: LabNamespace, tmp_path: Path) -> Iterator[Day]:
    """The workers, and a controller as a process of the real host."""
    with (
        controlled(node) as cluster,
        schedules_served(node),
        center(tmp_path, Authority(tmp_path)) as vcenter,
        WorkerNodes(node, vcenter.vsphere).running() as workers,
        cluster.controller("--schedules"),
    ):
        yield Day(node, workers, vcenter)


def log(day: Day) -> str:
    return (day.node.cluster.folder / "log/controller.log").read_text()


def switch(day: Day, phase: str, until: str) -> str:
    return day.gpuvirt("schedule", "switch", "gpus", phase, "--until", until, "--namespace", NAMESPACE)


def test_the_documents_day_by_commands(day: Day) -> None:
    soon = f"{RealClock().now() + timedelta(days=3):%Y-%m-%dT12:00}"
    day.node.kubectl("cordon", "worker0")
    day.train("small", "v100-4q-4GB", 3)
    day.train("big", "v100-16q-16GB", 1)
    day.budget("small", 0)
    day.until_pods("small", ["Running"] * 3)
    day.create()
    day.until_reached("day")
    assert day.workers.cordoned() == {"worker0", "worker4"}
    assert day.vcenter.vsphere.state.calls == []

    planned = day.gpuvirt("schedule", "plan", "gpus", "--namespace", NAMESPACE)
    assert "suspend" not in planned  # day holds until 2099
    checked = day.gpuvirt("schedule", "check", "gpus", "--namespace", NAMESPACE)
    assert all(worker in checked for worker in WORKERS), checked

    switched = switch(day, "night", soon)
    assert f"{day.node.namespace}/small allows 0" in " ".join(switched.split()), switched
    day.node.until(lambda: "PodsLeft" in day.status(".workers[*].code"), lambda: day.status(""))
    assert day.phases("small") == ["Running"] * 3
    assert day.vcenter.vsphere.state.power["worker4"] == "suspended"
    day.budget("small", 3)
    day.until_reached("night")
    assert day.vcenter.vsphere.state.power == dict.fromkeys(DAY, "suspended") | {"worker4": "poweredOn"}
    assert day.workers.cordoned() == DAY
    day.until_pods("big", ["Running"])
    day.until_pods("small", ["Pending"] * 3)
    pod = day.node.kubectl("get", "pods", "-l", "app=small", "-o", "jsonpath={.items[0].metadata.name}")
    why = day.gpuvirt("why", f"pod/{pod}", "-n", day.node.namespace)
    assert f"are suspended until {soon.replace('T', ' ')} UTC by schedule gpus" in " ".join(why.split()), why

    switch(day, "day", soon)
    day.until_reached("day")
    assert day.vcenter.vsphere.state.power == dict.fromkeys(DAY, "poweredOn") | {"worker4": "suspended"}
    assert day.workers.cordoned() == {"worker0", "worker4"}
    day.until_pods("small", ["Running"] * 3)
    day.until_pods("big", ["Pending"])
    assert day.workers.ready() >= DAY
    assert day.vcenter.credentials.password not in log(day)


class _Event(msgspec.Struct):
    reason: str
    note: str = ""


class _Events(msgspec.Struct):
    items: tuple[_Event, ...] = ()


def test_a_wrong_password_holds_the_switch_and_is_named_everywhere(day: Day) -> None:
    wrong = "wrong-Pass-0815"
    day.create()
    day.node.cluster.kubectl(
        "patch", "secret", "vcenter", "-n", NAMESPACE, "-p", '{"stringData": {"password": "' + wrong + '"}}'
    )
    day.node.until(lambda: "WrongCredentials" in day.status(""), lambda: day.status(""))
    assert day.vcenter.vsphere.state.calls == []
    assert day.workers.cordoned() == set()
    shown = day.gpuvirt("schedule", "show", "gpus", "--namespace", NAMESPACE)
    assert "WrongCredentials" in shown, shown
    found = day.node.cluster.api.get(f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events")
    assert found is not None
    events = msgspec.json.decode(found, type=_Events).items
    for text in (shown, day.status(""), log(day), *(event.note for event in events)):
        assert wrong not in text
