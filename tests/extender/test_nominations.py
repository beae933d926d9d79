"""The room that evictions have freed for a pod is kept for it until it is bound, from pods of no higher priority."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.diagnosis.sharesreading import shares_for_pod
from gpuvirt.extender.filtering import filtered
from gpuvirt.extender.protocol import FilterResult, NodeArguments, PreemptionArguments, Victims
from gpuvirt.facts.ids import PodUid
from gpuvirt.shares.sharing import Sharing
from tests.extender.podapi import PodApi
from tests.extender.pods import (
    IndexUnderTest,
    N,
    Object,
    budgets_of,
    decoded_pod,
    index_of,
    node,
    pod,
    preempted_on,
    reserve,
)
from tests.extender.processes import bind, is_ready, post, running, until

PINNED = [pod(f"pinned-{gpu}", 700, on="n", gpus=[{gpu: 700}], priority=9) for gpu in "bc"]
"""Of three GPUs, one is free, and two have 300 units each."""
NOMINATED = pod("high", 700, priority=5, nominated="n")


def ask(found: IndexUnderTest, content: Object) -> FilterResult:
    asked = NodeArguments(decoded_pod(content), [N])
    index = found.index
    return filtered(asked, index.rows_for(asked.pod), Sharing(), (), index.nominated_for(asked.pod))


def fits(found: IndexUnderTest, content: Object) -> bool:
    return ask(found, content).node_names == ["n"]


@pytest.fixture
def freed() -> IndexUnderTest:
    """The node after the eviction: 1600 units are free, of which 700 are for a pod that is nominated."""
    return index_of([node("n", a=1000, b=1000, c=1000)], [*PINNED, NOMINATED])


async def test_a_pod_cannot_take_the_gpu_that_was_freed_for_another(tmp_path: Path) -> None:
    """By the sum of units both fit, and kube-scheduler's own filter lets the second pass."""
    api = PodApi()
    api.put("nodes", node("n", a=1000, b=1000, c=1000))
    for content in (*PINNED, NOMINATED, pod("low", 500)):
        api.put("pods", content)
    async with running(api, tmp_path) as processes:
        process = await processes.start(elects=False)
        await until(lambda: is_ready(process))
        answer = await post(process, "filter", Pod=pod("low", 500), NodeNames=["n"])
        assert answer["NodeNames"] == []
        assert "its largest free piece is 300" in str(await bind(process, "low"))
        assert await bind(process, "high") == ""
    assert len(api.bindings) == 1


def test_pods_that_leave_the_nominated_pod_its_gpu_fit(freed: IndexUnderTest) -> None:
    assert fits(freed, pod("low", 300))
    assert not fits(freed, pod("low", 301))
    reasons = ask(freed, pod("low", 301)).failed_and_unresolvable_nodes
    assert reasons[N].endswith(
        "the largest free piece of a GPU is 300; more is kept for pods that are nominated for the node"
    )
    assert ask(freed, pod("low", 2000)).failed_and_unresolvable_nodes[N].endswith("nominated for the node")
    assert ask(freed, pod("low", 4000)).failed_and_unresolvable_nodes[N].endswith("the node has 3 of them")


def test_a_pod_of_a_higher_priority_is_never_refused_for_a_nominated_one(freed: IndexUnderTest) -> None:
    assert fits(freed, pod("top", 700, priority=6))
    assert not fits(freed, pod("equal", 700, priority=5)), "as kube-scheduler counts nominated pods"


def test_a_nominated_pod_fits_where_it_is_nominated(freed: IndexUnderTest) -> None:
    assert fits(freed, NOMINATED)


def test_of_two_pods_that_are_nominated_for_the_same_gpu_one_fits(freed: IndexUnderTest) -> None:
    other = pod("other", 700, priority=5, nominated="n")
    freed.pods(other)
    assert (fits(freed, NOMINATED), fits(freed, other)) == (True, False)


@pytest.mark.parametrize(
    "after",
    [
        pod("high", 700, priority=5),
        pod("high", 700, priority=5, nominated="elsewhere"),
        pod("high", 700, priority=5, nominated="n", on="elsewhere", gpus=[{"x": 700}]),
    ],
    ids=["cleared", "another node", "bound elsewhere"],
)
def test_a_nomination_that_ends_keeps_nothing(freed: IndexUnderTest, after: Object) -> None:
    freed.pods(after)
    assert fits(freed, pod("low", 500))


def test_a_nominated_pod_that_is_deleted_keeps_nothing(freed: IndexUnderTest) -> None:
    freed.gone(NOMINATED)
    assert fits(freed, pod("low", 500))


def test_a_nominated_pod_that_is_bound_counts_once(freed: IndexUnderTest) -> None:
    freed.pods(pod("high", 700, priority=5, nominated="n", on="n", gpus=[{"a": 700}]))
    assert fits(freed, pod("low", 300))
    assert freed.free("n") == {"a": 300, "b": 300, "c": 300}


def test_a_nominated_pod_whose_binding_is_under_way_counts_once() -> None:
    found = index_of([node("n", a=1000)], [pod("high", 500, priority=5, nominated="n")])
    reserve(found, pod("high", 500, priority=5, nominated="n"))
    assert fits(found, pod("low", 500))


def test_the_gpu_of_a_victim_that_still_runs_is_kept() -> None:
    """400 units are free beside the victim; a pod that took them would leave the nominated pod no GPU."""
    victim = pod("victim", 600, on="n", gpus=[{"a": 600}])
    found = index_of([node("n", a=1000)], [victim, pod("high", 1000, priority=5, nominated="n")])
    assert fits(found, pod("low", 400)), "nothing is known of an eviction yet"
    metadata = victim["metadata"]
    assert isinstance(metadata, dict)
    found.pods({**victim, "metadata": {**metadata, "deletionTimestamp": "2030-01-01T00:00:00Z"}})
    assert not fits(found, pod("low", 400))


def test_preemption_leaves_a_nominated_pod_its_gpu() -> None:
    """A pod of a lower priority may not count on the GPU that was freed for another."""
    running_pod = pod("mid", 1000, on="n", gpus=[{"b": 1000}])
    found = index_of([node("n", a=1000, b=1000)], [running_pod, pod("high", 1000, priority=5, nominated="n")])
    asked = PreemptionArguments(decoded_pod(pod("p", 1000, priority=3)), {N: Victims([PodUid("uid-mid")])})
    chosen = preempted_on(asked, found, budgets_of())["n"]
    assert [pod.uid for pod in chosen.pods] == ["uid-mid"]


PODS = st.lists(
    st.builds(
        lambda units, priority, nominated: (units, priority, nominated),
        st.sampled_from([100, 300, 500, 700, 1000]),
        st.integers(0, 3),
        st.sampled_from(["", "n", "m"]),
    ),
    min_size=1,
    max_size=5,
)


@given(PODS, st.lists(st.sampled_from([200, 400, 600]), max_size=4))
def test_only_nominated_pods_of_no_lower_priority_take_room(
    pods: Sequence[tuple[int, int, str]], running_units: Sequence[int]
) -> None:
    nodes = [node(name, a=1000, b=1000) for name in "nm"]
    on_node = [
        pod(f"r{number}", units, on="n", gpus=[{"ab"[number % 2]: units}]) for number, units in enumerate(running_units)
    ]
    pending = [
        pod(f"p{number}", units, priority=priority, nominated=nominated)
        for number, (units, priority, nominated) in enumerate(pods)
    ]
    found = index_of(nodes, [*on_node, *pending])
    for content, (_, priority, _) in zip(pending, pods, strict=True):
        alone = index_of(nodes, [*on_node, content])
        above = [
            other
            for other, (_, its, where) in zip(pending, pods, strict=True)
            if other is not content and where == "n" and its >= priority
        ]
        if not above:
            assert fits(found, content) == fits(alone, content)
        elif fits(found, content):
            assert fits(alone, content), "a nomination makes no room"
    best = max(pods, key=lambda pod: pod[1])[1]
    first = [
        content
        for content, (_, priority, where) in zip(pending, pods, strict=True)
        if where == "n" and priority == best
    ]
    fitting = [content for content in first if fits(index_of(nodes, [*on_node, content]), content)]
    if fitting and len(fitting) == len(first):
        assert any(fits(found, content) for content in first), "two nominated pods never wait for each other"
    for content in pending:
        found.gone(content)
    assert fits(found, pending[0]) == fits(index_of(nodes, on_node), pending[0])


def test_a_nominated_pod_is_named_beside_those_that_are_bound(freed: IndexUnderTest) -> None:
    low, top = (decoded_pod(pod(name, 500, priority=priority)) for name, priority in (("low", 0), ("top", 6)))
    names = {share.pod: share.units for share in shares_for_pod(freed.index, low).values()}
    assert names == {"default/pinned-b": 700, "default/pinned-c": 700, "default/high (nominated)": 700}
    assert len(shares_for_pod(freed.index, top)) == 2
