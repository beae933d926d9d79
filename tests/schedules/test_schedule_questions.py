"""The output of `gpuvirt schedule` for a served schedule and a model hypervisor, and the override that it writes."""

import json
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from msgspec.structs import replace
from typing_extensions import override

from gpuvirt.errors import ConfigError
from gpuvirt.kube.failures import ConflictError, ForbiddenError, NotFoundError
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.workers.hypervisor import Power, VmKey, VmsReading, VmsUnknown
from gpuvirt.model.workers.status import SwitchCause
from gpuvirt_schedules.commands import schedulerender
from gpuvirt_schedules.controller.commandreading import written_schedule
from gpuvirt_schedules.decide.forecast import ForecastBudget, PlannedAction
from gpuvirt_schedules.decide.reports import ScheduleState, SwitchResult
from tests.agent.kubelet.kubeletnode import until
from tests.kube.scriptedapi import NOT_FOUND, Call, Reply
from tests.schedules.keptschedule import keeping
from tests.schedules.modelhypervisor import Connection
from tests.schedules.scheduleday import SCHEDULE, SPEC, Day, playing
from tests.schedules.schedulequestions import PASSWORD, asking, put_secret
from tests.schedules.servedcommands import BUDGETS, SELF_REVIEWS, answering
from tests.schedules.servedschedule import ATTACHMENTS, SCHEDULES, Object
from tests.web.certificates import Authority, Pair

PHASES = msgspec.convert(SPEC["phases"], list[dict[str, object]])


def put_budget(day: Day, allowed: int) -> None:
    path = f"{BUDGETS.replace('/poddis', '/namespaces/default/poddis')}/train"
    spec = {"selector": {"matchLabels": {"app": "train"}}}
    content: Object = {"metadata": {"namespace": "default"}, "spec": spec, "status": {"disruptionsAllowed": allowed}}
    day.served.put(path, content)


def ignore(_: SwitchResult) -> None:
    """Print nothing."""


async def test_a_plan_has_the_steps_that_the_controller_then_takes(authority: Authority, server: Pair) -> None:
    day = Day()
    put_secret(day)
    async with asking(day, server, authority.certificate) as questions:
        plan = await questions.plan("gpus")
    assert plan.assumed is None
    assert plan.forecast is not None
    assert plan.forecast.waiting == ()
    assert [switch.phase for switch in plan.switches] == ["night", "day"] * 10, "ten working days in two weeks"
    assert plan.switches[0].announced == plan.switches[0].at - timedelta(minutes=15)
    planned = {(step.node, step.action) for step in plan.forecast.steps}

    day.now_s += 7200.0
    calls: list[tuple[str, str]] = []
    day.hypervisor.on_call = lambda call, sender: calls.append((day.hypervisor.vms[call.vm].name, str(call.action)))
    async with playing(day, server, authority.certificate) as (rounds, _):
        await rounds.run()
    called = {(PlannedAction.SUSPEND, f"worker-{n}") for n in (1, 2, 3, 4)} | {(PlannedAction.START, "worker-5")}
    assert {(action, node) for node, action in calls} == called
    assert called <= {(action, node) for node, action in planned}
    assert ("worker-1", PlannedAction.EVICT) in planned
    assert {node for node, action in planned if action is PlannedAction.CORDON} == {
        name for name in ("worker-1", "worker-2", "worker-3", "worker-4") if day.node(name) == (True, "gpus")
    }


async def test_a_plan_has_no_steps_of_a_switch_in_years(authority: Authority, server: Pair) -> None:
    day = Day()
    put_secret(day)
    holds = {"phase": "day", "from": "2020-01-01T00:00", "until": "2099-01-01T00:00"}
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": {**SPEC, "overrides": [holds]}})
    async with asking(day, server, authority.certificate) as questions:
        plan = await questions.plan("gpus")
    assert (plan.switches, plan.forecast) == ((), None)
    assert plan.schedule.next_switch == datetime(2098, 12, 31, 23, tzinfo=UTC)


async def test_a_plan_shows_the_budgets_of_the_pods_that_it_evicts(authority: Authority, server: Pair) -> None:
    day = Day()
    put_secret(day)
    put_budget(day, 0)
    day.put_pod("train-1", "worker-2", labels={"app": "train"})
    async with asking(day, server, authority.certificate) as questions:
        plan = await questions.plan("gpus")
    assert plan.forecast is not None
    budgets = {step.target: step.budgets for step in plan.forecast.steps if step.action is PlannedAction.EVICT}
    assert budgets == {"default/train-0": (), "default/train-1": (ForecastBudget("default/train", 0),)}


async def test_budgets_that_may_not_be_listed_are_unknown(authority: Authority, server: Pair) -> None:
    day = Day()
    put_secret(day)

    def answer(call: Call) -> Reply:
        return (403, {"message": "forbidden"}) if call.path == BUDGETS else day.served.answer(call)

    async with asking(day, server, authority.certificate, answer) as questions:
        plan = await questions.plan("gpus")
    assert plan.forecast is not None
    assert [step.budgets for step in plan.forecast.steps if step.action is PlannedAction.EVICT] == [None]


async def test_a_pod_that_blocks_the_drain_is_named_by_the_plan(authority: Authority, server: Pair) -> None:
    day = Day()
    put_secret(day)
    day.put_pod("by-hand", "worker-3", ownerReferences=None)
    async with asking(day, server, authority.certificate) as questions:
        plan = await questions.plan("gpus")
    assert plan.forecast is not None
    waiting = {worker.node: str(worker.reason.code) for worker in plan.forecast.waiting}
    assert waiting == {"worker-3": "PodBlocksDrain", "worker-5": "GpuStillUsed"}


@pytest.mark.parametrize("lost", ["secret", "password", "hypervisor"])
async def test_a_plan_without_the_hypervisor_says_that_it_assumes(
    authority: Authority, server: Pair, lost: str
) -> None:
    day = Day()
    if lost != "secret":
        put_secret(day, **({"password": ""} if lost == "password" else {}))
    day.hypervisor.is_reachable = lost != "hypervisor"
    async with asking(day, server, authority.certificate) as questions:
        plan = await questions.plan("gpus")
        check = await questions.check("gpus")
    assert plan.assumed is not None
    assert plan.forecast is not None
    assert ("worker-5", PlannedAction.START) in {(step.node, step.action) for step in plan.forecast.steps}
    assert check.hypervisor is not None
    assert not check.holds
    assert PASSWORD not in f"{plan} {check}"


async def test_a_check_says_what_the_hypervisor_can_do_with_each_worker(authority: Authority, server: Pair) -> None:
    day = Day()
    put_secret(day)
    async with asking(day, server, authority.certificate) as questions:
        assert (await questions.check("gpus")).holds, "what is not proven and not used does not count"
        day.hypervisor.rigid.add(VmKey("key-2"))
        del day.hypervisor.vms[VmKey("key-3")]
        check = await questions.check("gpus")
    assert not check.holds
    found = {str(worker.node): worker for worker in check.workers}
    assert found["worker-1"].power is Power.ON
    assert found["worker-5"].power is Power.SUSPENDED
    ability = found["worker-2"].suspend
    assert ability is not None
    assert (ability.is_possible, ability.code) == (False, "SuspendNotSupported")
    assert found["worker-3"].suspend is None
    reason = found["worker-3"].reason
    assert reason is not None
    assert str(reason.code) == "VmNotMatched"
    assert day.served.writes == []


async def test_a_switch_by_hand_is_an_override_that_the_controller_follows(authority: Authority, server: Pair) -> None:
    day = Day()
    put_secret(day)
    kept: Object = {"phase": "day", "from": "2026-12-24T12:00", "until": "2026-12-28T07:00", "note": "Christmas"}
    passed = [
        {**kept, "from": "2025-12-24T12:00", "until": until} for until in ("2025-12-28T07:00", "2026-01-05T18:00")
    ]
    overrides = [passed[0], kept, passed[1]]
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": {**SPEC, "overrides": overrides}})
    async with asking(day, server, authority.certificate) as questions:
        shown: list[SwitchResult] = []
        dry = await questions.switch("gpus", "night", "", writes=False, before=shown.append)
        assert (dry.written, day.served.writes) == (False, [])
        found = await questions.switch("gpus", "night", "", writes=True, before=ignore)
    assert shown == [dry]
    assert found.forecast == dry.forecast
    assert found.forecast is not None
    assert found.forecast.waiting == ()
    assert found.written
    spec = day.served.objects[SCHEDULE]["spec"]
    assert isinstance(spec, dict)
    assert spec["overrides"] == [
        kept,
        {"phase": "night", "from": "2026-01-05T18:00", "until": "2026-01-05T20:00", "by": "alice"},
    ]
    assert spec["phases"] == SPEC["phases"]
    async with playing(day, server, authority.certificate) as (rounds, _):
        await rounds.run()
    assert day.status()["phase"] == "night", "two hours before its time"
    async with asking(day, server, authority.certificate) as questions:
        (switch,) = (await questions.history("gpus")).switches
    assert (switch.cause, switch.by, switch.evicted) == (SwitchCause.BY_HAND, "alice", 1)


@pytest.mark.parametrize(
    ("user", "by"), [("a" * 200, "a" * 128), ("", "an unknown user"), (None, "an unknown user")], ids=["a", "no", "old"]
)
async def test_the_user_of_a_switch_by_hand_may_be_unknown(
    authority: Authority, server: Pair, user: str | None, by: str
) -> None:
    day = Day()
    put_secret(day)
    known = answering(day.served, user or "")

    def answer(call: Call) -> Reply:
        return NOT_FOUND if user is None and call.path == SELF_REVIEWS else known(call)

    async with asking(day, server, authority.certificate, answer) as questions:
        await questions.switch("gpus", "night", "", writes=True, before=ignore)
    spec = day.served.objects[SCHEDULE]["spec"]
    assert isinstance(spec, dict)
    assert spec["overrides"][0]["by"] == by


def written(name: str, **changes: object) -> str:
    """Return a schedule as a file has it."""
    metadata = {"name": name}
    kind = {"apiVersion": "gpuvirt.io/v1alpha1", "kind": "VgpuSchedule"}
    return json.dumps({**kind, "metadata": metadata, "spec": {**SPEC, **changes}})


async def test_a_file_is_planned_as_the_schedule_whose_name_it_has(authority: Authority, server: Pair) -> None:
    day = Day()
    put_secret(day)
    async with playing(day, server, authority.certificate) as (rounds, _):
        await rounds.run()
    kept = dict(day.served.objects)
    earlier = [{**phase, "start": "0 5 * * *"} if phase["name"] == "day" else phase for phase in PHASES]
    async with asking(day, server, authority.certificate) as questions:
        day.now_s += 7200.0
        plan = await questions.plan_of(written_schedule(written("gpus", phases=earlier), "file"))
        new = await questions.plan_of(written_schedule(written("other", phases=earlier), "file"))
    assert (plan.schedule.phase, plan.switches[0].phase) == ("night", "day")
    assert plan.switches[0].at == datetime(2026, 1, 6, 4, tzinfo=UTC), "the file's time, not that of the cluster"
    assert plan.forecast is not None
    assert ("worker-5", PlannedAction.SUSPEND) in {(step.node, step.action) for step in plan.forecast.steps}
    assert {str(reason.code) for reason in new.schedule.reasons} == {"WorkerInTwoSchedules"}, "beside the applied one"
    assert day.served.objects == kept


async def test_a_file_of_a_new_schedule_is_planned_without_one_in_the_cluster(
    authority: Authority, server: Pair
) -> None:
    day = Day()
    put_secret(day)
    del day.served.objects[SCHEDULE]
    async with asking(day, server, authority.certificate) as questions:
        plan = await questions.plan_of(written_schedule(written("gpus"), "file"))
        assert plan.schedule.phase is None
        assert plan.forecast is not None
        assert ("worker-1", PlannedAction.SUSPEND) in {(step.node, step.action) for step in plan.forecast.steps}
        other = written_schedule(written("gpus"), "file")
        other = replace(other, metadata=replace(other.metadata, namespace="tenant"))
        with pytest.raises(ConfigError) as caught:
            await questions.plan_of(other)
    text = "VgpuSchedule gpus: $.metadata.namespace: is tenant; expected gpuvirt, or --namespace tenant"
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (written("gpus", announced="15m"), "file:1: $.spec.announced: no such key; kubectl explain vgpuschedule.spec"),
        (written("gpus", drain={"timeOut": "1m"}), "file:1: $.spec.drain.timeOut: no such key"),
        (written("gpus", phases=[{**PHASES[0], "node": {}}]), "file:1: $.spec.phases[0].node: no such key"),
        (written("gpus", leave="Stop"), "file:1: $.spec.leave: expected one of: Suspend, ShutDown"),
        (written("gpus").replace("VgpuSchedule", "ConfigMap"), "file:1: $.kind: is ConfigMap of gpuvirt.io/v1alpha1"),
        (written("gpus").replace("v1alpha1", "v1"), "file:1: $.kind: is VgpuSchedule of gpuvirt.io/v1; expected"),
        (written(""), "file:1: $.metadata: lacks the key name"),
        ("", "file:1: $: lacks the key apiVersion"),
    ],
)
def test_a_file_that_the_api_server_would_refuse_is_not_planned(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        written_schedule(text, "file")
    assert str(caught.value).startswith(error)


async def test_an_override_that_can_not_be_read_is_no_override_that_has_passed(
    authority: Authority, server: Pair
) -> None:
    day = Day()
    put_secret(day)
    unread: Object = {"phase": "day", "from": "2025-12-24T12:00", "until": "Sunday"}

    def change(_: SwitchResult) -> None:
        spec = {**SPEC, "overrides": [unread]}
        day.served.put(SCHEDULE, {**day.served.objects[SCHEDULE], "spec": spec})

    async with asking(day, server, authority.certificate) as questions:
        with pytest.raises(ConflictError):
            await questions.switch("gpus", "night", "", writes=True, before=change)


async def test_a_switch_is_not_written_over_a_change_of_the_schedule(authority: Authority, server: Pair) -> None:
    day = Day()
    put_secret(day)

    def change(_: SwitchResult) -> None:
        day.served.put(SCHEDULE, {**day.served.objects[SCHEDULE], "spec": {**SPEC, "suspend": True}})

    async with asking(day, server, authority.certificate) as questions:
        with pytest.raises(ConflictError):
            await questions.switch("gpus", "night", "", writes=True, before=change)
    spec = day.served.objects[SCHEDULE]["spec"]
    assert isinstance(spec, dict)
    assert "overrides" not in spec


@pytest.mark.parametrize(
    ("phase", "until", "end"),
    [
        ("day", "", None),
        ("day", "22:00", "2026-01-05T21:00:00+00:00"),
        ("night", "07:30", "2026-01-06T06:30:00+00:00"),
        ("night", "2026-01-07T06:00", "2026-01-07T05:00:00+00:00"),
    ],
)
async def test_a_switch_ends_at_its_time(
    authority: Authority, server: Pair, phase: str, until: str, end: str | None
) -> None:
    day = Day()
    put_secret(day)
    async with asking(day, server, authority.certificate) as questions:
        found = await questions.switch("gpus", phase, until, writes=True, before=ignore)
    assert found.written == (end is not None)
    if end is not None:
        assert found.end == datetime.fromisoformat(end)
        assert found.begin == datetime.fromisoformat("2026-01-05T17:00:00+00:00")


@pytest.mark.parametrize(
    ("phase", "until", "text"),
    [
        ("noon", "", "VgpuSchedule gpus: $.spec.phases: no phase has the name 'noon'; expected one of day, night"),
        ("night", "2026-01-05T17:59", "--until: is 2026-01-05T17:59, which has passed"),
        ("night", "tomorrow", "--until: is 'tomorrow'; expected 2026-12-28T07:00 or 07:00"),
        ("night", "2026-02-30T07:00", "--until: is '2026-02-30T07:00', which is not a date"),
    ],
)
async def test_a_switch_that_can_not_be_is_refused(
    authority: Authority, server: Pair, phase: str, until: str, text: str
) -> None:
    day = Day()
    put_secret(day)
    async with asking(day, server, authority.certificate) as questions:
        with pytest.raises(ConfigError) as caught:
            await questions.switch("gpus", phase, until, writes=True, before=ignore)
    assert str(caught.value).startswith(text)
    assert day.served.writes == []


async def test_a_schedule_with_faults_is_neither_planned_nor_switched(authority: Authority, server: Pair) -> None:
    day = Day()
    put_secret(day)
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": {**SPEC, "timeZone": "Europe/Berlim"}})
    async with asking(day, server, authority.certificate) as questions:
        plan, check = await questions.plan("gpus"), await questions.check("gpus")
        result = await questions.switch("gpus", "night", "", writes=True, before=ignore)
        detail = await questions.detail("gpus")
    assert {row.state for row in (plan.schedule, check.schedule, result.schedule, detail.schedule)} == {
        ScheduleState.INVALID
    }
    assert [str(reason.code) for reason in plan.schedule.reasons] == ["TimeZoneUnknown"]
    assert (plan.forecast, check.holds, result.written, day.served.writes) == (None, False, False, [])


async def test_a_worker_in_two_schedules_is_named(authority: Authority, server: Pair) -> None:
    day = Day()
    put_secret(day)
    day.served.put(f"{SCHEDULES}/more", {"metadata": {"generation": 1}, "spec": SPEC})
    async with asking(day, server, authority.certificate) as questions:
        plan = await questions.plan("gpus")
    assert plan.schedule.state is ScheduleState.INVALID
    assert {str(reason.code) for reason in plan.schedule.reasons} == {"WorkerInTwoSchedules"}


async def test_the_list_and_the_detail_follow_the_controller(authority: Authority, server: Pair) -> None:
    day = Day()
    put_secret(day)
    async with asking(day, server, authority.certificate) as questions:
        assert [row.state for row in await questions.rows()] == [ScheduleState.PENDING]
    day.now_s += 7200.0
    async with playing(day, server, authority.certificate) as (rounds, _):
        await rounds.run()
    async with asking(day, server, authority.certificate) as questions:
        day.now_s += 7200.0
        (row,) = await questions.rows()
        detail = await questions.detail("gpus")
        with pytest.raises(NotFoundError, match="no VgpuSchedule 'gpu'; expected one of gpus"):
            await questions.detail("gpu")
    assert (row.state, row.phase, row.next_phase, row.workers) == (ScheduleState.READY, "night", "day", 5)
    assert {worker.node: str(worker.step) for worker in detail.workers} == {
        **{f"worker-{n}": "Away" for n in (1, 2, 3, 4)},
        "worker-5": "Serving",
    }
    assert [(phase.name, phase.workers) for phase in detail.phases] == [
        ("day", "vgpu.type=v100-4q"),
        ("night", "vgpu.type=v100-16q"),
    ]


async def test_a_plan_names_the_window_that_the_clocks_leave_out(
    authority: Authority, server: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    day, phases = Day(), list[Object]()
    put_secret(day)
    for phase, start in (("day", "0 3 * * *"), ("night", "0 2 * * *")):
        phases.append({"name": phase, "start": start, "workers": {"matchLabels": {"phase": phase}}})
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": {**SPEC, "phases": phases}})
    day.now_s += timedelta(days=81).total_seconds()
    async with asking(day, server, authority.certificate) as questions:
        schedulerender.plan(await questions.plan("gpus"))
    shown = " ".join(capsys.readouterr().out.split())
    assert "Phase night does not begin before Sun 2026-03-29 03:00 CEST: the clocks skip the hour" in shown


class WithoutSecret(Connection):
    """The connection of a schedule whose Secret does not exist."""

    @override
    async def read(self) -> VmsReading:
        return VmsUnknown(ReasonCode.CREDENTIALS_INCOMPLETE, "CredentialsIncomplete: the Secret vcenter does not exist")


async def test_a_missing_secret_is_shown_also_without_workers(authority: Authority, server: Pair) -> None:
    day, phases = Day((1,)), list[Object]()
    for name, start in (("day", "0 7 * * *"), ("night", "0 20 * * *")):
        phases.append({"name": name, "start": start, "workers": {"matchLabels": {"pool": "none"}}})
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": {**SPEC, "phases": phases}})
    async with playing(day, server, authority.certificate, WithoutSecret) as (rounds, _):
        assert [await rounds.round() for _ in range(2)] == [60.0] * 2
    assert day.status()["phase"] == "night"
    assert (day.conditions()["Ready"], day.conditions()["Valid"]) == (
        ("False", "CredentialsIncomplete"),
        ("True", "Valid"),
    )
    assert day.events().count(("Warning", "CredentialsIncomplete")) == 1
    async with asking(day, server, authority.certificate) as questions:
        (row,) = await questions.rows()
        detail = await questions.detail("gpus")
    assert (row.state, [str(reason.code) for reason in row.reasons]) == (ScheduleState.HELD, ["CredentialsIncomplete"])
    assert "the Secret vcenter does not exist" in row.reasons[0].text
    assert detail.schedule.state is ScheduleState.HELD
    async with keeping(day, server, authority.certificate):  # another controller, once the Secret exists
        await until(lambda: day.conditions()["Ready"] == ("True", "PhaseReached"))


async def test_workers_that_wait_for_a_missing_secret_have_the_reason_themselves(
    authority: Authority, server: Pair
) -> None:
    day = Day((1,))
    async with playing(day, server, authority.certificate, WithoutSecret) as (rounds, _):
        assert await rounds.round() == 1.0
    assert day.conditions()["Ready"] == ("False", "CredentialsIncomplete")
    assert day.events() == [("Normal", "Switching")]


async def test_a_right_that_the_controller_lacks_is_shown(authority: Authority, server: Pair) -> None:
    day = Day((1,))
    put_secret(day)
    day.served.forbidden.add(ATTACHMENTS)
    async with playing(day, server, authority.certificate) as (rounds, _):
        await rounds.round()
    async with asking(day, server, authority.certificate) as questions:
        (row,) = await questions.rows()
    assert (row.state, str(row.reasons[0].code)) == (ScheduleState.HELD, "RightMissing")
    assert row.reasons[0].text.startswith("RightMissing: the VgpuSchedule waits for a right of the controller: list ")


async def test_a_refused_namespace_may_be_the_wrong_one(authority: Authority, server: Pair) -> None:
    """Without -n it is that of the kubeconfig, and users have the Role in the controller's."""
    day = Day()
    put_secret(day)
    day.served.forbidden.add(SCHEDULES)
    async with asking(day, server, authority.certificate) as questions:
        with pytest.raises(ForbiddenError, match=r"add to the Role: .*; or choose the controller's namespace with -n$"):
            await questions.rows()
