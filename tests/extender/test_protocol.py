"""kube-scheduler's requests are understood in each form in which they come, and others are refused with the reason."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.extender.protocol import (
    ErrorResult,
    FilterResult,
    HostPriority,
    MalformedRequestError,
    MetaPod,
    MetaVictims,
    PreemptionResult,
    binding_arguments,
    filter_arguments,
    filter_result,
    preemption_arguments,
)
from gpuvirt.facts.ids import NodeName
from tests.extender.pods import node, pod

POD = pod("p", 300)


def encoded(**fields: object) -> bytes:
    return msgspec.json.encode(fields)


@pytest.mark.parametrize("keys", [("Pod", "NodeNames"), ("pod", "nodeNames"), ("POD", "nodenames")])
def test_names_come_in_any_case(keys: tuple[str, str]) -> None:
    asked = filter_arguments(encoded(**{keys[0]: POD, keys[1]: ["n1", "n2"], "Nodes": None}))
    assert asked.names == ["n1", "n2"]
    assert asked.nodes is None
    assert asked.pod.where == "default/p"
    assert [container.name for container in asked.pod.spec.containers] == ["c0"]


@pytest.mark.parametrize("items", ["items", "Items"])
def test_full_nodes_come_back_as_they_were_sent(items: str) -> None:
    nodes = [node("n1", a=1000), node("n2")]
    body = encoded(Pod=POD, NodeNames=None, Nodes={"metadata": {}, items: nodes})
    asked = filter_arguments(body)
    assert asked.names == ["n1", "n2"]
    answer = msgspec.json.decode(msgspec.json.encode(filter_result(asked, [NodeName("n2")], {"n1": "full"}, {})))
    assert answer == {"Nodes": {"items": [nodes[1]]}, "FailedNodes": {"n1": "full"}}


@pytest.mark.parametrize("nodes", [{}, {"Nodes": None, "NodeNames": None}, {"Nodes": {"items": None}}])
def test_null_lists_are_empty(nodes: dict[str, object]) -> None:
    assert filter_arguments(encoded(Pod=POD, **nodes)).names == []


def test_an_answer_without_nodes_has_an_empty_list_of_names() -> None:
    """Without the key kube-scheduler would look at `Nodes`."""
    asked = filter_arguments(encoded(Pod=POD, NodeNames=["n1"]))
    answer = filter_result(asked, [], {}, {"n1": "why"})
    assert msgspec.json.decode(msgspec.json.encode(answer)) == {
        "NodeNames": [],
        "FailedAndUnresolvableNodes": {"n1": "why"},
    }


def test_victims_come_as_pods_or_as_uids() -> None:
    whole = encoded(
        Pod=POD, NodeNameToVictims={"n1": {"Pods": [pod("v", 100)], "NumPDBViolations": 1}}, NodeNameToMetaVictims=None
    )
    meta = encoded(Pod=POD, NodeNameToMetaVictims={"n1": {"Pods": [{"UID": "uid-v"}], "NumPDBViolations": 1}})
    lower = encoded(pod=POD, nodeNameToMetaVictims={"n1": {"pods": [{"uid": "uid-v"}], "numPDBViolations": 1}})
    for body in (whole, meta, lower):
        ((name, found),) = preemption_arguments(body).victims.items()
        assert (name, found.pods, found.violations) == ("n1", ["uid-v"], 1)


def test_victims_may_be_null() -> None:
    body = encoded(Pod=POD, NodeNameToMetaVictims={"n1": None, "n2": {"Pods": None, "NumPDBViolations": None}})
    ((name, found),) = preemption_arguments(body).victims.items()
    assert (name, found.pods, found.violations) == ("n2", [], 0)


def test_a_binding_is_read() -> None:
    asked = binding_arguments(encoded(PodName="p", PodNamespace="default", podUID="u", node="n1"))
    assert (asked.name, asked.namespace, asked.uid, asked.node) == ("p", "default", "u", "n1")


@pytest.mark.parametrize("missing", ["PodName", "PodNamespace", "PodUID", "Node"])
def test_a_binding_without_an_argument_is_refused(missing: str) -> None:
    fields = {"PodName": "p", "PodNamespace": "default", "PodUID": "u", "Node": "n1"} | {missing: None}
    with pytest.raises(MalformedRequestError, match=missing):
        binding_arguments(encoded(**fields))


def test_answers_have_gos_names() -> None:
    answers: list[tuple[object, object]] = [
        (FilterResult(error="x"), {"Error": "x"}),
        ([HostPriority("n", 3)], [{"Host": "n", "Score": 3}]),
        (
            PreemptionResult({"n": MetaVictims([MetaPod("u")], 1)}),
            {"NodeNameToMetaVictims": {"n": {"Pods": [{"UID": "u"}], "NumPDBViolations": 1}}},
        ),
        (ErrorResult(""), {"Error": ""}),
    ]
    for answer, expected in answers:
        assert msgspec.json.decode(msgspec.json.encode(answer)) == expected


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b'{"Pod": 1}', b"{}", b"\xff", b"[" * 100_000])
def test_what_kube_scheduler_does_not_send_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedRequestError, match="filter: "):
        filter_arguments(body)
    with pytest.raises(MalformedRequestError):
        preemption_arguments(body)
    with pytest.raises(MalformedRequestError):
        binding_arguments(body)


@given(st.data())
def test_a_torn_body_is_refused(data: st.DataObject) -> None:
    body = encoded(Pod=POD, NodeNames=["n1", "n2"], Nodes=None)
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(MalformedRequestError):
        filter_arguments(body[:cut])
