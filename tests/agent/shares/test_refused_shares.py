"""A refused share has a reason in metrics, and in one event about its pod, however often the kubelet tries again."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from gpuvirt.agent.cluster.keeping import KeeperDependencies
from gpuvirt.agent.cluster.podshares import AGAIN_S, RETRY_S, PodEvents
from gpuvirt.agent.shares.nodeshares import NodePods, Refusal, RefusedCall, RefusedPod, ShareRefusals
from gpuvirt.facts.ids import PodUid
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ApiError
from gpuvirt.model.reasons import Reason, ReasonCode, sharing
from gpuvirt.model.shares.demand import Demand
from gpuvirt.model.shares.node.choice import PodOnNode
from gpuvirt_sim.clock import SimClock
from gpuvirt_sim.kubelet.manager import AdmissionError
from gpuvirt_sim.kubelet.starting import StartError
from tests.agent.kubelet.kubeletnode import CLOCK, until
from tests.agent.shares.sharednode import SharedNode, shared_node
from tests.kube.scriptedapi import CONFLICT, NOT_FOUND, Call, Reply, scripted
from tests.web.certificates import Authority, Pair

EVENTS = "/apis/events.k8s.io/v1/namespaces/ns/events"
POD, OTHER = RefusedPod(PodUid("uid-1"), "ns", "p"), RefusedPod(PodUid("uid-2"), "ns", "q")
FULL = sharing.no_room("pod ns/p", 600, {"GPU-a": 400})
AWAY = sharing.pod_unknown("container main", "pod uid-1 is not known")
FORBIDDEN: Reply = 403, {"kind": "Status", "message": "forbidden", "code": 403}
BROKEN: Reply = 500, {"kind": "Status", "message": "broken", "code": 500}


async def three_pods_on_two_gpus(node: SharedNode) -> None:
    """Run two pods with 600 units each; the start of a third one, which was admitted before, is refused."""
    pods = [await node.admit(f"p{number}", 600, gpu="GPU-a") for number in range(3)]
    for pod in pods[:2]:
        await node.start(pod)
    for _ in range(3):
        with pytest.raises(StartError, match="NoRoom"):
            await node.start(pods[2])


async def test_each_refused_start_is_counted_and_its_pod_kept_once(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await three_pods_on_two_gpus(node)
        refusals = node.agent.shares.refusals
        assert refusals.counts == {("pre-start", "NoRoom"): 3}
        (refusal,) = refusals.take()
        assert (refusal.pod.namespace, refusal.pod.name) == ("default", "p2")
        assert refusal.reason.code is ReasonCode.NO_ROOM
        assert refusals.take() == ()


@pytest.mark.parametrize(("gpu", "fix"), [("GPU-a", "delete a pod"), (None, "if the pod's schedulerName is not")])
async def test_a_pod_that_no_extender_has_placed_is_told_of_the_scheduler_first(
    short_path: Path, gpu: str | None, fix: str
) -> None:
    async with shared_node(short_path) as node:
        pods = [await node.admit(name, 600, gpu=gpu) for name in "abc"]
        for pod in pods[:2]:
            await node.start(pod)
        with pytest.raises(StartError, match="NoRoom"):
            await node.start(pods[2])
        (refusal,) = node.agent.shares.refusals.take()
        assert refusal.reason.fix is not None
        assert refusal.reason.fix.startswith(fix)


async def test_a_refused_allocation_is_counted_without_a_pod(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        with pytest.raises(AdmissionError, match="NoRoom"):
            await node.admit("p", 1001)
        refusals = node.agent.shares.refusals
        assert refusals.counts == {("allocate", "NoRoom"): 1}
        assert refusals.take() == ()


async def test_a_start_without_the_kubelets_record_is_counted(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit("p", 300, gpu="GPU-a", report=False)
        with pytest.raises(StartError, match="ApiServerAway"):
            await node.start(pod)
        assert node.agent.shares.refusals.counts == {("pre-start", "ApiServerAway"): 1}
        assert node.agent.shares.refusals.take() == (), "the API server has not named the pod"


class Written:
    """The writer of events at a scripted API server, with what it wrote and reported."""

    def __init__(self) -> None:
        self.refusals = ShareRefusals()
        self.pods = NodePods()
        self.show(POD, OTHER)
        self.clock = SimClock()
        self.answer: Reply = 201, {"metadata": {"name": "e"}}
        self.calls: list[Call] = []
        self.reported: list[ApiError | None] = []

    def show(self, *pods: RefusedPod) -> None:
        """Let the API server have these pods."""
        self.pods.observe({pod.uid: PodOnNode(pod.uid, pod.namespace, pod.name, Demand(())) for pod in pods})

    def reply(self, call: Call) -> Reply:
        assert (call.method, call.path) == ("POST", EVENTS)
        self.calls.append(call)
        return self.answer

    @property
    def reasons(self) -> list[str]:
        return [json.loads(call.body)["reason"] for call in self.calls]

    def refuse(self, reason: Reason = FULL, pod: RefusedPod = POD) -> None:
        self.refusals.add(RefusedCall.PRE_START, reason, pod)

    async def until_written(self, *reasons: str) -> None:
        """Wait for these events in all, and a moment for more."""
        await until(lambda: len(self.calls) >= len(reasons) and not self.refusals.pending)
        await CLOCK.sleep(0.05)
        assert self.reasons == list(reasons)


@asynccontextmanager
async def writing(server: Pair, authority: Authority) -> AsyncIterator[Written]:
    written = Written()
    async with scripted(written.reply, server, authority.certificate) as served, asyncio.TaskGroup() as group:
        credentials = Credentials("127.0.0.1", served.port, "gpuvirt", ca=authority.certificate, token=b"x")
        on = KeeperDependencies(Client(credentials), "node01", written.clock, Random(1))  # noqa: S311
        writer = PodEvents(on, written.refusals, written.pods)
        task = group.create_task(writer.run(written.reported.append))
        yield written
        task.cancel()


async def test_an_event_names_the_pod_the_code_and_the_reason(server: Pair, authority: Authority) -> None:
    async with writing(server, authority) as written:
        written.refuse()
        await written.until_written("NoRoom")
        event = json.loads(written.calls[0].body)
    assert event["metadata"]["namespace"] == "ns"
    assert event["regarding"] == {"apiVersion": "v1", "kind": "Pod", "name": "p", "namespace": "ns", "uid": "uid-1"}
    assert (event["type"], event["reason"], event["note"]) == ("Warning", "NoRoom", FULL.text)
    assert (event["reportingController"], event["reportingInstance"]) == ("gpuvirt.io/node", "node01")
    assert written.reported == []


async def test_a_refusal_that_repeats_has_one_event_for_a_while(server: Pair, authority: Authority) -> None:
    async with writing(server, authority) as written:
        for _ in range(5):
            written.refuse()
            await written.until_written("NoRoom")
        written.refuse(AWAY)
        await written.until_written("NoRoom", "ApiServerAway")
        written.refuse(pod=OTHER)
        await written.until_written("NoRoom", "ApiServerAway", "NoRoom")
        await written.clock.advance(AGAIN_S + 1)
        written.refuse()
        await written.until_written("NoRoom", "ApiServerAway", "NoRoom", "NoRoom")


@pytest.mark.parametrize("answer", [FORBIDDEN, BROKEN])
async def test_an_event_that_was_not_written_is_tried_again(server: Pair, authority: Authority, answer: Reply) -> None:
    async with writing(server, authority) as written:
        good, written.answer = written.answer, answer
        written.refuse()
        await until(lambda: bool(written.reported))
        await written.until_written("NoRoom")
        written.answer = good
        await written.clock.advance(RETRY_S)
        await written.until_written("NoRoom", "NoRoom")
        await written.clock.advance(RETRY_S)
        await written.until_written("NoRoom", "NoRoom")
    assert [error is None for error in written.reported] == [False, True]


async def test_the_problem_ends_with_the_pod_that_has_no_event(server: Pair, authority: Authority) -> None:
    async with writing(server, authority) as written:
        written.answer = FORBIDDEN
        written.refuse()
        await until(lambda: len(written.reported) == 1)
        written.show(OTHER)
        await written.clock.advance(RETRY_S)
        await until(lambda: len(written.reported) == 2)
        await written.until_written("NoRoom")
    assert written.reported[-1] is None


@pytest.mark.parametrize("answer", [NOT_FOUND, CONFLICT])
async def test_an_event_about_a_namespace_that_is_gone_is_not_tried_again(
    server: Pair, authority: Authority, answer: Reply
) -> None:
    async with writing(server, authority) as written:
        written.answer = answer
        written.refuse()
        await written.until_written("NoRoom")
        written.refuse()
        await written.until_written("NoRoom")
        assert written.reported == []


def test_of_several_refusals_of_a_pod_the_latest_counts() -> None:
    refusals, again = ShareRefusals(), sharing.no_room("pod ns/p", 600, {"GPU-a": 300})
    for reason in (FULL, AWAY, again):
        refusals.add(RefusedCall.PRE_START, reason, POD)
    assert refusals.take() == (Refusal(POD, again), Refusal(POD, AWAY))
