"""Pods that end, by the API server: their ids are withdrawn at once, their vGPUs stay until the kubelet frees them."""

from pathlib import Path

import msgspec
import pytest

from gpuvirt.agent.cluster.clusterside import EndingPods
from gpuvirt.agent.cluster.podshares import RequestingPod
from gpuvirt.facts.ids import PodUid
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.kinds.core import STATIC_POD
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.model.offers.ondemand.offer import REPLACED_S, PodEnds
from tests.agent.node.simnode import SimNode, at_once, running_node
from tests.agent.ondemand.pods import ON_DEMAND, Pods, counts, one_p100, settled, vgpus

V8Q = "tencent.com/vgpu-86"
A_POD = PodUid("a")
A, B = PodUid("uid-of-a"), PodUid("uid-of-b")


def pod(uid: str, phase: str = "Running", deleted: str = "", static: str = "") -> RequestingPod:
    """Return a pod of the node as the API server has it."""
    annotations = {STATIC_POD: static} if static else {}
    metadata = {
        "name": uid,
        "namespace": "default",
        "uid": uid,
        "deletionTimestamp": deleted,
        "annotations": annotations,
    }
    return msgspec.convert({"metadata": metadata, "status": {"phase": phase}}, RequestingPod)


def all_of(*pods: RequestingPod) -> Delta[RequestingPod]:
    return Delta({ObjectKey("default", pod.metadata.name): pod for pod in pods})


class Ending:
    """The reports to an agent about pods that end."""

    def __init__(self, *on_demand: str) -> None:
        self.on_demand = frozenset(PodUid(uid) for uid in on_demand)
        self.reported = PodEnds()
        self.pods = EndingPods(lambda: self.on_demand, self._report)

    def _report(self, ends: PodEnds) -> None:
        self.reported = ends

    def after(self, *pods: RequestingPod) -> set[str]:
        self.pods.observe(all_of(*pods))
        return set(self.reported.all)


def test_a_pod_ends_when_it_is_deleted_or_has_run() -> None:
    ending = Ending()
    deleted = pod("b", deleted="2026-01-01T00:00:00Z")
    assert ending.after(pod("a"), deleted, pod("c", "Succeeded"), pod("d", "Failed"), pod("e", "Pending")) == {
        "b",
        "c",
        "d",
    }
    assert ending.reported.deleted == {"b"}, "it may still run"
    assert ending.after(pod("a")) == {"b", "c", "d", "e"}
    assert ending.reported.deleted == set()
    assert ending.after(pod("a", "Failed", deleted="2026-01-01T00:00:00Z")) == {"a"}
    assert ending.reported == PodEnds(ended=frozenset({A_POD})), "it has run"
    assert ending.after(pod("a")) == set(), "no vGPU is allocated to those that are gone"


def test_a_pod_that_is_gone_ends_as_long_as_the_kubelet_has_its_vgpu() -> None:
    ending = Ending("a")
    assert ending.after(pod("a")) == set()
    for _ in range(3):
        assert ending.after(pod("b")) == {"a"}
    ending.on_demand = frozenset()
    ending.after()
    assert ending.after() == set()


def test_a_pod_that_was_gone_before_the_agent_started_ends_with_the_first_list() -> None:
    assert Ending("gone").after(pod("a")) == {"gone"}


def test_a_pod_that_the_watch_does_not_report_yet_is_not_taken_for_gone() -> None:
    ending = Ending()
    assert ending.after(pod("a")) == set()
    ending.on_demand = frozenset({PodUid("new")})
    assert ending.after(pod("a")) == set()
    assert ending.after(pod("a"), pod("new")) == set()
    assert ending.after(pod("a")) == {"new"}


def test_a_static_pod_has_the_uid_that_the_kubelet_has_for_it() -> None:
    ending = Ending("of-file")
    assert ending.after(pod("mirror", static="of-file")) == set()
    assert ending.after(pod("mirror", "Failed", static="of-file")) == {"of-file"}


async def test_the_ids_of_an_ending_pod_are_withdrawn_at_once_and_its_vgpu_stays(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        first, second = pods.start("a", V8Q), pods.start("b", V8Q)
        await settled(node)
        assert node.agent.observations.on_demand_pods == {A, B}
        at_once(node.agent.observations.ask_kubelet.wait())
        node.agent.observations.observe_pod_ends(PodEnds(deleted=frozenset({PodUid("other")})))
        with pytest.raises(AssertionError, match="waits"):
            at_once(node.agent.observations.ask_kubelet.wait())
        node.agent.observations.observe_pod_ends(PodEnds(deleted=frozenset({A, PodUid("other")})))
        at_once(node.agent.observations.ask_kubelet.wait())  # the kubelet is asked soon
        await node.advance(1.0)
        listed = {device.id for view in node.view.resources for device in view.devices}
        assert listed == set(second.devices)
        assert vgpus(node) == sorted((*first.vgpus, *second.vgpus)), "the kubelet has not freed it"
        pods.end(first)
        await settled(node)
        assert vgpus(node) == second.vgpus
        assert counts(node)["vgpu-86"] == 2


async def test_an_id_comes_back_while_its_pod_does_not_end(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        first = Pods(node).start("a", V8Q)
        await settled(node)
        node.agent.observations.observe_pod_ends(PodEnds(deleted=frozenset({A})))
        await node.advance(1.0)
        node.agent.observations.observe_pod_ends(PodEnds())
        await node.advance(1.0)
        assert first.devices[0] in {device.id for view in node.view.resources for device in view.devices}


def listed(node: SimNode, resource: str = V8Q) -> list[str]:
    return [device.id for view in node.view.resources if view.name == resource for device in view.devices]


async def test_the_vgpu_of_a_pod_that_has_ended_keeps_its_place_under_another_id(tmp_path: Path) -> None:
    """The scheduler counts the pod no more, so the next one comes at once; its admission waits for the removal."""
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        first, second = pods.start("a", V8Q), pods.start("b", V8Q)
        await settled(node)
        node.agent.observations.observe_pod_ends(PodEnds(ended=frozenset({A})))
        await node.advance(0.5)
        (other,) = set(listed(node)) - set(second.devices)
        assert other not in first.devices
        pods.end(first)
        for _ in range(6):
            await node.report_account()
            await node.advance(0.25)
            assert other in listed(node), "its place is never gone, and the id stays the same"
            assert len(listed(node)) == 2
        assert vgpus(node) == second.vgpus
        assert pods.start("c", V8Q, other).vgpus != first.vgpus


async def test_the_place_of_a_vgpu_that_stays_is_promised_for_a_while_only(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        pods = Pods(node)
        first, second = pods.start("a", V8Q), pods.start("b", V8Q)
        await settled(node)
        node.agent.observations.observe_pod_ends(PodEnds(ended=frozenset({A})))
        await node.advance(REPLACED_S - 1.0)
        assert len(listed(node)) == 2
        await node.advance(1.5)
        assert listed(node) == list(second.devices), "the kubelet has not freed it"
        await node.advance(REPLACED_S)
        assert listed(node) == list(second.devices)
        assert vgpus(node) == sorted((*first.vgpus, *second.vgpus))
