"""prioritize: packing prefers the node where the least stays free, spreading the one where the most does."""

import pytest

from gpuvirt.extender.filtering import prioritized
from gpuvirt.extender.protocol import NodeArguments
from gpuvirt.facts.ids import NodeName
from gpuvirt.model.shares.placement import MOST_STEPS, Policy, Steps, finished
from gpuvirt.shares.sharing import Sharing
from tests.extender.pods import IndexUnderTest, Object, decoded_pod, index_of, node, pod


def scores(found: IndexUnderTest, content: Object, *names: str, policy: Policy = Policy.BINPACK) -> dict[str, int]:
    asked = NodeArguments(decoded_pod(content), [NodeName(name) for name in names])
    scoring = prioritized(asked, found.index.usage.rows, Sharing(policy=policy), Steps(MOST_STEPS))
    return {priority.host: priority.score for priority in finished(scoring)}


@pytest.fixture
def cluster() -> IndexUnderTest:
    """Nodes with 1000, 600, 350 and 300 units free."""
    return index_of(
        [node(name, **{name: 1000, f"{name}2": 100}) for name in ("empty", "some", "tight", "exact")],
        [
            pod(f"p-{name}", units, on=name, gpus=[{name: units}])
            for name, units in (("some", 400), ("tight", 650), ("exact", 700))
        ],
    )


def test_packing_prefers_the_best_fit(cluster: IndexUnderTest) -> None:
    assert scores(cluster, pod("p", 300), "empty", "some", "tight", "exact") == {
        "exact": 10,
        "tight": 9,
        "some": 6,
        "empty": 1,
    }


def test_spreading_prefers_the_most_room(cluster: IndexUnderTest) -> None:
    expected = {"empty": 10, "some": 4, "tight": 1, "exact": 1}
    names = ("empty", "some", "tight", "exact")
    found = scores(cluster, pod("p", 300), *names, policy=Policy.SPREAD)
    assert found["empty"] == 10
    assert sorted(found, key=lambda name: -found[name])[:2] == sorted(expected, key=lambda name: -expected[name])[:2]
    assert found == scores(cluster, pod("p", 300, policy="spread"), *names), "the pod's annotation decides"


def test_an_unknown_policy_of_a_pod_counts_as_the_clusters(cluster: IndexUnderTest) -> None:
    assert scores(cluster, pod("p", 300, policy="widest"), "empty", "exact") == {"empty": 1, "exact": 10}


def test_only_the_best_have_10(cluster: IndexUnderTest) -> None:
    """Other plugins' scores are added: a difference of one unit must not be rounded away."""
    cluster.pods(pod("p-tight", 699, on="tight", gpus=[{"tight": 699}]))
    assert scores(cluster, pod("p", 300), "tight", "exact", "empty") == {"tight": 9, "exact": 10, "empty": 1}


def test_nodes_without_room_have_0(cluster: IndexUnderTest) -> None:
    assert scores(cluster, pod("p", 500), "tight", "unknown", "some") == {"tight": 0, "unknown": 0, "some": 10}
    assert scores(cluster, pod("p", 1500), "some") == {"some": 0}
    assert scores(cluster, pod("p", -1), "some") == {"some": 0}


def test_whole_gpus_go_where_the_fewest_are_left() -> None:
    found = index_of([node("two", a=1000, b=1000), node("three", c=1000, d=1000, e=1000)])
    assert scores(found, pod("p", 1000), "two", "three") == {"two": 10, "three": 1}
    assert scores(found, pod("p", 1000), "two", "three", policy=Policy.SPREAD) == {"two": 1, "three": 10}


def test_containers_on_several_gpus_count_together() -> None:
    found = index_of([node("tight", a=600, b=600), node("wide", c=1000, d=1000)])
    assert scores(found, pod("p", 600, 600), "tight", "wide") == {"tight": 10, "wide": 1}


def test_a_pod_without_units_has_no_preference(cluster: IndexUnderTest) -> None:
    assert set(scores(cluster, pod("p", 0), "empty", "exact").values()) == {10}
