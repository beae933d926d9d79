"""The fields of nodes, GpuNodes and pods that the controller keeps, and their changes that lead to a decision."""

import tracemalloc
from collections.abc import Callable, Mapping

import pytest
from bench.clusternodes import reported_gpu_node
from bench.controllermemory import cluster_node, read

from gpuvirt.controller.nodes.resolve import OwnedGpuNode
from gpuvirt.controller.picture import read_of, read_of_gpu_node, read_of_pod
from gpuvirt.kube.kinds.core import Pod, ReadNode
from gpuvirt.kube.resources import KubernetesObject
from tests.kube.mergepatch import merged_of

Json = Mapping[str, object]
OBJECTS = 50


@pytest.mark.parametrize(
    ("made", "shape", "most_kib"), [(reported_gpu_node, OwnedGpuNode, 12), (cluster_node, ReadNode, 5)]
)
def test_an_object_is_kept_without_what_the_controller_does_not_read(
    made: Callable[[int], Json], shape: type[KubernetesObject], most_kib: int
) -> None:
    read(made(0), shape)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = [read(made(number), shape) for number in range(OBJECTS)]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / len(kept) < most_kib * 1024


def test_equal_labels_of_nodes_are_one_object_in_memory() -> None:
    first, second = (read(cluster_node(number), ReadNode) for number in (1, 2))
    assert set(map(id, first.metadata.labels)) == set(map(id, second.metadata.labels))


READY = {"type": "Ready", "status": "True"}
POD: Json = {
    "metadata": {"name": "gpuvirt-node-x", "namespace": "gpu-operator", "uid": "u", "labels": {"app": "gpuvirt-node"}},
    "spec": {"nodeName": "sim00001"},
    "status": {"phase": "Running", "conditions": [READY]},
}
OBJECTS_READ: Mapping[str, tuple[Json, Callable[[Json], object]]] = {
    "node": (cluster_node(1), lambda content: read_of(read(content, ReadNode))),
    "gpu node": (reported_gpu_node(1), lambda content: read_of_gpu_node(read(content, OwnedGpuNode))),
    "pod": (POD, lambda content: read_of_pod(read(content, Pod))),
}


@pytest.mark.parametrize(
    ("kind", "patch", "decides"),
    [
        ("node", {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}, False),
        ("node", {"metadata": {"labels": {"a": "b"}}}, True),
        ("gpu node", {"status": {"totals": {"allocated": 25}, "agent": "1.0.1"}}, False),
        ("gpu node", {"metadata": {"annotations": {"a": "b"}}}, False),
        ("gpu node", {"metadata": {"generation": 4}}, True),
        ("gpu node", {"metadata": {"managedFields": []}}, True),
        ("gpu node", {"metadata": {"uid": "another"}}, True),
        ("gpu node", {"spec": {"mode": "passthrough"}}, True),
        ("gpu node", {"status": {"observedGeneration": 4}}, True),
        ("gpu node", {"status": {"gpus": []}}, True),
        ("gpu node", {"status": {"resources": []}}, True),
        ("gpu node", {"status": {"conditions": []}}, True),
        ("gpu node", {"status": None}, True),
        (
            "pod",
            {"status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}, {"type": "X"}]}},
            False,
        ),
        ("pod", {"metadata": {"annotations": {"a": "b"}}}, False),
        ("pod", {"status": {"conditions": []}}, True),
        ("pod", {"status": {"message": "evicted"}}, True),
        ("pod", {"metadata": {"labels": {"gpuvirt.io/template": "b"}}}, True),
        ("pod", {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, True),
        ("pod", {"metadata": {"uid": "another"}}, True),
        ("pod", {"spec": {"nodeName": "sim00002"}}, True),
    ],
)
def test_a_change_leads_to_a_decision_if_it_is_read(kind: str, patch: dict[str, object], *, decides: bool) -> None:
    content, what_is_read = OBJECTS_READ[kind]
    newer: dict[str, object] = {"metadata": {"resourceVersion": "200000"}}
    after = merged_of(merged_of(dict(content), patch), newer)
    assert (what_is_read(content) != what_is_read(after)) == decides
