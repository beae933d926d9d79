"""An evening of a schedule whose workers are KubeVirt's VMs: the controller's rounds, on one GPU."""

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpuvirt.facts.ids import Namespace, NodeName
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.kinds.vgpuschedule import VgpuSchedule
from gpuvirt.model.workers.hypervisor import Hypervisor
from gpuvirt_schedules.commands.schedulequestions import ScheduleQuestions
from gpuvirt_schedules.controller.rounds import Rounds
from gpuvirt_schedules.controller.scheduleapi import ScheduleObjects
from gpuvirt_schedules.controller.secretconnection import Opener
from gpuvirt_schedules.controller.vmcalls import VmCalls
from gpuvirt_schedules.decide.forecast import PlannedAction
from gpuvirt_schedules.hypervisors.connection import open_hypervisor
from tests.kube.scriptedapi import Call, Reply, scripted
from tests.schedules.kubevirtday import KUBEVIRT, KubeVirtDay
from tests.schedules.scheduleday import SCHEDULE, SPEC
from tests.schedules.servedcommands import answering
from tests.schedules.servedkubevirt import NAMESPACE
from tests.schedules.servedschedule import Object
from tests.web.certificates import Authority, Pair

BOTH: Object = {"kubeVirt": {"namespace": NAMESPACE}, "vsphere": {"secretRef": {"name": "vcenter"}}}


@asynccontextmanager
async def playing(day: KubeVirtDay, server: Pair, ca: Path) -> AsyncIterator[Rounds]:
    async with scripted(day.answer, server, ca) as api:
        client = Client(Credentials("127.0.0.1", api.port, "gpuvirt", ca=ca, token=b"x"))
        opener = Opener(client, "gpuvirt", day, open_hypervisor, lambda: math.inf)
        objects = ScheduleObjects(client, "gpuvirt", "gpus", day)

        async def connect() -> Hypervisor:
            return opener.connect(lambda: objects.stored)

        yield Rounds(objects, VmCalls(connect, day, lambda: True, 0.0), day)
        client.close()


async def test_an_evening_and_a_morning_restore_each_strategy(authority: Authority, server: Pair) -> None:
    day = KubeVirtDay()
    before = {name: json.dumps(guest.spec) for name, guest in day.kubevirt.guests.items()}
    async with playing(day, server, authority.certificate) as rounds:
        await rounds.run()
        assert day.running() == ["worker-5"]
        assert (day.status()["phase"], day.conditions()["Ready"]) == ("night", ("True", "PhaseReached"))
        assert "POST /api/v1/namespaces/default/pods/train-0/eviction" in day.served.writes
        day.now_s += 11 * 3600.0  # past 7 in the morning
        await day.sleep(1.0)
        await rounds.run()
    assert day.running() == ["worker-1", "worker-2", "worker-3", "worker-4"]
    assert day.status()["phase"] == "day"
    assert {name: json.dumps(guest.spec) for name, guest in day.kubevirt.guests.items()} == before
    guests = day.kubevirt.guests.values()
    assert [guest.annotations for guest in guests] == [{}] * 5
    assert [guest.power_cuts for guest in guests] == [0] * 5
    assert {day.node(f"worker-{number}") for number in (1, 2, 3, 4)} == {(None, None)}


@pytest.mark.parametrize(("policy", "phase"), [("Hold", None), ("Force", "night")])
async def test_a_guest_that_does_not_end_holds_the_switch_unless_it_is_forced(
    authority: Authority, server: Pair, policy: str, phase: str | None
) -> None:
    day = KubeVirtDay({**KUBEVIRT, "drain": {"timeout": "10m", "onTimeout": policy}})
    stuck = day.kubevirt.guests["worker-2"]
    stuck.ignores_shutdown, stuck.grace_s = True, 7200.0
    async with playing(day, server, authority.certificate) as rounds:
        while day.now_s < 100.0 + 1800.0 and (pause_s := await rounds.round()) is not None:
            await day.sleep(max(pause_s, 15.0))
    assert day.status().get("phase") == phase
    assert stuck.power_cuts == (policy == "Force")
    if policy == "Hold":
        assert day.conditions()["Held"][0] == "True"
        assert day.kubevirt.guests["worker-5"].boots == 0, "its GPU is not free"


@pytest.mark.parametrize(
    "changes", [{"leave": "Suspend"}, {"hypervisor": BOTH}, {"hypervisor": {}}], ids=["suspend", "two", "none"]
)
async def test_a_spec_that_kubevirt_can_not_follow_is_a_condition_before_anything_happens(
    authority: Authority, server: Pair, changes: Object
) -> None:
    day = KubeVirtDay({**KUBEVIRT, **changes})
    async with playing(day, server, authority.certificate) as rounds:
        assert await rounds.round() is None
    assert day.conditions()["Valid"] == ("False", "ScheduleInvalid")
    assert (day.served.writes, day.kubevirt.writes) == ([f"PATCH {SCHEDULE}/status"], [])


async def test_the_connection_follows_a_schedule_that_names_another_hypervisor(
    authority: Authority, server: Pair
) -> None:
    day = KubeVirtDay()
    async with scripted(day.answer, server, authority.certificate) as api:
        client = Client(Credentials("127.0.0.1", api.port, "gpuvirt", ca=authority.certificate, token=b"x"))
        objects = ScheduleObjects(client, "gpuvirt", "gpus", day)
        opener = Opener(client, "gpuvirt", day, open_hypervisor, lambda: math.inf)
        connection = opener.connect(lambda: objects.stored)
        await objects.schedule()
        assert isinstance(objects.stored, VgpuSchedule)
        assert isinstance(await connection.read(), dict)
        day.served.put(SCHEDULE, {"metadata": {"generation": 2}, "spec": SPEC})
        await objects.schedule()
        unknown = await connection.read()
        assert "the Secret vcenter of namespace gpuvirt does not exist" in str(unknown)
        await connection.close()
        client.close()


async def test_a_plan_shows_no_step_that_a_check_refuses(authority: Authority, server: Pair) -> None:
    day = KubeVirtDay()
    day.kubevirt.guests["worker-5"].spec["runStrategy"] = "Halted"
    day.now_s -= 7200.0  # before the night
    others = answering(day.served)

    def answer(call: Call) -> Reply:
        return day.answer(call) if "kubevirt.io" in call.path else others(call)

    async with scripted(answer, server, authority.certificate) as api:
        client = Client(Credentials("127.0.0.1", api.port, "gpuvirt", ca=authority.certificate, token=b"x"))
        questions = ScheduleQuestions(client, Namespace("gpuvirt"), day)
        check = await questions.check("gpus")
        plan = await questions.plan("gpus")
        day.kubevirt.guests["worker-5"].spec["runStrategy"] = "Manual"
        again = await questions.plan("gpus")
        client.close()
    (found,) = (worker for worker in check.workers if worker.node == "worker-5")
    assert found.start is not None
    assert found.start.is_possible is False
    for forecast, starts in ((plan.forecast, False), (again.forecast, True)):
        assert forecast is not None
        steps = {(step.node, step.action) for step in forecast.steps}
        assert ((NodeName("worker-5"), PlannedAction.START) in steps) is starts
        assert ((NodeName("worker-1"), PlannedAction.SHUT_DOWN) in steps) is True
    assert plan.forecast is not None
    (waits,) = plan.forecast.waiting
    assert (waits.node, str(waits.reason.code)) == ("worker-5", found.start.code)
    assert "runStrategy is Halted, and not by a schedule" in waits.reason.text
