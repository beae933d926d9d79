"""Processes of the extender beside one API server: one serves, another follows, and a deposed one writes nothing."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from gpuvirt.clock import RealClock
from gpuvirt.extender.intervals import ExtenderIntervals
from gpuvirt.extender.places import BindingWait
from gpuvirt.extender.process import ExtenderProcess
from gpuvirt.facts.ids import PodUid
from gpuvirt.kube.election import Terms
from gpuvirt.shares.index import Index
from tests.extender.namedobjects import Object
from tests.extender.podapi import PodApi
from tests.extender.pods import budget, node, pod
from tests.extender.processes import bind, get, is_ready, post, running, until

QUICK = Terms(duration_s=6, give_up_s=4.0, renew_s=0.2)


@pytest.fixture
def api() -> PodApi:
    api = PodApi()
    api.put("nodes", node("n", a=1000))
    return api


async def test_pods_are_bound_until_their_gpu_is_full(api: PodApi, tmp_path: Path) -> None:
    async with running(api, tmp_path) as processes:
        process = await processes.start(elects=False)
        await until(lambda: is_ready(process))
        for number in range(4):
            api.put("pods", pod(f"p{number}", 300))
        assert [bool(await bind(process, f"p{number}")) for number in range(4)] == [False, False, False, True]
        answer = await post(process, "filter", Pod=pod("p3", 300), NodeNames=["n"])
        assert answer["NodeNames"] == []
        ended = {**api.pods["default/p0"], "status": {"phase": "Succeeded"}}
        api.put("pods", ended)
        await until(lambda: process.extender.index.totals().free == 400)
        assert await bind(process, "p3") == ""
        assert (await get(process, "/readyz")) == (200, "ok\n")
        metrics = (await get(process, "/metrics"))[1].splitlines()
        assert 'gpuvirt_extender_units{state="free"} 100' in metrics
        assert 'gpuvirt_extender_requests_total{verb="bind",result="ok"} 4' in metrics


async def test_one_replica_serves_and_another_takes_over_at_once_when_it_ends(api: PodApi, tmp_path: Path) -> None:
    async with running(api, tmp_path) as processes:
        first = await processes.start()
        await until(lambda: is_ready(first))
        second = await processes.start()
        api.put("pods", pod("p", 600))
        api.put("pods", pod("q", 600))
        await until(lambda: second.missing is None)
        assert await get(second, "/readyz") == (200, "ok\n"), "a standby is ready to take over"
        assert "does not lead" in str(await bind(second, "p"))
        assert await bind(first, "p") == ""
        processes.tasks[0].cancel()
        await until(lambda: is_ready(second))
        assert "does not fit" in str(await bind(second, "q"))
        assert len(api.bindings) == 1


async def test_a_new_leader_lists_the_pods_again_before_it_answers(api: PodApi, tmp_path: Path) -> None:
    """The watch of a standby may lag behind the bindings of its predecessor."""
    async with running(api, tmp_path) as processes:
        first = await processes.start()
        await until(lambda: is_ready(first))
        second = await processes.start()
        for name in "pq":
            api.put("pods", pod(name, 600))
            await until(lambda: second.extender.index.pod("default", name) is not None)  # noqa: B023
        api.watches_lag = True
        assert await bind(first, "p") == ""
        processes.tasks[0].cancel()
        await until(lambda: is_ready(second))
        assert "does not fit" in str(await bind(second, "q"))


async def test_a_pod_that_ended_unseen_by_a_standby_frees_its_units(api: PodApi, tmp_path: Path) -> None:
    async with running(api, tmp_path) as processes:
        first = await processes.start()
        await until(lambda: is_ready(first))
        second = await processes.start()
        for name in "pq":
            api.put("pods", pod(name, 600))
        assert await bind(first, "p") == ""
        await until(lambda: second.extender.index.totals().free == 400)
        api.watches_lag = True
        api.delete("pods", "default/p")
        processes.tasks[0].cancel()
        await until(lambda: is_ready(second))
        assert second.extender.index.totals().free == 1000


async def test_a_pod_waits_for_units_that_are_only_held_by_an_error(api: PodApi, tmp_path: Path) -> None:
    """kube-scheduler tries a pod with an error again after seconds, and a pod that was refused after minutes."""
    async with running(api, tmp_path) as processes:
        process = await processes.start(elects=False)
        await until(lambda: is_ready(process))
        for name in "pqr":
            api.put("pods", pod(name, 600 if name != "r" else 1001))
        await until(lambda: process.extender.index.pod("default", "q") is not None)
        api.faults.before_write, api.faults.reads_fail = [(500, {"message": "timed out"})], True
        assert "is not known" in str(await bind(process, "p"))
        answer = await post(process, "filter", Pod=pod("q", 600), NodeNames=["n"])
        assert "held for bindings whose outcome is not known" in str(answer["Error"])
        answer = await post(process, "filter", Pod=pod("q", 600), NodeNames=["other"])
        assert "Error" not in answer, "nothing is held on the node that kube-scheduler asks for"
        answer = await post(process, "filter", Pod=pod("q", 2000), NodeNames=["n"])
        assert "Error" not in answer, "it does not fit without what is held, either"
        answer = await post(process, "filter", Pod=pod("p", 600), NodeNames=["n"])
        assert answer["NodeNames"] == ["n"], "the units are held for this pod"
        api.faults.reads_fail = False
        await until(lambda: not process.extender.binder.writes.held)
        assert api.changed == ["default/p"], "kube-scheduler places a pod again that has changed"
        answer = await post(process, "filter", Pod=pod("q", 600), NodeNames=["n"])
        assert answer["NodeNames"] == ["n"]


async def test_requests_wait_until_a_new_leader_has_changed_all_pods(api: PodApi, tmp_path: Path) -> None:
    for number in range(3):
        api.put("pods", pod(f"p{number}", 300))
    api.faults.changes_fail = True
    async with running(api, tmp_path) as processes:
        process = await processes.start(elects=False)
        await until(lambda: "3 pods" in str(process.extender.missing))

        async def mend() -> None:
            await RealClock().sleep(0.3)
            api.faults.changes_fail = False

        error, _ = await asyncio.gather(bind(process, "p0"), mend())
        assert error == ""
    assert sorted(api.changed) == ["default/p0", "default/p1", "default/p2"]


async def test_a_pod_that_a_webhook_lets_nobody_change_waits_alone(api: PodApi, tmp_path: Path) -> None:
    """Its units stay free on each GPU; a pod that only these keep waiting is tried again soon, and so is it itself."""
    api.put("pods", pod("frozen", 300))
    api.faults.unchangeable = {"default/frozen"}
    async with running(api, tmp_path) as processes:
        process = await processes.start(elects=False)
        await until(lambda: is_ready(process))
        for name, units in (("frozen", 300), ("fits", 700), ("waits", 800), ("large", 2000)):
            if name != "frozen":
                api.put("pods", pod(name, units))
        frozen = await post(process, "filter", Pod=pod("frozen", 300), NodeNames=["n"])
        assert 'webhook "frozen.example.com" denied the request' in str(frozen["Error"])
        assert "held" in str((await post(process, "filter", Pod=pod("waits", 800), NodeNames=["n"]))["Error"])
        refused = await post(process, "filter", Pod=pod("large", 2000), NodeNames=["n"])
        assert (refused.get("Error", ""), refused["NodeNames"]) == ("", [])
        assert process.extender.index.totals().pods == 0, "it has no node"
        assert await bind(process, "fits") == ""
        api.faults.unchangeable.clear()
        await until(lambda: process.extender.index.totals().free == 300)
        assert await bind(process, "frozen") == ""


async def test_a_leader_that_cannot_renew_binds_nothing(api: PodApi, tmp_path: Path) -> None:
    async with running(api, tmp_path, terms=QUICK) as processes:
        process = await processes.start()
        await until(lambda: is_ready(process))
        api.put("pods", pod("p", 600))
        api.leases.reply = 500, {"message": "etcdserver: no leader"}
        await until(lambda: not process.extender.leads)
        assert "does not lead" in str(await bind(process, "p"))
        api.leases.reply = None
        await until(lambda: is_ready(process))
        assert await bind(process, "p") == ""


async def test_a_process_that_was_stopped_binds_nothing_when_it_goes_on(api: PodApi, tmp_path: Path) -> None:
    """Its lease has ended by the clock, although it has not noticed yet."""
    async with running(api, tmp_path, terms=QUICK) as processes:
        process = await processes.start()
        await until(lambda: is_ready(process))
        api.put("pods", pod("p", 600))
        api.leases.reply = 500, {"message": "stopped"}
        await until(lambda: process.extender.missing is not None)
        answer = await process.extender.answer("bind", msgspec.json.encode({}))
        assert b"does not lead" in answer.body
    assert api.bindings == []


async def test_a_binding_under_way_is_finished_before_the_lease_is_released(api: PodApi, tmp_path: Path) -> None:
    async with running(api, tmp_path) as processes:
        process = await processes.start()
        await until(lambda: is_ready(process))
        api.put("pods", pod("p", 600))
        api.faults.silent = True

        async def stop() -> None:
            await until(lambda: len(api.bindings) == 1)
            processes.tasks[0].cancel()

        error, _ = await asyncio.gather(bind(process, "p"), stop())
        assert error == "", "the pod was read after the write that was not answered"
        await until(lambda: "holderIdentity': ''" in str(api.leases.objects["gpuvirt-extender"]))


async def test_a_process_that_ends_amid_its_election_leaves_no_lease(api: PodApi, tmp_path: Path) -> None:
    """Otherwise no process would lead until the lease expires, as in an upgrade that ends several replicas."""
    async with running(api, tmp_path) as processes:
        api.leases.silent = True
        await processes.start()
        await until(lambda: "gpuvirt-extender" in api.leases.objects)
        api.leases.silent = False
        processes.tasks[0].cancel()
        await until(processes.tasks[0].done)
        assert "holderIdentity': ''" in str(api.leases.objects["gpuvirt-extender"])


async def test_the_next_pod_waits_for_the_binding_of_the_one_before(api: PodApi, tmp_path: Path) -> None:
    """kube-scheduler sends a binding beside the next pod's filter: in between, the last piece looks free."""
    longer_than_a_busy_computer_takes = ExtenderIntervals(turn_s=30.0)
    async with running(api, tmp_path, intervals=longer_than_a_busy_computer_takes) as processes:
        process = await processes.start(elects=False)
        await until(lambda: is_ready(process))
        for name in ("warm", "p", "q"):
            api.put("pods", pod(name, 500))
            api.put("nodes", node(name, a=500))
        await until(lambda: len(process.extender.index.nodes) == 4)

        async def place(name: str) -> Object:
            return await post(process, "filter", Pod=pod(name, 500), NodeNames=["p"])

        await place("warm")
        assert await bind(process, "warm", to="warm") == ""
        await place("p")
        answer, error = await asyncio.gather(place("q"), bind_later(process, "p", to="p"))
        assert (error, answer["NodeNames"]) == ("", [])


async def bind_later(process: ExtenderProcess, name: str, to: str) -> object:
    await RealClock().sleep(0.005)
    return await bind(process, name, to)


async def test_a_client_that_never_binds_is_slowed_down_once() -> None:
    clock = RealClock()
    kept = BindingWait(clock)
    kept.place(PodUid("a"))
    await kept.wait(PodUid("b"))
    kept.bind(PodUid("a"))
    for name in "cdef":
        kept.place(PodUid(name))
        await asyncio.gather(kept.wait(PodUid("x")), kept.wait(PodUid("y")))
        assert not kept._client_binds, "no binding came, so that the next pods do not wait"
    kept.place(PodUid("z"))
    kept.bind(PodUid("z"))
    assert kept._client_binds


async def test_a_fault_of_the_extender_is_answered_and_ends_nothing(
    api: PodApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("by accident")

    async with running(api, tmp_path) as processes:
        process = await processes.start(elects=False)
        await until(lambda: is_ready(process))
        monkeypatch.setattr(Index, "rows_for", fail)
        answer = await post(process, "filter", Pod=pod("p", 300), NodeNames=["n"])
        assert answer["Error"] == "filter: the extender failed: ZeroDivisionError: by accident; its log has more"
        assert (await get(process, "/healthz"))[0] == 200


async def test_a_long_search_for_victims_ends_with_the_nodes_found_so_far(api: PodApi, tmp_path: Path) -> None:
    for name in ("m", "o"):
        api.put("nodes", node(name, a=1000))
        api.put("pods", pod(f"on-{name}", 800, on=name, gpus=[{"a": 800}]))
    async with running(api, tmp_path, intervals=ExtenderIntervals(preempt_s=0.0)) as processes:
        process = await processes.start(elects=False)
        await until(lambda: is_ready(process))
        asked = {name: {"Pods": [{"UID": f"uid-on-{name}"}]} for name in ("m", "o")}
        answer = await post(process, "preempt", Pod=pod("p", 500, priority=9), NodeNameToMetaVictims=asked)
    assert answer == {"NodeNameToMetaVictims": {"m": {"Pods": [{"UID": "uid-on-m"}], "NumPDBViolations": 0}}}


async def test_a_budget_that_changes_protects_its_pods_from_the_next_preemption_on(api: PodApi, tmp_path: Path) -> None:
    api.put("pods", pod("kept", 500, on="n", gpus=[{"a": 500}], labels={"app": "db"}))
    api.put("pods", pod("other", 500, on="n", gpus=[{"a": 500}]))
    asked = {"n": {"Pods": [{"UID": "uid-kept"}], "NumPDBViolations": 0}}

    async with running(api, tmp_path) as processes:
        process = await processes.start(elects=False)
        await until(lambda: is_ready(process))

        async def chosen() -> str:
            answer = await post(process, "preempt", Pod=pod("p", 500, priority=9), NodeNameToMetaVictims=asked)
            return str(answer["NodeNameToMetaVictims"])

        assert "uid-kept" in await chosen()
        api.put("poddisruptionbudgets", budget("db", 0, app="db"))
        await until(lambda: len(process.extender.budgets) == 1)
        assert "uid-other" in await chosen()


async def test_no_request_is_answered_before_the_budgets_are_listed(api: PodApi, tmp_path: Path) -> None:
    api.budgets_reply = 403, {"message": "poddisruptionbudgets.policy is forbidden"}
    async with running(api, tmp_path) as processes:
        process = await processes.start(elects=False)
        await until(lambda: process.extender.index.is_ready)
        await until(lambda: "is forbidden" in str(process.extender.missing))
        answer = await post(process, "filter", Pod=pod("p", 300), NodeNames=["n"])
        assert "not all nodes, pods and PodDisruptionBudgets are listed yet" in str(answer["Error"])
        assert (await get(process, "/readyz"))[0] == 503
        api.budgets_reply = None
        await until(lambda: is_ready(process))
