"""A node that is labelled, or registered again, between two switches is noticed; heartbeats are not."""

from collections.abc import Mapping

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.kube.cache import Delta
from gpuvirt.kube.kinds.core import ReadNode
from gpuvirt.kube.kinds.vgpuschedule import VgpuSchedule
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.workers.hypervisor import Power, VmKey
from gpuvirt_schedules.controller.keeper import ObservedNodes
from tests.agent.kubelet.kubeletnode import until
from tests.schedules.keptschedule import Opened, keeping, reached
from tests.schedules.scheduleday import Day
from tests.schedules.servedschedule import NODES, Object
from tests.web.certificates import Authority, Pair

DAY, NIGHT = {"vgpu.type": "v100-4q"}, {"vgpu.type": "v100-16q"}


def node(name: str, labels: Mapping[str, str], uid: str = "uid-1") -> ReadNode:
    return ReadNode(Metadata(name, uid=uid, labels=dict(labels)))


def delta(*nodes: ReadNode, removed: str = "") -> Delta[ReadNode]:
    found = {ObjectKey("", node.metadata.name): node for node in nodes}
    gone = frozenset({ObjectKey("", removed)}) if removed else frozenset[ObjectKey]()
    return Delta(found, frozenset(found), gone)


def schedule(workers: list[Object], **spec: object) -> VgpuSchedule:
    phases: list[Object] = [
        {"name": "day", "start": "0 7 * * *", "workers": {"matchLabels": DAY}},
        {"name": "night", "start": "0 20 * * *", "workers": {"matchLabels": NIGHT}},
    ]
    content: Object = {"metadata": {"name": "gpus"}, "spec": {"phases": phases, **spec}, "status": {"workers": workers}}
    return msgspec.convert(content, VgpuSchedule)


KNOWN: Object = {"node": "worker-1", "nodeUid": "uid-1", "phases": ["day"]}


def test_a_node_that_is_a_worker_already_moves_nothing() -> None:
    membership = ObservedNodes()
    assert membership.observe(delta(node("worker-1", DAY), node("web", {})))
    assert not membership.moved([schedule([KNOWN])])
    assert not membership.is_pending
    assert not membership.observe(delta(node("worker-1", DAY))), "a heartbeat"


def test_labels_uids_and_deletions_move_a_schedule_until_its_status_has_them() -> None:
    for change in (
        delta(node("worker-1", NIGHT)),
        delta(node("worker-1", {})),
        delta(node("worker-1", DAY, "uid-2")),
        delta(node("worker-1", {}, "uid-2")),
        delta(node("worker-2", DAY)),
        delta(removed="worker-1"),
    ):
        membership = ObservedNodes()
        membership.observe(delta(node("worker-1", DAY)))
        assert not membership.moved([schedule([KNOWN])])
        assert membership.observe(change)
        assert not membership.moved([schedule([KNOWN], suspend=True)]) or membership.is_pending
        membership.observe(change)


def test_a_node_that_is_back_before_a_round_has_followed_its_deletion_is_a_change() -> None:
    membership = ObservedNodes()
    membership.observe(delta(node("worker-1", DAY)))
    assert membership.observe(delta(removed="worker-1"))
    assert membership.observe(delta(node("worker-1", {}, "uid-2")))


def test_a_worker_that_has_lost_its_labels_moves_its_schedule_until_that_is_reported() -> None:
    membership = ObservedNodes()
    membership.observe(delta(node("worker-1", {}, "uid-2")))
    assert membership.moved([schedule([KNOWN])]) == {"gpus"}
    assert membership.is_pending
    assert not membership.moved([schedule([{**KNOWN, "code": "WorkerLabelsLost"}])])
    assert not membership.is_pending


def test_a_worker_that_does_not_exist_is_known_to_be_missing() -> None:
    membership = ObservedNodes()
    membership.observe(delta(removed="worker-1"))
    membership.observe(Delta({}))
    assert not membership.moved([schedule([{**KNOWN, "nodeUid": ""}])])


LABELS = st.sampled_from([DAY, NIGHT, {}, {"other": "x"}])


@given(st.lists(st.tuples(st.sampled_from(["worker-1", "worker-2"]), LABELS, st.sampled_from(["uid-1", "uid-2"]))))
def test_a_list_of_all_nodes_shows_what_single_changes_show(changes: list[tuple[str, dict[str, str], str]]) -> None:
    single, whole = ObservedNodes(), ObservedNodes()
    nodes: dict[ObjectKey, ReadNode] = {}
    for name, labels, uid in changes:
        nodes[ObjectKey("", name)] = node(name, labels, uid)
        single.observe(Delta(dict(nodes), frozenset({ObjectKey("", name)})))
    whole.observe(Delta(dict(nodes)))
    found = schedule([KNOWN])
    assert single.moved([found]) == whole.moved([found])


def keeper_observes(opened: Opened, *nodes: ReadNode) -> None:
    assert opened.keeper is not None
    opened.keeper.observe_nodes(delta(*nodes))


async def test_a_node_that_is_labelled_between_switches_is_a_worker_at_once(authority: Authority, server: Pair) -> None:
    day = Day((1, 2))
    day.hypervisor.vms[VmKey("key-2")].gpu = 0  # until it is a worker, its VM may run beside that of the night
    second = day.served.objects[f"{NODES}/worker-2"]
    day.served.put(f"{NODES}/worker-2", {**second, "metadata": {"labels": {}}})
    async with keeping(day, server, authority.certificate) as opened:
        await reached(day, "night")
        assert day.hypervisor.vms[VmKey("key-2")].power is Power.ON
        day.served.put(f"{NODES}/worker-2", {**second, "metadata": {"labels": DAY}})
        keeper_observes(opened, node("worker-2", DAY, "uid-worker-2"))
        await until(lambda: day.hypervisor.vms[VmKey("key-2")].power is Power.SUSPENDED)
        await reached(day, "night")


async def test_a_node_that_came_back_without_its_labels_is_reported_between_switches(
    authority: Authority, server: Pair
) -> None:
    day = Day((1,))
    async with keeping(day, server, authority.certificate) as opened:
        await reached(day, "night")
        await until(lambda: day.conditions()["Ready"] == ("True", "PhaseReached"))
        first = day.served.objects[f"{NODES}/worker-1"]
        day.served.put(f"{NODES}/worker-1", {**first, "metadata": {"uid": "uid-new", "labels": {}}})
        keeper_observes(opened, node("worker-1", {}, "uid-new"))
        await until(lambda: ("Warning", "WorkerLabelsLost") in day.events())
    workers = day.status()["workers"]
    assert isinstance(workers, list)
    assert [worker["code"] for worker in workers] == ["WorkerLabelsLost", ""]
