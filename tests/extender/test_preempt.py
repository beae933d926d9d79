"""preempt: the fewest victims that free one GPU, or no victims on a node where none help."""

from collections.abc import Sequence

import pytest

from gpuvirt.cluster.extender.preempting import preempted
from gpuvirt.cluster.extender.protocol import PreemptionArguments, Victims
from gpuvirt.cluster.shares.sharing import Sharing
from gpuvirt.facts.ids import NodeName, PodUid
from tests.extender.pods import IndexUnderTest, Object, decoded_pod, index_of, node, pod


def victims(
    found: IndexUnderTest, content: Object, *proposed: str, violations: int = 0
) -> tuple[Sequence[str], int] | None:
    """Return the victims on the node `n` and the violations; None where the node is left out."""
    uids = [PodUid(f"uid-{name}") for name in proposed]
    asked = PreemptionArguments(decoded_pod(content), {NodeName("n"): Victims(uids, violations)})
    answer = preempted(asked, found.index.nodes, Sharing()).victims
    if "n" not in answer:
        return None
    return [one.uid.removeprefix("uid-") for one in answer["n"].pods], answer["n"].violations


@pytest.fixture
def cluster() -> IndexUnderTest:
    """Two full GPUs: 500 + 500 units on one, 1000 on the other."""
    return index_of(
        [node("n", a=1000, b=1000)],
        [
            pod("half", 500, on="n", gpus=[{"a": 500}]),
            pod("other", 500, on="n", gpus=[{"a": 500}]),
            pod("whole", 1000, on="n", gpus=[{"b": 1000}], priority=2),
        ],
    )


def test_victims_that_free_one_gpu_stay_as_proposed(cluster: IndexUnderTest) -> None:
    assert victims(cluster, pod("p", 500, priority=9), "half", violations=1) == (["half"], 1)


def test_victims_on_two_gpus_become_victims_on_one() -> None:
    """1000 units would be free in total, and half of them on each GPU."""
    found = index_of(
        [node("n", a=1000, b=1000)],
        [pod(f"{gpu}{number}", 500, on="n", gpus=[{gpu: 500}]) for gpu in "ab" for number in range(2)],
    )
    assert victims(found, pod("p", 1000, priority=9), "a0", "b0") in ((["a0", "a1"], 1), (["b0", "b1"], 1))


def test_one_large_pod_goes_in_place_of_two_small_ones(cluster: IndexUnderTest) -> None:
    cluster.pods(pod("whole", 1000, on="n", gpus=[{"b": 1000}]))
    found = victims(cluster, pod("p", 1000, priority=9), "half", "other", "whole")
    assert found == (["whole"], 0)


def test_pods_of_the_same_or_a_higher_priority_stay(cluster: IndexUnderTest) -> None:
    found = victims(cluster, pod("p", 1000, priority=1), "half")
    assert found is not None
    assert (sorted(found[0]), found[1]) == (["half", "other"], 1)
    assert victims(cluster, pod("p", 1000, priority=0), "half") is None


def test_victims_without_units_are_kept(cluster: IndexUnderTest) -> None:
    """The pod needs their processors or their memory."""
    assert victims(cluster, pod("p", 500, priority=9), "processor-hog", "half") == (["processor-hog", "half"], 0)
    assert victims(cluster, pod("p", 1000, priority=1), "processor-hog", "half", "other") == (
        ["processor-hog", "half", "other"],
        0,
    )


def test_a_node_with_room_keeps_the_proposal(cluster: IndexUnderTest) -> None:
    cluster.gone(pod("whole", 1000))
    assert victims(cluster, pod("p", 500, priority=9), "processor-hog") == (["processor-hog"], 0)


def test_a_node_on_which_evictions_do_not_help_is_left_out(cluster: IndexUnderTest) -> None:
    assert victims(cluster, pod("p", "3k", priority=9), "half") is None
    assert victims(cluster, pod("p", 1500, priority=9), "half") is None
    assert victims(IndexUnderTest(), pod("p", 100, priority=9), "half") is None
    assert victims(cluster, pod("p", 500, priority=9)) is None, "kube-scheduler accepts no node without victims"


def test_protected_pods_go_last(cluster: IndexUnderTest) -> None:
    """Both proposed pods are protected, so that the third may be, too: the fewest count."""
    found = victims(cluster, pod("p", 1000, priority=9), "half", "other", violations=2)
    assert found is not None
    assert found[1] >= 1
