"""Preferred devices: by NUMA nodes first, then whole groups, then the fewest broken groups and split GPUs."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress
from gpuvirt.model.allocation.placement import DevicePlace, PlacementError, prefer
from gpuvirt.model.desired.settings import Spread


def ids(*names: str) -> list[DeviceId]:
    return [DeviceId(name) for name in names]


def on_nodes(**nodes: int | None) -> Mapping[DeviceId, DevicePlace]:
    return {
        DeviceId(name): DevicePlace(node, IommuGroup(number), PciAddress(name))
        for number, (name, node) in enumerate(nodes.items())
    }


FOUR = on_nodes(gpu0=0, gpu1=0, gpu2=1, gpu3=1)
ALL = ids("gpu0", "gpu1", "gpu2", "gpu3")


# The cases that the kubevirt-gpu-device-plugin's own tests have.


@pytest.mark.parametrize(
    ("musts", "size", "expected"),
    [
        (ids("gpu2"), 2, ids("gpu2", "gpu3")),
        (ids("gpu0", "gpu2"), 3, ids("gpu0", "gpu2", "gpu1")),
        (ids("gpu0", "gpu1"), 2, ids("gpu0", "gpu1")),
        ([], 2, ids("gpu0", "gpu1")),
    ],
)
def test_cases_of_the_kubevirt_gpu_device_plugin(musts: list[DeviceId], size: int, expected: list[DeviceId]) -> None:
    assert list(prefer(ALL, musts, size, FOUR)) == expected


def test_more_required_devices_than_the_allocation_size_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"2 devices .* allocation of 1"):
        prefer(ALL, ids("gpu0", "gpu1"), 1, FOUR)


def test_a_negative_allocation_size_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"an allocation of -3 devices is requested; expected 0 or more"):
        prefer(ALL, [], -3, FOUR)


def test_the_numa_node_with_the_fewest_sufficient_devices_is_preferred() -> None:
    places = on_nodes(a=0, b=0, c=0, d=1, e=1)
    assert set(prefer(ids("a", "b", "c", "d", "e"), [], 2, places)) == {"d", "e"}
    assert set(prefer(ids("a", "b", "c", "d", "e"), [], 1, places)) <= {"d", "e"}


def test_devices_come_from_as_few_numa_nodes_as_possible() -> None:
    places = on_nodes(a=0, b=1, c=1, d=2, e=2, f=2)
    assert set(prefer(ids("a", "b", "c", "d", "e", "f"), [], 4, places)) == {"a", "d", "e", "f"}


def test_devices_with_an_unknown_numa_node_come_last() -> None:
    places = on_nodes(a=None, b=None, c=None, d=1, e=1)
    assert set(prefer(ids("a", "b", "c", "d", "e"), [], 2, places)) == {"d", "e"}
    assert set(prefer(ids("a", "b", "c", "d", "e"), [], 3, places)) > {"d", "e"}


def test_a_group_of_two_is_kept_for_a_request_for_two() -> None:
    places = {
        DeviceId("left"): DevicePlace(0, IommuGroup(1), None),
        DeviceId("right"): DevicePlace(0, IommuGroup(1), None),
        DeviceId("alone"): DevicePlace(0, IommuGroup(2), None),
    }
    every = ids("left", "right", "alone")
    assert list(prefer(every, [], 1, places)) == ["alone"]
    assert set(prefer(every, [], 2, places)) == {"left", "right"}
    assert set(prefer(every, ids("left"), 2, places)) == {"left", "right"}


def test_vgpus_are_spread_over_gpus_or_packed() -> None:
    places = {
        DeviceId(f"{gpu}{number}"): DevicePlace(0, None, PciAddress(gpu))
        for gpu, count in (("a", 3), ("b", 1), ("c", 2))
        for number in range(count)
    }
    every = list(places)
    assert [device[0] for device in prefer(every, [], 3, places, Spread.SPREAD)] == ["a", "a", "c"]
    assert [device[0] for device in prefer(every, [], 3, places, Spread.PACK)] == ["b", "c", "c"]


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[DeviceId], list[DeviceId], int, dict[DeviceId, DevicePlace]]:
    count = draw(st.integers(0, 10))
    names = [DeviceId(f"d{number}") for number in range(count)]
    places = {
        name: DevicePlace(
            draw(st.sampled_from([None, 0, 1, 2])),
            draw(st.sampled_from([None, 1, 2, 3]).map(lambda group: group if group is None else IommuGroup(group))),
            draw(st.sampled_from([None, "g1", "g2"]).map(lambda gpu: gpu if gpu is None else PciAddress(gpu))),
        )
        for name in names
    }
    musts = draw(st.lists(st.sampled_from(names), unique=True, max_size=4)) if names else []
    size = draw(st.integers(len(musts), count + 2))
    return names, musts, size, places


def span(devices: Sequence[DeviceId], places: Mapping[DeviceId, DevicePlace]) -> tuple[int, int]:
    """Return the number of devices without a known NUMA node, and the number of nodes of the others."""
    nodes = [places[device].numa_node for device in devices]
    return nodes.count(None), len(set(nodes) - {None})


@given(requests(), st.sampled_from(Spread))
def test_invariants_of_any_preferred_allocation(
    request: tuple[list[DeviceId], list[DeviceId], int, dict[DeviceId, DevicePlace]], spread: Spread
) -> None:
    available, musts, size, places = request
    chosen = prefer(available, musts, size, places, spread)
    assert len(chosen) == len(set(chosen)) == min(size, len(available))
    assert list(chosen[: len(musts)]) == musts
    assert set(chosen) <= set(available)
    assert chosen == prefer(available, musts, size, places, spread), "the same request has the same answer"


@given(requests())
def test_no_other_choice_spans_fewer_numa_nodes(
    request: tuple[list[DeviceId], list[DeviceId], int, dict[DeviceId, DevicePlace]],
) -> None:
    available, musts, size, places = request
    chosen = prefer(available, musts, size, places)
    others = [device for device in available if device not in musts]
    picks = combinations(others, len(chosen) - len(musts))
    assert span(chosen, places) <= min(span((*musts, *pick), places) for pick in picks)
