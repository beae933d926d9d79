"""The controller's task for schedules: rounds when they are due, and no request for what is not."""

import asyncio
from collections.abc import Callable

import pytest

from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.model.workers.hypervisor import Power, VmKey
from gpuvirt.web.exposition import text_of
from gpuvirt_schedules.controller.keeper import ASKED_AGAIN_S, PATIENCE_S
from gpuvirt_schedules.controller.scheduleapi import OtherSchedules
from gpuvirt_schedules.controller.schedulemetrics import of_schedules
from tests.agent.kubelet.kubeletnode import CLOCK, until
from tests.kube.scriptedapi import scripted
from tests.schedules.keptschedule import Opened, keeping, reached
from tests.schedules.scheduleday import SCHEDULE, SPEC, Day
from tests.schedules.servedschedule import ALL_SCHEDULES, NODES, SCHEDULES, Object
from tests.web.certificates import Authority, Pair

NEVER_S = -1e9
"""When a connection was read that was never read."""
IN_THE_NIGHT: Object = {"phase": "night", "observedGeneration": 1}


def page(opened: Opened) -> str:
    """Return the metrics."""
    assert opened.keeper is not None
    return text_of(of_schedules(opened.keeper.schedules, opened.keeper.telemetry))


def shown(opened: Opened) -> set[str]:
    """Return the lines of the metrics."""
    return set(page(opened).splitlines())


async def observed(day: Day) -> None:
    """Return once the keeper watches."""
    await until(lambda: day.served.watches > 0)


async def waited(day: Day, met: Callable[[], bool] = lambda: True) -> None:
    """Let time pass in which a controller of another namespace could write a status, until a condition is met."""
    await observed(day)
    rounds = 0
    while rounds < 2 or not met():
        rounds += 1
        await turns()
        day.now_s += PATIENCE_S
        idle: Object = {**SPEC, "suspend": True, "phases": []}
        day.served.put(f"{SCHEDULES}/idle", {"metadata": {"generation": 1}, "spec": idle})


async def turns() -> None:
    """Let other tasks have their turns."""
    for _ in range(50):
        await CLOCK.sleep(0.001)


async def test_a_switch_that_is_due_is_made_and_its_connection_closed(authority: Authority, server: Pair) -> None:
    day = Day((1,))
    async with keeping(day, server, authority.certificate) as opened:
        await reached(day, "night")
        await until(lambda: 'gpuvirt_schedule_phase{schedule="gpus",phase="night"} 1' in page(opened))
        assert shown(opened) >= {
            'gpuvirt_schedule_next_switch_timestamp_seconds{schedule="gpus",phase="day"} 1767679200',
            'gpuvirt_schedule_ready{schedule="gpus",reason="PhaseReached"} 1',
            'gpuvirt_schedule_held_workers{schedule="gpus"} 0',
            'gpuvirt_schedule_calls_total{action="suspend",result="accepted"} 1',
            'gpuvirt_schedule_calls_total{action="start",result="accepted"} 1',
            'gpuvirt_schedule_step_seconds_count{step="Leave"} 1',
            'gpuvirt_schedule_step_seconds_count{step="WaitForGpu"} 1',
        }
    assert day.hypervisor.vms[VmKey("key-5")].power is Power.ON
    assert all(connection.dead_at_s is not None for connection in opened.connections)


async def test_schedules_with_nothing_due_are_listed_once_and_not_read(authority: Authority, server: Pair) -> None:
    day = Day((1,))
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": SPEC, "status": IN_THE_NIGHT})
    for number in range(99):
        path = f"{SCHEDULES}/gpus-{number}"
        day.served.put(path, {"metadata": {"generation": 1}, "spec": SPEC, "status": IN_THE_NIGHT})
    async with keeping(day, server, authority.certificate) as opened:
        await observed(day)
        await until(lambda: NODES in day.served.lists)
        before = list(day.served.lists)
        for _ in range(50):
            await asyncio.sleep(0)  # noqa: TID251  the task decides
        assert sorted(day.served.lists) == sorted(before) == [NODES, ALL_SCHEDULES]
    assert not opened.connections
    assert not day.served.writes


async def test_another_spec_is_followed_at_once(authority: Authority, server: Pair) -> None:
    day = Day((1,))
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": SPEC, "status": {**IN_THE_NIGHT, "phase": "day"}})
    suspended: Object = {"metadata": {"generation": 2}, "spec": {**SPEC, "suspend": True}, "status": IN_THE_NIGHT}
    day.served.put(SCHEDULE, suspended)
    async with keeping(day, server, authority.certificate):
        await observed(day)
        assert not day.served.writes
        day.served.put(SCHEDULE, {"metadata": {"generation": 3}, "spec": SPEC})
        await reached(day, "night")


def cordon(day: Day, name: str, owner: str, ready: str) -> None:
    """Cordon a node in the name of a schedule."""
    node = day.served.objects[f"{NODES}/{name}"]
    labels = {"vgpu.type": "v100-4q", "gpuvirt.io/cordoned-by": owner}
    spec = {"unschedulable": True, "taints": [{"key": "gpuvirt.io/leaves-soon", "effect": "PreferNoSchedule"}]}
    status = {"conditions": [{"type": "Ready", "status": ready}]}
    day.served.put(f"{NODES}/{name}", {**node, "metadata": {"labels": labels}, "spec": spec, "status": status})


async def test_cordons_of_a_deleted_schedule_are_removed_once_no_suspension_can_be_under_way(
    authority: Authority, server: Pair
) -> None:
    day = Day((1, 2, 3))
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": SPEC, "status": IN_THE_NIGHT})
    cordon(day, "worker-1", "deleted", "Unknown")
    cordon(day, "worker-2", "deleted", "True")
    cordon(day, "worker-3", "gpus", "Unknown")
    began_s = day.now_s
    async with keeping(day, server, authority.certificate):
        await until(lambda: day.node("worker-1") == (None, None))
        assert day.now_s < began_s + 600.0
        await until(lambda: day.node("worker-2") == (None, None))
        assert day.now_s >= began_s + 600.0
    assert day.node("worker-3") == (True, "gpus")


async def test_the_deletion_of_a_schedule_is_noticed(authority: Authority, server: Pair) -> None:
    day = Day((1,))
    suspended: Object = {"metadata": {"generation": 1}, "spec": {**SPEC, "suspend": True}, "status": IN_THE_NIGHT}
    day.served.put(SCHEDULE, suspended)
    cordon(day, "worker-1", "gpus", "Unknown")
    async with keeping(day, server, authority.certificate):
        await observed(day)
        await until(lambda: NODES in day.served.lists)
        assert day.node("worker-1") == (True, "gpus")
        day.served.delete(SCHEDULE)
        await until(lambda: day.node("worker-1") == (None, None))


async def test_a_schedule_of_another_namespace_is_refused_once_and_does_nothing(
    authority: Authority, server: Pair
) -> None:
    day = Day((1,))
    day.served.delete(SCHEDULE)
    foreign = SCHEDULES.replace("gpuvirt/", "tenant/") + "/gpus"
    day.served.put(foreign, {"metadata": {"generation": 1}, "spec": SPEC, "status": IN_THE_NIGHT})
    cordon(day, "worker-1", "gpus", "Unknown")
    async with keeping(day, server, authority.certificate) as opened:
        await waited(day, lambda: "NotAllowed" in str(day.served.objects[foreign]["status"]))
        await until(lambda: day.node("worker-1") == (None, None))
        day.served.put(f"{SCHEDULES}/other", {"metadata": {"generation": 1}, "spec": {**SPEC, "suspend": True}})
        for _ in range(50):
            await asyncio.sleep(0)  # noqa: TID251  the task decides
    status = day.served.objects[foreign]["status"]
    assert isinstance(status, dict)
    assert {key: status[key] for key in IN_THE_NIGHT} == IN_THE_NIGHT
    valid = {condition["type"]: condition for condition in status["conditions"]}["Valid"]
    assert (valid["status"], valid["reason"]) == ("False", "NotAllowed")
    assert day.served.writes.count(f"PATCH {foreign}/status") == 1
    assert not opened.connections


async def test_controllers_of_two_namespaces_do_not_refuse_the_schedules_of_each_other(
    authority: Authority, server: Pair
) -> None:
    day = Day((1,))
    async with keeping(day, server, authority.certificate):
        await reached(day, "night")
    cordon(day, "worker-1", "gpus", "Unknown")
    served = day.served.objects[SCHEDULE]
    async with keeping(day, server, authority.certificate, "tenant"):
        await waited(day)
        day.served.put(SCHEDULE, {**served, "metadata": {"generation": 2}})
        await waited(day)
        await turns()
    assert day.conditions()["Valid"] == ("True", "Valid")
    assert day.node("worker-1") == (True, "gpus"), "its cordon is not that of a deleted schedule"


async def test_a_schedule_that_another_controller_has_refused_is_taken_back(authority: Authority, server: Pair) -> None:
    day = Day((1,))
    async with keeping(day, server, authority.certificate):
        await reached(day, "night")
    reached_status = day.status()
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": SPEC})
    async with keeping(day, server, authority.certificate, "tenant"):
        await waited(day, lambda: "NotAllowed" in str(day.served.objects[SCHEDULE].get("status")))
    conditions = day.status()["conditions"]
    status: Object = {**reached_status, "conditions": conditions}
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": SPEC, "status": status})
    async with keeping(day, server, authority.certificate):
        await until(lambda: day.conditions()["Valid"] == ("True", "Valid"))


async def test_a_worker_in_two_schedules_is_reported_for_both(authority: Authority, server: Pair) -> None:
    day = Day((1,))
    async with keeping(day, server, authority.certificate):
        await reached(day, "night")
        await until(lambda: day.conditions()["Ready"] == ("True", "PhaseReached"))
        day.served.put(f"{SCHEDULES}/more", {"metadata": {"generation": 1}, "spec": SPEC})
        await until(lambda: day.conditions()["Valid"] == ("False", "WorkerInTwoSchedules"))
        await until(lambda: "WorkerInTwoSchedules" in str(day.served.objects[f"{SCHEDULES}/more"].get("status")))


async def test_schedules_that_are_read_at_the_same_time_are_read_once(authority: Authority, server: Pair) -> None:
    day = Day((1,))
    kept = {"phase": "day", "began": "2026-01-05T06:00:00Z", "cause": "Schedule"}
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": SPEC, "status": {"history": [kept] * 50}})
    async with scripted(day.served.answer, server, authority.certificate) as api, asyncio.TaskGroup() as group:
        client = Client(Credentials("127.0.0.1", api.port, "gpuvirt", ca=authority.certificate, token=b"x"))
        others = OtherSchedules(client, "gpuvirt")
        first = group.create_task(others.read())
        await CLOCK.sleep(0)
        later = [group.create_task(others.read()) for _ in range(30)]
        await CLOCK.sleep(0)
        later[0].cancel()  # the one that would have made the next one
        readings = [await reading for reading in later[1:]]
        assert await first == readings[0]
        assert all(reading is readings[0] for reading in readings)
        assert await first is not readings[0], "none is older than the request for it"
        client.close()
    assert day.served.lists.count(SCHEDULES) == 2


def announced(**spec: object) -> Day:
    """Return a day ten minutes before the night, which is announced."""
    day = Day((1,))
    day.now_s -= 600.0
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": {**SPEC, **spec}})
    return day


async def woken(day: Day, seconds: float) -> None:
    """Let time pass, and let the keeper notice."""
    day.now_s += seconds
    idle: Object = {**SPEC, "suspend": True, "phases": []}
    day.served.put(f"{SCHEDULES}/idle", {"metadata": {"generation": 1}, "spec": idle})
    await turns()


async def test_the_connection_of_a_switch_is_opened_when_it_is_announced(authority: Authority, server: Pair) -> None:
    day = announced()
    async with keeping(day, server, authority.certificate) as opened:
        await until(lambda: len(opened.connections) == 2)
        first, early = opened.connections
        await until(lambda: first.dead_at_s is not None and early.last_read_s > NEVER_S)
        assert (day.status()["phase"], day.status()["announced"]) == ("day", "night")
        last_read_s = early.last_read_s
        await woken(day, ASKED_AGAIN_S - 5.0)
        assert early.last_read_s == last_read_s
        await woken(day, ASKED_AGAIN_S)
        await until(lambda: early.last_read_s > last_read_s)  # it does not become idle
        await woken(day, 600.0)
        await reached(day, "night")
        assert len(opened.connections) == 2
        await until(lambda: early.dead_at_s is not None)


@pytest.mark.parametrize(
    "changes",
    [{"suspend": True}, {"announce": "1m"}, {"hypervisor": {"kubeVirt": {"namespace": "vms"}}, "leave": "ShutDown"}],
    ids=["suspended", "announced later", "without a child"],
)
async def test_a_connection_for_a_switch_that_is_not_announced_any_more_is_closed(
    authority: Authority, server: Pair, changes: Object
) -> None:
    day = announced()
    async with keeping(day, server, authority.certificate) as opened:
        await until(lambda: len(opened.connections) == 2 and opened.connections[1].last_read_s > NEVER_S)
        spec = {**SPEC, **changes}
        day.served.put(SCHEDULE, {**day.served.objects[SCHEDULE], "metadata": {"generation": 2}, "spec": spec})
        await until(lambda: all(connection.dead_at_s is not None for connection in opened.connections))
        await woken(day, 1.0)
        assert all(connection.dead_at_s is not None for connection in opened.connections)


async def test_a_connection_for_an_announced_switch_ends_with_the_keeper(authority: Authority, server: Pair) -> None:
    async with keeping(announced(), server, authority.certificate) as opened:
        await until(lambda: len(opened.connections) == 2 and opened.connections[1].last_read_s > NEVER_S)
    assert opened.connections[1].dead_at_s is not None


async def test_a_schedule_without_workers_has_no_connection_when_it_is_announced(
    authority: Authority, server: Pair
) -> None:
    day = announced()
    for name in ("worker-1", "worker-5"):
        day.served.delete(f"{NODES}/{name}")
    day.hypervisor.vms.clear()
    async with keeping(day, server, authority.certificate) as opened:
        await until(lambda: "status" in day.served.objects[SCHEDULE] and day.status().get("announced") == "night")
        await turns()
        assert len(opened.connections) == 1, "that of the first round"
