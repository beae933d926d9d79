"""The parts of `python -m bench.cluster` that need no API server: its nodes, counts, waits and tables."""

import json
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from bench.cluster import growth
from bench.clusterapi import EVENT, OperandLabels
from bench.clustermeasures import MEASURES, chosen, percentile
from bench.clusternodes import Peculiarity, heartbeat, name_of, node, operands_of, peculiarity_of
from bench.clusterprograms import AuditLog, Cost
from bench.results import Results

from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.labels import FEATURES, GPU_FEATURES, OS_SOURCES
from gpuvirt.model.desired.workload import LABEL, Workload

AT = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
ACCOUNT = "system:serviceaccount:gpu-operator:bench"


def read(number: int) -> Node:
    return msgspec.convert(node(number, Workload.PASSTHROUGH, AT), Node)


def audited(verb: str, resource: str, stage: str = "ResponseComplete", user: str = ACCOUNT, **more: str) -> str:
    event = {"stage": stage, "verb": verb, "user": {"username": user}, "objectRef": {"resource": resource, **more}}
    return json.dumps(event) + "\n"


def event(kind: str, name: str, labels: frozenset[str]) -> bytes:
    metadata = {"name": name, "labels": {**dict.fromkeys(labels, "true"), "kubernetes.io/os": "linux"}}
    return json.dumps({"type": kind, "object": {"metadata": metadata}}).encode()


def nothing() -> None:
    pass


def test_nodes_have_gpus_and_the_labels_of_their_system() -> None:
    labels = read(1).metadata.labels
    assert labels[LABEL] == "vm-passthrough"
    assert labels[GPU_FEATURES[0]] == "true"
    assert [labels[label] for label in OS_SOURCES[0]] == ["ubuntu", "22.04"]
    assert labels[f"{FEATURES}kernel-version.full"]


def test_nodes_are_as_large_as_those_of_kubelets() -> None:
    content = json.dumps(node(4999, Workload.VGPU, AT))
    assert 6_000 < len(content) < 12_000
    assert '"containerRuntimeVersion": "containerd://' in content


def test_one_node_in_a_hundred_is_odd() -> None:
    odd = [peculiarity_of(number) for number in range(3000) if peculiarity_of(number) is not None]
    assert Counter(odd) == dict.fromkeys(Peculiarity, 10)
    assert not set(OS_SOURCES[0]) & set(read(0).metadata.labels)
    assert "unschedulable" in json.dumps(node(200, Workload.VGPU, AT))
    assert "unschedulable" not in json.dumps(node(201, Workload.VGPU, AT))


def test_a_heartbeat_changes_the_times_of_the_nodes_conditions_alone() -> None:
    later = AT.replace(hour=4)
    before, after = node(1, Workload.VGPU, AT), node(1, Workload.VGPU, later)
    (what,) = heartbeat(later)
    assert what == "status"
    changes = json.dumps(heartbeat(later))
    assert changes.count("2026-05-04T04:02:01Z") == json.dumps(before).count('"lastHeartbeatTime"') == 4
    assert json.dumps(before) != json.dumps(after)


def test_requests_of_the_account_are_counted_once_and_read_on(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    log = AuditLog(file, ACCOUNT)
    assert not log.requests()
    lines = [
        audited("patch", "nodes"),
        audited("patch", "nodes", subresource="status"),
        audited("patch", "nodes", user="admin"),
        audited("watch", "nodes", "ResponseStarted"),
        audited("watch", "nodes"),
        json.dumps({"stage": "ResponseComplete", "verb": "get", "user": {"username": ACCOUNT}}) + "\n",
    ]
    file.write_text("".join(lines) + '{"stage": "Resp')
    first = log.requests()
    assert first == {"patch nodes": 1, "patch nodes/status": 1, "watch nodes": 1, "get": 1}
    file.write_text("".join(lines) + audited("list", "pods"))
    assert log.requests() - first == {"list pods": 1}


def test_a_cost_is_a_difference() -> None:
    before, after = Cost(1.5, Counter({"get pods": 1}), 3), Cost(2.0, Counter({"get pods": 4, "list pods": 1}), 4)
    assert after - before == Cost(0.5, Counter({"get pods": 3, "list pods": 1}), 1)


def test_nodes_are_awaited_until_they_have_exactly_their_labels() -> None:
    labels, desired = OperandLabels(), operands_of(Workload.VGPU)
    labels.observe(EVENT.decode(event("ADDED", "a", desired)))
    labels.expect(desired, ["a", "b", "c"])
    with pytest.raises(SystemExit, match="2 nodes do not have the labels of their operands; b has"):
        labels.wait(nothing, within_s=0)
    labels.observe(EVENT.decode(event("ADDED", "b", desired | operands_of(Workload.PASSTHROUGH))))
    labels.observe(EVENT.decode(event("ADDED", "c", desired)))
    with pytest.raises(SystemExit, match="1 nodes"):
        labels.wait(nothing, within_s=0)
    labels.observe(EVENT.decode(event("MODIFIED", "b", desired)))
    assert labels.wait(nothing, within_s=0) > 0


def test_a_wait_ends_with_its_program() -> None:
    ended = iter([None])

    def check(moments: Iterator[None] = ended) -> None:
        next(moments)

    labels = OperandLabels()
    labels.expect(operands_of(Workload.VGPU), ["a"])
    with pytest.raises(StopIteration):
        labels.wait(check)


def test_a_measure_brings_those_that_it_needs_in_their_order() -> None:
    assert chosen(MEASURES) == list(MEASURES)
    assert chosen(["restart", "one"]) == ["join", "one", "restart"]
    assert chosen([]) == []


def test_percentiles_are_measured_values() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99)) == (50, 99)
    assert percentile([7], 99) == percentile([7], 1) == 7


def test_growth_compares_the_most_nodes_with_fewer() -> None:
    tables = {500: Results(), 2000: Results()}
    for nodes, table in tables.items():
        table.add("gpuvirt", "start, s", nodes / 100)
        table.add("peer", "start, s", 1)
    assert growth(tables, "gpuvirt").splitlines() == [
        "|  | 2,000 | 500 | 2,000 / 500 |",
        "| --- | --- | --- | --- |",
        "| start, s | 20 | 5 | 4.00 |",
    ]


def test_the_names_of_nodes_are_in_order() -> None:
    assert [name_of(1), name_of(4999)] == ["sim00001", "sim04999"]
