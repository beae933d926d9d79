"""The annotations of the agent and the extender are read as they were written; an edited one is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.model.shares.annotations import (
    InvalidAnnotationError,
    pod_shares,
    pod_shares_text,
    shared_gpus,
    shared_gpus_text,
)
from gpuvirt.model.shares.demand import ContainerDemand, ContainerKind, ContainerName, Demand, Units, demand_of
from gpuvirt.model.shares.placement import GpuId, place

GPUS = st.builds(GpuId, st.uuids().map(lambda uuid: f"GPU-{uuid}"))
UNITS = st.builds(Units, st.one_of(st.integers(1, 1000), st.sampled_from([1000, 2000])))
CONTAINERS = st.lists(st.tuples(st.sampled_from(ContainerKind), UNITS), min_size=1, max_size=4).map(
    lambda drawn: demand_of(
        [ContainerDemand(ContainerName(f"c{number}"), kind, units) for number, (kind, units) in enumerate(drawn)]
    )
)
MAIN = demand_of([ContainerDemand(ContainerName("main"), ContainerKind.APP, Units(300))])


@given(CONTAINERS, st.dictionaries(GPUS, st.builds(Units, st.integers(0, 1000)), max_size=4))
def test_a_placement_is_read_as_it_was_written(demand: Demand, free: dict[GpuId, Units]) -> None:
    if (chosen := place(demand, free)) is not None:
        assert pod_shares(pod_shares_text(chosen), demand) == chosen


@given(st.dictionaries(GPUS, st.builds(Units, st.integers(0, 1000))))
def test_the_gpus_of_a_node_are_read_as_they_were_written(capacity: dict[GpuId, Units]) -> None:
    assert shared_gpus(shared_gpus_text(capacity)) == capacity
    assert shared_gpus_text(dict(reversed(capacity.items()))) == shared_gpus_text(capacity)


def test_the_annotation_says_what_enforces_the_share() -> None:
    chosen = place(MAIN, {GpuId("GPU-1"): Units(1000)})
    assert chosen is not None
    assert pod_shares_text(chosen) == '{"containers":{"main":{"GPU-1":300}},"enforcement":"none"}'


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "cannot be parsed"),
        ("[]", "cannot be parsed"),
        ('{"containers":{"main":{"GPU-1":"300"}}}', "cannot be parsed"),
        ('{"containers":{}}', r"container main has \[\] units on 0 GPUs; expected \[300\]"),
        ('{"containers":{"main":{"GPU-1":200}}}', r"has \[200\] units on 1 GPU; expected \[300\]"),
        ('{"containers":{"main":{"GPU-1":150,"GPU-2":150}}}', r"has \[150, 150\] units on 2 GPUs"),
        ('{"containers":{"main":{"GPU-1":300},"other":{"GPU-1":1}}}', "container other requests no units"),
    ],
)
def test_an_edited_annotation_of_a_pod_is_refused(text: str, fault: str) -> None:
    with pytest.raises(InvalidAnnotationError, match=fault):
        pod_shares(text, MAIN)


@pytest.mark.parametrize("text", ["", "null", "[]", '{"GPU-1":"1000"}', '{"GPU-1":1.5}', '{"GPU-1":-1}'])
def test_an_edited_annotation_of_a_node_is_refused(text: str) -> None:
    with pytest.raises(InvalidAnnotationError, match=r"gpuvirt\.io/shared-gpus"):
        shared_gpus(text)


def test_an_annotation_beside_a_huge_request_is_refused_without_work() -> None:
    huge = Demand((ContainerDemand(ContainerName("main"), ContainerKind.APP, Units(10**18)),))
    with pytest.raises(InvalidAnnotationError, match=r"on 1 GPU; expected 1000000000000000 GPUs with 1000"):
        pod_shares('{"containers":{"main":{"GPU-1":1000}}}', huge)
