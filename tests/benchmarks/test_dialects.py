"""Nodes and pods as gpuvirt, gpushare and HAMi spell them, so that each of them counts the same load."""

from collections import Counter

import msgspec
import pytest
from bench.dialects import GPUVIRT, PEERS, UNITS, Dialect, Place
from bench.extenderobjects import GPUS, allocated_pods, node_of, pod_of
from bench.peers import Given, counted

DIALECTS = (GPUVIRT, *PEERS.values())


class Metadata(msgspec.Struct):
    name: str
    annotations: dict[str, str]


class Resources(msgspec.Struct):
    limits: dict[str, str]


class Container(msgspec.Struct):
    resources: Resources


class Spec(msgspec.Struct):
    containers: list[Container]
    node: str = msgspec.field(name="nodeName", default="")


class Status(msgspec.Struct):
    allocatable: dict[str, str]


class Pod(msgspec.Struct):
    metadata: Metadata
    spec: Spec


class Node(msgspec.Struct):
    metadata: Metadata
    status: Status


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_the_share_of_a_pod_is_read_as_it_was_written(dialect: Dialect) -> None:
    spelled = dialect.pod(300, Place("n1", 5))
    assert dialect.given("n1", spelled.annotations) == {"GPU-n1-5": 300}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_a_pod_without_a_gpu_has_no_units(dialect: Dialect) -> None:
    assert dialect.given("n1", dialect.pod(300, None).annotations) == {}
    assert dialect.given("n1", {"example.com/other": "1"}) == {}


def test_hami_reads_the_devices_of_all_containers_of_a_pod() -> None:
    devices = {"hami.io/vgpu-devices-allocated": "GPU-a,NVIDIA,300,0:GPU-b,NVIDIA,200,0:;;GPU-a,NVIDIA,100,0:;"}
    assert PEERS["hami"].given("n1", devices) == {"GPU-a": 400, "GPU-b": 200}


def test_one_node_has_its_gpus_in_both_dialects() -> None:
    for peer, amounts in (
        ("gpushare", {"aliyun.com/gpu-mem": "8000", "aliyun.com/gpu-count": "8"}),
        ("hami", {"nvidia.com/gpu": "80"}),
    ):
        node = msgspec.convert(node_of([GPUVIRT, PEERS[peer]], "n1"), Node)
        assert {"nvidia.com/vgpu": "8000", **amounts}.items() <= node.status.allocatable.items()
        assert "gpuvirt.io/shared-gpus" in node.metadata.annotations


def test_hami_finds_the_memory_and_health_of_each_gpu_in_the_annotation_of_a_node() -> None:
    devices = msgspec.json.decode(PEERS["hami"].node("n1", 2).annotations["hami.io/node-nvidia-register"])
    assert [(device["id"], device["devmem"], device["health"]) for device in devices] == [
        ("GPU-n1-0", 1000, True),
        ("GPU-n1-1", 1000, True),
    ]


def test_a_pod_requests_the_same_units_in_both_dialects() -> None:
    pod = msgspec.convert(pod_of([GPUVIRT, PEERS["hami"]], "p", 300), Pod)
    limits = {"nvidia.com/vgpu": "300", "nvidia.com/gpu": "1", "nvidia.com/gpumem": "300"}
    assert pod.spec.containers[0].resources.limits == limits


@pytest.mark.parametrize("count", [1, 40, 41, 160])
def test_allocated_pods_have_half_of_the_gpus_of_each_node_at_most(count: int) -> None:
    nodes = [f"n{number}" for number in range(10)]
    units: Counter[str] = Counter()
    for content in allocated_pods(DIALECTS, nodes, count):
        pod = msgspec.convert(content, Pod)
        shares = [dialect.given(pod.spec.node, pod.metadata.annotations) for dialect in DIALECTS]
        assert shares[0] == shares[1] == shares[2]
        units.update(shares[0])
    assert max(units.values()) <= UNITS
    assert len(units) == min(count, len(nodes) * GPUS // 2)
    by_node = Counter(gpu.rpartition("-")[0] for gpu in units)
    assert max(by_node.values()) <= GPUS // 2


def test_a_gpu_with_more_than_its_units_and_a_pod_without_a_gpu_are_counted() -> None:
    assert counted([{"a": 700}, {"a": 300}, {"b": 1001}, {"c": 600}, {"c": 600}, {}]) == Given(2, 1)
