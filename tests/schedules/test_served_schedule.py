"""A day of one schedule over HTTPS: what is read, written and asked of the hypervisor, and what the status says."""

import asyncio

import pytest
from typing_extensions import override

from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.failures import ConflictError
from gpuvirt.kube.labels import LabelSelector, Requirement
from gpuvirt.model.workers.hypervisor import Answer, Call, Power, VmKey
from gpuvirt_schedules.controller.objects import duration_s
from gpuvirt_schedules.controller.rounds import AGAIN_S
from gpuvirt_schedules.controller.scheduleapi import selector_text
from gpuvirt_schedules.decide.nextstep import MarkNode
from tests.kube.scriptedapi import Call as Request
from tests.kube.scriptedapi import Reply
from tests.schedules.modelhypervisor import Connection
from tests.schedules.scheduleday import SCHEDULE, SPEC, Day, playing
from tests.schedules.servedschedule import ATTACHMENTS, LEASES, NODES, PODS, SCHEDULES, Object
from tests.web.certificates import Authority, Pair


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
    history = status["history"]
    assert isinstance(history, list)
    (switch,) = history
    fields = ("phase", "outcome", "cause", "evicted", "deleted")
    assert [switch[field] for field in fields] == ["night", "Reached", "Spec", 1, 0], "the first switch of a new spec"
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
    assert 8 < len(evictions) < 17, "every 5 s for a minute, as kubectl drain, then every 30 s"
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


@pytest.mark.parametrize("uid", ["uid-worker-9", ""])
async def test_the_vm_of_another_schedule_is_left_alone(authority: Authority, server: Pair, uid: str) -> None:
    """A stale Node claims a VM, too; once it is deleted, its schedule claims nothing."""
    day = Day((1,))
    worker = {"node": "worker-9", "nodeUid": uid, "phases": ["day"], "vm": "key-1", "vmName": "worker-1"}
    other: Object = {"metadata": {"generation": 1}, "spec": SPEC, "status": {"workers": [worker]}}
    phases = [{"name": "day", "start": "0 7 * * *", "workers": {"matchLabels": {"pool": "old"}}}]
    day.served.put(f"{SCHEDULES}/other", {**other, "spec": {**SPEC, "phases": phases}})
    async with playing(day, server, authority.certificate) as (rounds, _):
        while day.now_s < 300.0 and (pause_s := await rounds.round()) is not None:
            await day.sleep(pause_s)
    is_off = day.hypervisor.vms[VmKey("key-1")].power is Power.SUSPENDED
    assert is_off is (uid == "")
    assert ("evict" in " ".join(day.served.writes)) is is_off
    if uid:
        workers = day.status()["workers"]
        assert isinstance(workers, list)
        assert "node worker-9 of schedule other, has that VM, too" in workers[0]["message"]


@pytest.mark.parametrize("path", [ATTACHMENTS, f"{LEASES}/worker-1"])
async def test_a_right_that_is_missing_is_in_the_status_until_it_is_given(
    authority: Authority, server: Pair, path: str
) -> None:
    day = Day((1,))
    day.served.forbidden.add(path)
    async with playing(day, server, authority.certificate) as (rounds, _):
        assert await rounds.round() == 60.0
        assert (day.conditions()["Valid"], day.conditions()["Ready"]) == (("False", "RightMissing"),) * 2
        assert day.events() == [("Warning", "RightMissing")]
        day.served.forbidden.clear()
        await rounds.run()
    assert day.conditions()["Valid"] == ("True", "Valid")
    assert day.status()["phase"] == "night"


@pytest.mark.parametrize("path", [SCHEDULE, NODES, f"{LEASES}/worker-2", PODS, ATTACHMENTS, SCHEDULES])
@pytest.mark.parametrize("code", [500, 504])
async def test_a_request_that_fails_once_is_repeated_without_its_round(
    authority: Authority, server: Pair, path: str, code: int
) -> None:
    day, failed = Day(), list[str]()

    def answer(call: Request) -> Reply:
        if call.method == "GET" and call.path == path and not failed:
            failed.append(path)
            return code, {"message": "etcdserver: leader changed"}
        return day.served.answer(call)

    async with playing(day, server, authority.certificate, answer=answer) as (rounds, _):
        assert await rounds.round() != AGAIN_S
    assert (failed, day.served.lists.count(ATTACHMENTS)) == ([path], 1)
    assert day.status()["transition"] is not None, "the round was made whole"


async def test_a_request_that_fails_twice_ends_its_round_and_is_sent_no_third_time(
    authority: Authority, server: Pair
) -> None:
    day, sent = Day(), list[str]()

    def answer(call: Request) -> Reply:
        if call.path == ATTACHMENTS:
            sent.append(call.path)
            return 500, {"message": "etcdserver: no leader"}
        return day.served.answer(call)

    async with playing(day, server, authority.certificate, answer=answer) as (rounds, _):
        assert await rounds.round() == AGAIN_S
    assert len(sent) == 2
    assert day.served.writes == []


async def test_an_eviction_that_fails_is_not_repeated_within_its_round(authority: Authority, server: Pair) -> None:
    day, sent = Day((1,)), list[str]()

    def answer(call: Request) -> Reply:
        if call.path.endswith("/eviction"):
            sent.append(call.path)
            return 500, {"message": "etcdserver: request timed out"}
        return day.served.answer(call)

    async with playing(day, server, authority.certificate, answer=answer) as (rounds, _):
        while not sent:
            await day.sleep(await rounds.round() or 1.0)
    assert len(sent) == 1, "it may have been made"


async def test_an_eviction_that_is_forbidden_is_no_budget(authority: Authority, server: Pair) -> None:
    day = Day((1,))
    day.served.may_evict = False

    def first() -> Object:
        workers = day.status()["workers"]
        assert isinstance(workers, list)
        return next(worker for worker in workers if worker["node"] == "worker-1")

    async with playing(day, server, authority.certificate) as (rounds, _):
        while day.now_s < 120.0:
            await day.sleep(await rounds.round() or 1.0)
        assert (first()["code"], first()["step"]) == ("RightMissing", "Drain")
        assert "pods/eviction" in str(first()["message"])
        day.served.may_evict, day.served.budget_allows = True, False
        for _ in range(3):
            await day.sleep(await rounds.round() or 1.0)
        assert first()["code"] == "PodsLeft", "the last answer counts"
