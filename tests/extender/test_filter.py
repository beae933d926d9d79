"""filter: nodes with room, nodes that evictions would help, and nodes that nothing helps, each with the reason."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.extender.filtering import filtered
from gpuvirt.extender.protocol import FilterResult, NodeArguments, filter_arguments
from gpuvirt.facts.ids import NodeName
from gpuvirt.shares.objects import demand_of_pod
from gpuvirt.shares.sharing import Sharing
from tests.agent.shares.fits import Fit, fit
from tests.extender.pods import IndexUnderTest, Object, decoded_pod, index_of, node, pod


def ask(found: IndexUnderTest, content: Object, *names: str) -> FilterResult:
    asked = NodeArguments(decoded_pod(content), [NodeName(name) for name in names])
    return filtered(asked, found.index.usage.rows, Sharing(), found.index.limiting)


@pytest.fixture
def cluster() -> IndexUnderTest:
    """`half` has a pod of 700 on one of two GPUs, `full` is full, `none` shares nothing, `small` has half a GPU."""
    return index_of(
        [node("half", a=1000, b=1000), node("full", a=1000), node("none"), node("small", a=500)],
        [pod("one", 700, on="half", gpus=[{"a": 700}]), pod("two", 1000, on="full", gpus=[{"a": 1000}], priority=5)],
    )


def test_nodes_with_a_piece_that_is_large_enough_pass(cluster: IndexUnderTest) -> None:
    answer = ask(cluster, pod("p", 500), "half", "full", "none", "small", "unknown")
    assert answer.node_names == ["half", "small"]
    assert answer.failed_nodes == {}
    assert answer.failed_and_unresolvable_nodes == {
        "full": "nvidia.com/vgpu: 500 units requested, the largest free piece of a GPU is 0",
        "none": "the node shares no GPUs: it has no annotation gpuvirt.io/shared-gpus",
        "unknown": "the node shares no GPUs: it has no annotation gpuvirt.io/shared-gpus",
    }


def test_a_pod_that_requires_limits_passes_only_nodes_whose_shares_are_limits() -> None:
    hard = [node(f"by-{limits}", limits, a=1000) for limits in ("hami-core", "mps", "hami-core-mps")]
    found = index_of([*hard, node("soft", a=1000), node("newer", "x", a=1000)])
    names = ["by-hami-core", "by-mps", "by-hami-core-mps", "soft", "newer", "unknown"]
    answer = ask(found, pod("p", 500, enforcement="required"), *names)
    assert answer.node_names == names[:3]
    assert answer.failed_and_unresolvable_nodes["soft"] == (
        "the pod requires enforced shares (gpuvirt.io/enforcement: required), but the node does not enforce shares: it"
        " has no annotation gpuvirt.io/shares-enforcement: hami-core, mps, hami-core-mps, driver, driver-mps"
    )
    assert answer.failed_and_unresolvable_nodes.keys() == {"soft", "newer", "unknown"}
    assert "shares no GPUs" in answer.failed_and_unresolvable_nodes["unknown"]
    assert ask(found, pod("p", 500, 500, enforcement="required"), *names).node_names == names[:3]
    assert ask(found, pod("p", 500), *names).node_names == names[:5]


def test_a_pod_of_whole_gpus_shares_them_with_nobody_and_needs_no_limit() -> None:
    found = index_of([node("soft", a=1000, b=1000)])
    assert ask(found, pod("p", 2000, enforcement="required"), "soft").node_names == ["soft"]
    assert ask(found, pod("p", 1000, 10, enforcement="required"), "soft").node_names == []


def test_a_requirement_that_is_not_understood_is_met_by_no_node() -> None:
    found = index_of([node("hard", "hami-core", a=1000)])
    answer = ask(found, pod("p", 500, enforcement="Required"), "hard")
    assert answer.failed_and_unresolvable_nodes == {
        "hard": "nvidia.com/vgpu: gpuvirt.io/enforcement: 'Required'; expected required, or no annotation"
    }


def test_a_node_whose_shares_are_limits_no_more_is_forgotten_as_one() -> None:
    found = index_of([node("n", "hami-core", a=1000)])
    asked = pod("p", 500, enforcement="required")
    assert ask(found, asked, "n").node_names == ["n"]
    found.nodes(node("n", a=1000))
    assert ask(found, asked, "n").node_names == []
    found.nodes(node("n", "hami-core", a=1000))
    assert ask(found, asked, "n").node_names == ["n"]


def test_a_node_whose_pods_have_a_lower_priority_is_failed_only(cluster: IndexUnderTest) -> None:
    answer = ask(cluster, pod("p", 500, priority=6), "full")
    assert answer.failed_nodes.keys() == {"full"}
    assert ask(cluster, pod("p", 500, priority=5), "full").failed_nodes == {}


def test_free_in_total_but_in_no_single_piece_is_unresolvable_unless_an_eviction_frees_one() -> None:
    found = index_of(
        [node("n", a=1000, b=1000)],
        [
            pod("one", 600, on="n", gpus=[{"a": 600}], priority=9),
            pod("two", 600, on="n", gpus=[{"b": 600}], priority=3),
        ],
    )
    assert ask(found, pod("p", 700, priority=3), "n").failed_and_unresolvable_nodes.keys() == {"n"}
    assert ask(found, pod("p", 700, priority=4), "n").failed_nodes.keys() == {"n"}
    found.pods(pod("three", 300, on="n", gpus=[{"b": 300}], priority=9))
    answer = ask(found, pod("p", 800, priority=4), "n")
    assert answer.failed_and_unresolvable_nodes == {
        "n": "nvidia.com/vgpu: 800 units requested, the largest free piece of a GPU is 400"
    }


@pytest.mark.parametrize(
    ("units", "reason"),
    [
        ((800,), "nvidia.com/vgpu: 800 units requested, the node's largest GPU has 500"),
        (("2k",), "nvidia.com/vgpu: 2000 units requested, which are whole GPUs; the node has 0 of them"),
        ((1500,), "nvidia.com/vgpu: container c0 requests 1500 units, and a GPU has 1000; expected at most 1000"),
        ((-5,), "nvidia.com/vgpu: -5 is not a number of units"),
        (("many",), "nvidia.com/vgpu: 'many' is not a quantity"),
        (("1e99",), f"nvidia.com/vgpu: container c0 requests {2**63 - 1} units, and a GPU has 1000"),
        (("1" + 18 * "0",), f"nvidia.com/vgpu: {10**18} units requested, which are whole GPUs; the node has 0 of them"),
    ],
)
def test_what_no_node_has_is_unresolvable(units: tuple[int | str, ...], reason: str) -> None:
    answer = ask(index_of([node("small", a=500)]), pod("p", *units, priority=9), "small")
    assert answer.failed_and_unresolvable_nodes["small"].startswith(reason)
    assert not answer.node_names


def test_whole_gpus_need_as_many_free_ones() -> None:
    found = index_of(
        [node("n", a=1000, b=1000, c=1000), node("m", a=1000)], [pod("one", 1, on="n", gpus=[{"a": 1}], priority=-1)]
    )
    assert ask(found, pod("p", "2k"), "n").node_names == ["n"]
    answer = ask(found, pod("p", "3k"), "n", "m")
    assert answer.failed_nodes == {
        "n": "nvidia.com/vgpu: 3000 units requested, which are whole GPUs; 2 whole GPUs are free"
    }
    assert answer.failed_and_unresolvable_nodes == {
        "m": "nvidia.com/vgpu: 3000 units requested, which are whole GPUs; the node has 1 of them"
    }


def test_a_pod_without_units_fits_everywhere(cluster: IndexUnderTest) -> None:
    assert ask(cluster, pod("p", 0), "full", "none").node_names == ["full", "none"]


def test_init_containers_count_as_the_kubelet_counts_them() -> None:
    found = index_of([node("n", a=1000)], [pod("one", 400, on="n", gpus=[{"a": 400}])])
    assert ask(found, pod("p", 300, 300, init=[600, 500]), "n").node_names == ["n"]
    assert ask(found, pod("p", 300, init=[700]), "n").node_names != ["n"]


def test_equal_reasons_are_one_text() -> None:
    names = [f"n{number}" for number in range(100)]
    found = index_of([node(name, a=1000) for name in names])
    found.pods(*(pod(f"p-{name}", 800, on=name, gpus=[{"a": 800}]) for name in names))
    answer = ask(found, pod("p", 300), *names)
    assert len(answer.failed_and_unresolvable_nodes) == 100
    assert len({id(text) for text in answer.failed_and_unresolvable_nodes.values()}) == 1


containers = st.lists(st.sampled_from([1, 100, 300, 500, 600, 999, 1000, 2000]), min_size=1, max_size=4)


@given(
    gpus=st.lists(st.sampled_from([250, 500, 1000]), min_size=1, max_size=4),
    taken=st.lists(st.integers(0, 1000), min_size=4, max_size=4),
    units=containers,
)
def test_filter_agrees_with_the_usage_that_places_pods(gpus: list[int], taken: list[int], units: list[int]) -> None:
    names, pairs = "abcd", list(zip(taken, gpus, strict=False))
    found = index_of(
        [node("n", **dict(zip(names, gpus, strict=False)))],
        [pod(f"p{i}", min(t, g), on="n", gpus=[{names[i]: min(t, g)}]) for i, (t, g) in enumerate(pairs)],
    )
    asked = pod("p", *units)
    judged = fit(found.index.usage, demand_of_pod(decoded_pod(asked), Sharing().resource), NodeName("n"))
    answer = ask(found, asked, "n")
    assert (answer.node_names == ["n"]) == (judged is Fit.FITS)
    placed = found.index.nodes[NodeName("n")].place(demand_of_pod(decoded_pod(asked), Sharing().resource))
    assert (placed is not None) == (judged is Fit.FITS)


def test_many_nodes_are_read_from_their_full_form() -> None:
    found = index_of([node("n1", a=1000), node("n2", a=100)])
    body = msgspec.json.encode({"Pod": pod("p", 300), "Nodes": {"items": [node("n1", a=1000), node("n2", a=100)]}})
    answer = filtered(filter_arguments(body), found.index.usage.rows, Sharing(), ())
    sent = msgspec.json.decode(msgspec.json.encode(answer))
    assert [item["metadata"]["name"] for item in sent["Nodes"]["items"]] == ["n1"]
    assert "NodeNames" not in sent
