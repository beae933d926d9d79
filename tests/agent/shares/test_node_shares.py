"""The node's choice of GPUs: the extender's choice where it fits, another GPU where it does not, and never too much."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.facts.ids import DeviceId, PodUid
from gpuvirt.model.shares.annotations import placement
from gpuvirt.model.shares.demand import ContainerDemand, ContainerKind, ContainerName, Demand, Units
from gpuvirt.model.shares.node.choice import NodeSharing, PodOnNode, choose, why_refused
from gpuvirt.model.shares.node.records import MOST_UNITS, ShareRecords, is_unit_id, record_of, unit_id, unit_ids
from gpuvirt.model.shares.placement import GpuId, Policy, Shares

A, B = GpuId("GPU-a"), GpuId("GPU-b")
NODE = NodeSharing({A: Units(1000), B: Units(1000)})
MAIN = ContainerName("main")


def demand(units: int) -> Demand:
    return Demand((ContainerDemand(MAIN, ContainerKind.APP, Units(units)),))


def pod(uid: str, units: int, gpu: GpuId | None = None, policy: Policy | None = None) -> PodOnNode:
    desired = placement(demand(units), {MAIN: {gpu: Units(units)}}) if gpu is not None else None
    return PodOnNode(PodUid(uid), "default", uid, demand(units), desired, policy)


def started(*pods: tuple[str, int, GpuId]) -> ShareRecords:
    records = ShareRecords()
    for uid, units, gpu in pods:
        records = records.with_pod(PodUid(uid), record_of("default", uid, demand(units), {MAIN: {gpu: Units(units)}}))
    return records


NONE = ShareRecords()


def chosen(it: PodOnNode, records: ShareRecords = NONE, *others: PodOnNode) -> Shares | None:
    found = choose(it, NODE, records, others)
    return found.used if found is not None else None


def test_the_annotated_gpu_counts() -> None:
    assert chosen(pod("p", 300, B)) == {B: 300}


def test_a_full_gpu_is_replaced_by_another() -> None:
    assert chosen(pod("p", 300, B), started(("q", 800, B))) == {A: 300}


def test_a_gpu_that_is_not_shared_any_more_is_replaced() -> None:
    assert chosen(pod("p", 300, GpuId("GPU-gone"))) == {A: 300}


def test_no_gpu_is_chosen_when_all_are_full() -> None:
    assert chosen(pod("p", 300, B), started(("q", 800, B), ("r", 701, A))) is None


def test_a_pod_without_a_choice_leaves_room_for_those_with_one() -> None:
    assert chosen(pod("p", 300), ShareRecords(), pod("q", 800, A)) == {B: 300}
    assert chosen(pod("p", 300), ShareRecords(), pod("q", 800, A), pod("r", 800, B)) == {A: 300}, "first come"


def test_a_pod_may_choose_the_policy() -> None:
    records = started(("q", 100, A))
    assert chosen(pod("p", 300), records) == {A: 300}
    assert chosen(pod("p", 300, policy=Policy.SPREAD), records) == {B: 300}


@pytest.mark.parametrize(("units", "refused"), [(200, False), (201, True), (1500, True), (2000, True)])
def test_a_request_that_no_gpu_can_serve_is_refused(units: int, refused: bool) -> None:
    records = started(("q", 800, A), ("r", 900, B))
    assert (why_refused(Units(units), NODE, records, "nvidia.com/vgpu") is not None) is refused


def test_units_on_a_gpu_that_is_not_shared_any_more_count_beside_the_capacity() -> None:
    records = started(("p", 300, A), ("q", 200, GpuId("GPU-gone")))
    assert records.used_beside(NODE.capacity) == 200


@given(st.integers(0, 400), st.sets(st.integers(0, 300)))
def test_allocated_ids_stay_listed_and_the_count_is_right(count: int, allocated: set[int]) -> None:
    ids = unit_ids(count, [unit_id(number) for number in allocated])
    assert len(set(ids)) == len(ids) == max(count, len(allocated))
    assert set(map(unit_id, allocated)) <= set(ids)
    assert all(len(device) <= 5 and is_unit_id(device) for device in ids)


@given(st.integers(0, MOST_UNITS))
def test_ids_are_short_and_no_numbers_of_iommu_groups(number: int) -> None:
    device = unit_id(number)
    assert len(device) <= 5
    assert is_unit_id(device)
    assert not device.isdigit()


@pytest.mark.parametrize("device", ["", "u", "12", "u00", "0000:65:00.0", "GPU-8a5c0001-0000-4000-8000-000000000001"])
def test_ids_of_other_plugins_are_no_units(device: str) -> None:
    assert not is_unit_id(DeviceId(device))


PODS = st.lists(
    st.tuples(st.sampled_from("pqrstuvw"), st.integers(1, 1000), st.sampled_from([A, B, GpuId("GPU-c"), None])),
    max_size=20,
)


@given(PODS, st.lists(st.sampled_from("pqrstuvw"), max_size=8))
def test_no_gpu_ever_has_more_units_than_it_is_worth(
    pods: list[tuple[str, int, GpuId | None]], going: list[str]
) -> None:
    """Whatever schedulers choose, and in whichever order pods start and end."""
    records = ShareRecords()
    existing: dict[PodUid, PodOnNode] = {}
    ends = iter(going)
    for uid, units, gpu in pods:
        if PodUid(uid) in records.pods:
            continue
        it = existing[PodUid(uid)] = pod(uid, units, gpu)
        found = choose(it, NODE, records, existing.values())
        if found is not None:
            records = records.with_pod(it.uid, record_of("d", uid, it.demand, found.containers))
        used = total(records)
        assert all(used.get(unit, 0) <= NODE.capacity.get(unit, 0) for unit in used)
        assert found is not None or all(NODE.capacity[unit] - used.get(unit, 0) < units for unit in NODE.capacity)
        gone = next(ends, None)
        if gone is not None:
            existing.pop(PodUid(gone), None)
            records = records.without({PodUid(gone)})


def total(records: ShareRecords) -> Mapping[GpuId, int]:
    used: dict[GpuId, int] = {}
    for record in records.pods.values():
        for gpu, units in record.placement.used.items():
            used[gpu] = used.get(gpu, 0) + units
    return used
