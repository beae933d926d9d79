"""preempt: the fewest victims that free one GPU, or no victims on a node where none help."""

from collections.abc import Sequence

import pytest

from gpuvirt.extender.protocol import PreemptionArguments, Victims
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.shares.budgets import DisruptionBudgets
from tests.extender.pods import (
    IndexUnderTest,
    Object,
    budget,
    budgets_of,
    decoded_pod,
    index_of,
    node,
    pod,
    preempted_on,
)


def victims(
    found: IndexUnderTest,
    content: Object,
    *proposed: str,
    violations: int = 0,
    budgets: DisruptionBudgets | None = None,
) -> tuple[Sequence[str], int] | None:
    """Return the victims on the node `n` and the violations; None where the node is left out."""
    uids = [PodUid(f"uid-{name}") for name in proposed]
    asked = PreemptionArguments(decoded_pod(content), {NodeName("n"): Victims(uids, violations)})
    chosen = preempted_on(asked, found, budgets or budgets_of()).get("n")
    if chosen is None:
        return None
    return [pod.uid.removeprefix("uid-") for pod in chosen.pods], chosen.violations


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
    assert victims(cluster, pod("p", 500, priority=9), "other") == (["other"], 0)


def test_victims_on_two_gpus_become_victims_on_one() -> None:
    """1000 units would be free in total, and half of them on each GPU."""
    found = index_of(
        [node("n", a=1000, b=1000)],
        [pod(f"{gpu}{number}", 500, on="n", gpus=[{gpu: 500}]) for gpu in "ab" for number in range(2)],
    )
    assert victims(found, pod("p", 1000, priority=9), "a0", "b0") in ((["a0", "a1"], 0), (["b0", "b1"], 0))


def test_one_large_pod_goes_in_place_of_two_small_ones(cluster: IndexUnderTest) -> None:
    cluster.pods(pod("whole", 1000, on="n", gpus=[{"b": 1000}]))
    assert victims(cluster, pod("p", 1000, priority=9), "half", "other") == (["whole"], 0)


def test_victims_that_the_sum_of_units_does_not_need_are_kept(cluster: IndexUnderTest) -> None:
    """kube-scheduler evicts no pod that it does not need, so the pod needs their processors or their memory."""
    found = victims(cluster, pod("p", 500, priority=9), "half", "whole")
    assert found == (["whole", "half"], 0)


def test_pods_of_the_same_or_a_higher_priority_stay(cluster: IndexUnderTest) -> None:
    found = victims(cluster, pod("p", 1000, priority=1), "half")
    assert found is not None
    assert (sorted(found[0]), found[1]) == (["half", "other"], 0)
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


@pytest.fixture
def guarded() -> IndexUnderTest:
    """A GPU with three pods of 300 units, of which two belong to a database, and one with a pod of 700 units."""
    return index_of(
        [node("n", a=1000, b=1000)],
        [
            pod("db0", 300, on="n", gpus=[{"a": 300}], labels={"app": "db"}),
            pod("db1", 300, on="n", gpus=[{"a": 300}], labels={"app": "db"}),
            pod("web", 400, on="n", gpus=[{"a": 400}], labels={"app": "web"}),
            pod("vip", 1000, on="n", gpus=[{"b": 1000}], labels={"app": "web"}, priority=8),
        ],
    )


def test_a_pod_that_a_budget_covers_is_spared(guarded: IndexUnderTest) -> None:
    asked = pod("p", 300, priority=9)
    assert victims(guarded, asked, "db0") == (["db0"], 0)
    assert victims(guarded, asked, "db0", violations=1, budgets=budgets_of(budget("db", 0, app="db"))) == (["web"], 0)
    assert victims(guarded, asked, "db0", budgets=budgets_of(budget("db", 1, app="db"))) == (["db0"], 0)


def test_two_victims_that_a_budget_allows_go_before_one_of_a_higher_priority(guarded: IndexUnderTest) -> None:
    asked = pod("p", 600, priority=9)
    spared = victims(guarded, asked, "db0", "db1", budgets=budgets_of(budget("web", 0, app="web")))
    assert spared == (["db0", "db1"], 0)
    both = budgets_of(budget("web", 1, app="web"), budget("db", 1, app="db"))
    assert victims(guarded, asked, "db0", "db1", violations=1, budgets=both) == (["db0", "web"], 0)


def test_violations_are_counted_where_nothing_else_helps(guarded: IndexUnderTest) -> None:
    none = budgets_of(budget("db", 0, app="db"), budget("web", 0, app="web"))
    found = victims(guarded, pod("p", 600, priority=9), "db0", "db1", violations=2, budgets=none)
    assert found is not None
    assert found[1] == len(found[0]) == 1, "the pod of a higher priority is one violation"
    others = victims(guarded, pod("p", 300, priority=9), "hog", "db0", violations=2, budgets=none)
    assert others is not None
    assert (others[0][0], others[1]) == ("hog", 2), "the victim without units violates a budget, too"


def test_a_budget_of_another_namespace_covers_nothing(guarded: IndexUnderTest) -> None:
    elsewhere = budgets_of(budget("db", 0, namespace="other", app="db"))
    assert victims(guarded, pod("p", 300, priority=9), "db0", budgets=elsewhere) == (["db0"], 0)


def test_an_eviction_that_the_api_server_has_counted_is_not_counted_again(guarded: IndexUnderTest) -> None:
    counted = budgets_of(budget("db", 0, app="db", disrupted=["db0"]))
    assert victims(guarded, pod("p", 300, priority=9), "db0", budgets=counted) == (["db0"], 0)


def test_a_budget_without_a_selector_covers_nothing_and_an_empty_one_all(guarded: IndexUnderTest) -> None:
    asked = pod("p", 300, priority=9)
    null: Object = {**budget("x", 0), "spec": {}}
    assert victims(guarded, asked, "db0", budgets=budgets_of(null)) == (["db0"], 0)
    assert victims(guarded, asked, "db0", budgets=budgets_of(budget("x", 0))) == (["db0"], 1)


def test_a_budget_that_is_deleted_covers_nothing(guarded: IndexUnderTest) -> None:
    budgets = budgets_of(budget("db", 0, app="db"))
    budgets.observe(Delta({}, removed=frozenset({ObjectKey("default", "db")})))
    assert victims(guarded, pod("p", 300, priority=9), "db0", budgets=budgets) == (["db0"], 0)
