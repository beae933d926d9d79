"""A day of a VgpuSchedule on a real API server, scheduler and controllers, with kwok's nodes and a vCenter."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from gpuvirt.clock import RealClock
from tests.certificates import Authority
from tests.cluster.clusterlab import LabNode
from tests.cluster.controllerlab import NAMESPACE, controlled
from tests.cluster.documentsday import DAY, Day, schedules_served
from tests.cluster.workernodes import WORKERS, WorkerNodes
from tests.hypervisors.simulated import center

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.ring("vsphere"), pytest.mark.xdist_group("cluster")]


@pytest.fixture
def scene(node: LabNode, tmp_path: Path) -> Iterator[Day]:
    """The workers, and a controller as a process of the real host."""
    with (
        controlled(node) as cluster,
        schedules_served(node),
        center(tmp_path, Authority(tmp_path)) as vcenter,
        WorkerNodes(node, vcenter.vsphere).running() as workers,
        cluster.controller("--schedules"),
    ):
        yield Day(node, workers, vcenter)


def log(scene: Day) -> str:
    return (scene.node.cluster.folder / "log/controller.log").read_text()


def switch(scene: Day, phase: str, until: str) -> str:
    return scene.gpuvirt("schedule", "switch", "gpus", phase, "--until", until, "--namespace", NAMESPACE)


def test_the_documents_day_by_commands(scene: Day) -> None:
    soon = f"{RealClock().now() + timedelta(days=3):%Y-%m-%dT12:00}"
    scene.node.kubectl("cordon", "worker0")
    scene.train("small", "v100-4q-4GB", 3)
    scene.train("big", "v100-16q-16GB", 1)
    scene.budget("small", 0)
    scene.until_pods("small", ["Running"] * 3)
    scene.create()
    scene.until_reached("day")
    assert scene.workers.cordoned() == {"worker0", "worker4"}
    assert scene.vcenter.vsphere.state.calls == []

    planned = scene.gpuvirt("schedule", "plan", "gpus", "--namespace", NAMESPACE)
    assert "suspend" not in planned  # day holds until 2099
    checked = scene.gpuvirt("schedule", "check", "gpus", "--namespace", NAMESPACE)
    assert all(worker in checked for worker in WORKERS), checked

    switched = switch(scene, "night", soon)
    assert f"{scene.node.namespace}/small allows 0" in " ".join(switched.split()), switched
    scene.node.until(lambda: "PodsLeft" in scene.status(".workers[*].code"), lambda: scene.status(""))
    assert scene.phases("small") == ["Running"] * 3
    assert scene.vcenter.vsphere.state.power["worker4"] == "suspended"
    scene.budget("small", 3)
    scene.until_reached("night")
    assert scene.vcenter.vsphere.state.power == dict.fromkeys(DAY, "suspended") | {"worker4": "poweredOn"}
    assert scene.workers.cordoned() == DAY
    scene.until_pods("big", ["Running"])
    scene.until_pods("small", ["Pending"] * 3)
    pod = scene.node.kubectl("get", "pods", "-l", "app=small", "-o", "jsonpath={.items[0].metadata.name}")
    why = scene.gpuvirt("why", f"pod/{pod}", "-n", scene.node.namespace)
    assert f"are suspended until {soon.replace('T', ' ')} UTC by schedule gpus" in " ".join(why.split()), why

    switch(scene, "day", soon)
    scene.until_reached("day")
    assert scene.vcenter.vsphere.state.power == dict.fromkeys(DAY, "poweredOn") | {"worker4": "suspended"}
    assert scene.workers.cordoned() == {"worker0", "worker4"}
    scene.until_pods("small", ["Running"] * 3)
    scene.until_pods("big", ["Pending"])
    assert scene.workers.ready() >= DAY
    assert scene.vcenter.credentials.password not in log(scene)


class _Event(msgspec.Struct):
    reason: str
    note: str = ""


class _Events(msgspec.Struct):
    items: tuple[_Event, ...] = ()


def test_a_wrong_password_holds_the_switch_and_is_named_everywhere(scene: Day) -> None:
    wrong = "wrong-Pass-0815"
    scene.create()
    scene.node.cluster.kubectl(
        "patch", "secret", "vcenter", "-n", NAMESPACE, "-p", '{"stringData": {"password": "' + wrong + '"}}'
    )
    scene.node.until(lambda: "WrongCredentials" in scene.status(""), lambda: scene.status(""))
    assert scene.vcenter.vsphere.state.calls == []
    assert scene.workers.cordoned() == set()
    shown = scene.gpuvirt("schedule", "show", "gpus", "--namespace", NAMESPACE)
    assert "WrongCredentials" in shown, shown
    found = scene.node.cluster.api.get(f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events")
    assert found is not None
    events = msgspec.json.decode(found, type=_Events).items
    for text in (shown, scene.status(""), log(scene), *(event.note for event in events)):
        assert wrong not in text
