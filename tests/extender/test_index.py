"""The index has what the API's nodes and pods leave, in whatever order their events come."""

from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.shares.demand import Units
from gpuvirt.shares.sharing import Sharing
from tests.extender.pods import IndexUnderTest, N, Object, decoded_pod, index_of, node, pod, reserve

NODE = node("n", a=1000, b=1000)
ON_A = pod("one", 300, on="n", gpus=[{"a": 300}])


def test_it_is_ready_once_nodes_and_pods_are_listed() -> None:
    found = IndexUnderTest()
    found.nodes(NODE)
    assert not found.index.is_ready
    found.pods()
    assert found.index.is_ready


def test_a_pod_counts_from_its_binding_until_it_leaves() -> None:
    found = index_of([NODE], [pod("one", 300)])
    assert found.free("n") == {"a": 1000, "b": 1000}
    found.pods(ON_A)
    assert found.free("n") == {"a": 700, "b": 1000}
    found.gone(ON_A)
    assert found.free("n") == {"a": 1000, "b": 1000}


def test_a_pod_that_is_being_deleted_still_counts() -> None:
    found = index_of([NODE], [ON_A])
    deleting = {**ON_A, "metadata": {**metadata(ON_A), "deletionTimestamp": "2030-01-01T00:00:00Z"}}
    found.pods(deleting)
    assert found.free("n") == {"a": 700, "b": 1000}


def metadata(content: Object) -> Object:
    found = content["metadata"]
    assert isinstance(found, dict)
    return found


def test_pods_may_be_reported_before_their_node() -> None:
    found = IndexUnderTest()
    found.pods(ON_A)
    found.nodes(NODE)
    assert found.free("n") == {"a": 700, "b": 1000}


def test_a_pod_without_an_annotation_counts_on_each_gpu() -> None:
    found = index_of([NODE], [pod("one", 300, on="n")])
    assert found.free("n") == {"a": 700, "b": 700}
    found.pods(ON_A)
    assert found.free("n") == {"a": 700, "b": 1000}


def test_an_edited_annotation_frees_nothing() -> None:
    """Anyone who may edit the pod can edit it: other units, another container, a GPU that the node never had."""
    edited: list[list[dict[str, int]]] = [
        [{"a": 1}],
        [{"a": 300}, {"b": 1}],
        [{"bogus": 300}],
        [{"a": 200, "b": 100}],
        [{}],
    ]
    for gpus in edited:
        found = index_of([NODE], [pod("one", 300, on="n", gpus=gpus)])
        assert found.free("n") == {"a": 700, "b": 700}, gpus


def test_a_pod_of_a_gpu_that_fails_keeps_to_that_gpu() -> None:
    """A GPU that is unhealthy leaves the node's annotation, and its pods must not count on the others."""
    found = index_of([NODE], [ON_A])
    found.nodes(node("n", b=1000))
    assert found.free("n") == {"b": 1000}
    found.nodes(NODE)
    assert found.free("n") == {"a": 700, "b": 1000}


def test_a_pod_whose_request_cannot_be_read_fills_its_node() -> None:
    found = index_of([NODE], [pod("one", "nonsense", on="n")])
    assert found.free("n") == {"a": 0, "b": 0}


def test_a_node_with_a_malformed_annotation_shares_nothing() -> None:
    broken: Object = {"metadata": {"name": "n", "annotations": {"gpuvirt.io/shared-gpus": '{"GPU-a": -1}'}}}
    found = index_of([NODE], [ON_A])
    found.nodes(broken)
    assert found.free("n") == {}
    found.nodes(NODE)
    assert found.free("n") == {"a": 700, "b": 1000}


def test_a_node_that_returns_has_its_pods_still() -> None:
    found = index_of([NODE], [ON_A])
    found.node_gone("n")
    assert not found.free("n")
    found.nodes(NODE)
    assert found.free("n") == {"a": 700, "b": 1000}
    found.node_gone("n")
    found.gone(ON_A)
    assert found.free("n") is None


def test_a_pod_of_the_same_name_is_another_pod() -> None:
    found = index_of([NODE], [ON_A])
    found.pods(pod("one", 500, uid="later"))
    assert found.free("n") == {"a": 1000, "b": 1000}
    found.pods(pod("one", 500, uid="later", on="n", gpus=[{"b": 500}]))
    assert found.free("n") == {"a": 1000, "b": 500}


def test_a_reservation_counts_until_an_event_confirms_it() -> None:
    found = index_of([NODE], [pod("one", 300)])
    reserve(found, pod("one", 300))
    assert found.free("n") == {"a": 700, "b": 1000}
    found.pods(pod("one", 300))
    assert found.free("n") == {"a": 700, "b": 1000}, "a condition of the pod has changed, and nothing else"
    found.pods(pod("one", 300, on="n", gpus=[{"b": 300}]))
    assert found.free("n") == {"a": 1000, "b": 700}
    found.index.release(PodUid("uid-one"), N)
    assert found.free("n") == {"a": 1000, "b": 700}, "the event counts, not what was asked for"


def test_a_reservation_ends_with_its_binding_or_its_pod() -> None:
    found = index_of([NODE], [pod("one", 300)])
    reserve(found, pod("one", 300))
    found.index.release(PodUid("uid-one"), N)
    assert found.free("n") == {"a": 1000, "b": 1000}
    for after in ("deleted", "replaced"):
        reserve(found, pod("one", 300))
        if after == "deleted":
            found.gone(pod("one", 300))
        else:
            found.pods(pod("one", 300, uid="later"))
        assert found.free("n") == {"a": 1000, "b": 1000}
        found.pods(pod("one", 300))


def test_a_pod_reserved_on_two_nodes_ends_on_one() -> None:
    """A binding whose outcome is unknown may still be made while another node is tried."""
    found = index_of([NODE, node("m", c=1000)], [pod("one", 300)])
    reserve(found, pod("one", 300))
    reserve(found, pod("one", 300), NodeName("m"))
    assert (found.free("n"), found.free("m")) == ({"a": 700, "b": 1000}, {"c": 700})
    found.pods(ON_A)
    assert (found.free("n"), found.free("m")) == ({"a": 700, "b": 1000}, {"c": 1000})


def test_pods_that_do_not_name_the_resource_are_not_kept() -> None:
    other = {**pod("other"), "spec": {"nodeName": "n", "containers": [{"name": "c", "resources": {}}]}}
    found = index_of([NODE], [other])
    assert found.index.pod("default", "other") is None
    assert found.index.totals().pods == 0


def test_totals_are_sums_over_the_cluster() -> None:
    found = index_of([NODE, node("m", c=500), node("without")], [ON_A, pod("two", 100, on="m")])
    totals = found.index.totals()
    assert (totals.nodes, totals.gpus, totals.capacity, totals.free, totals.pods, totals.unassigned) == (
        2,
        3,
        2500,
        2100,
        2,
        1,
    )


contents = st.tuples(
    st.sampled_from(["p", "q", "r"]),
    st.sampled_from(["u1", "u2"]),
    st.sampled_from(["", "n", "m"]),
    st.sampled_from([None, "a", "b", "c"]),
)


@given(events=st.lists(st.one_of(contents, st.sampled_from(["n", "m", "-n", "-m", "-p", "-q", "-r"])), max_size=25))
def test_events_in_any_order_lead_to_the_usage_of_what_is_there(events: list[object]) -> None:
    found, nodes, pods = IndexUnderTest(), dict[str, Object](), dict[str, Object]()
    shapes = {"n": NODE, "m": node("m", c=1000)}
    for event in events:
        if isinstance(event, tuple):
            name, uid, on, gpu = event
            pods[name] = pod(name, 300, uid=f"{name}-{uid}", on=on, gpus=None if gpu is None else [{gpu: 300}])
            found.pods(pods[name])
        elif isinstance(event, str) and event in shapes:
            nodes[event] = shapes[event]
            found.nodes(shapes[event])
        elif isinstance(event, str) and event[1:] in shapes:
            nodes.pop(event[1:], None)
            found.node_gone(event[1:])
        elif isinstance(event, str) and (removed := pods.pop(event[1:], None)) is not None:
            found.gone(removed)
    expected = index_of(nodes.values(), pods.values())
    for name in shapes:
        assert (found.free(name) or {}) == (expected.free(name) or {})


def test_a_pods_own_reservation_is_free_for_itself_alone() -> None:
    known = index_of([node("n", a=1000)], [pod("p", 600), pod("q", 600)])
    first, second = decoded_pod(pod("p", 600)), decoded_pod(pod("q", 600))
    reserve(known, pod("p", 600))
    held = [(first.uid, N)]
    assert known.index.rows_for(first)[N].largest == 1000
    assert known.index.rows_for(second)[N].largest == 400
    assert known.index.rows_without(held)[N].largest == 1000
    known.pods(pod("p", 600, on="n", gpus=[{"a": 600}]))
    assert known.index.rows_without(held) == {}, "a pod that is bound holds its units for good"


def test_a_gpu_without_units_keeps_its_pods_from_counting_on_others() -> None:
    """A GPU that has failed has 0 units: who lists nodes and pods afterwards finds the pods where they are."""
    known = index_of([node("n", a=0, b=1000)], [pod("p", 700, on="n", gpus=[{"a": 700}])])
    assert known.free("n") == {"a": 0, "b": 1000}


def test_whole_gpus_count_by_their_annotation_whatever_units_a_gpu_has() -> None:
    found = IndexUnderTest(Sharing(whole=Units(100)))
    found.nodes(node("n", a=100, b=100, c=100))
    found.pods(pod("p", 200, on="n", gpus=[{"a": 100, "b": 100}]))
    assert found.free("n") == {"a": 0, "b": 0, "c": 100}
