"""Shares are placed where they fit, on the fewest GPUs, and never on more than a GPU has."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.model.shares.demand import (
    WHOLE,
    ContainerDemand,
    ContainerKind,
    ContainerName,
    Demand,
    Units,
    UnplaceableError,
    demand_of,
)
from gpuvirt.model.shares.placement import MOST_STEPS, GpuId, Policy, Shares, Steps, place
from gpuvirt.model.shares.wording import requested_text

INIT, SIDECAR, APP = ContainerKind


def container(name: str, units: int, kind: ContainerKind = APP) -> ContainerDemand:
    return ContainerDemand(ContainerName(name), kind, Units(units))


def pod(*containers: ContainerDemand) -> Demand:
    return demand_of(containers)


def gpus(*free: int) -> Shares:
    return {GpuId(f"GPU-{number}"): Units(units) for number, units in enumerate(free)}


def taken(demand: Demand, free: Shares, policy: Policy = Policy.BINPACK) -> Mapping[str, int] | None:
    found = place(demand, free, policy)
    return None if found is None else {str(gpu): int(units) for gpu, units in found.used.items()}


def test_the_fullest_gpu_with_room_is_taken() -> None:
    """The example of a scheduler that others document: GPU 1 has just what is requested."""
    free = {GpuId(f"GPU-{number}"): Units(units) for number, units in enumerate((12207, 8138, 4069, 16276))}
    found = place(pod(container("main", 814)), gpus(900, 814, 400, 1000))
    assert found is not None
    assert found.containers == {"main": {"GPU-1": 814}}
    assert max(free.values()) == 16276


@pytest.mark.parametrize(
    ("policy", "gpu"), [(Policy.BINPACK, "GPU-2"), (Policy.SPREAD, "GPU-0")], ids=["binpack", "spread"]
)
def test_the_policy_chooses_the_gpu(policy: Policy, gpu: str) -> None:
    assert taken(pod(container("main", 300)), gpus(1000, 700, 300), policy) == {gpu: 300}


def test_free_in_total_is_not_free_in_one_piece() -> None:
    assert taken(pod(container("main", 500)), gpus(400, 400)) is None


def test_containers_that_fit_on_one_gpu_together_share_it() -> None:
    assert taken(pod(container("a", 300), container("b", 300)), gpus(1000, 300, 300)) == {"GPU-0": 600}


def test_containers_go_to_several_gpus_where_one_is_too_small() -> None:
    assert taken(pod(container("a", 300), container("b", 400)), gpus(450, 350)) == {"GPU-0": 400, "GPU-1": 300}


def test_whole_gpus_are_free_ones() -> None:
    assert taken(pod(container("main", 2000)), gpus(1000, 999, 1000)) == {"GPU-0": 1000, "GPU-2": 1000}
    assert taken(pod(container("main", 2000)), gpus(1000, 999, 999)) is None


def test_a_container_with_more_than_a_gpu_and_no_whole_number_is_refused() -> None:
    with pytest.raises(UnplaceableError, match="container main requests 1500 units, and a GPU has 1000"):
        pod(container("main", 1500))


def test_an_init_container_shares_its_units_with_those_that_run_later() -> None:
    demand = pod(container("init", 800, INIT), container("main", 500))
    assert demand.total == 800
    assert taken(demand, gpus(800)) == {"GPU-0": 800}


def test_a_sidecar_runs_beside_all_that_follow() -> None:
    demand = pod(
        container("first", 900, INIT),
        container("side", 200, SIDECAR),
        container("second", 700, INIT),
        container("m", 1),
    )
    assert [sum(container.units for container in phase) for phase in demand.phases()] == [900, 200, 900, 201]
    assert demand.total == 900


def test_a_pod_without_units_takes_nothing() -> None:
    assert taken(pod(container("main", 0)), gpus()) == {}


KINDS = st.sampled_from([INIT, SIDECAR, APP])
UNITS = st.integers(1, 10).map(lambda tenths: tenths * 100)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    drawn = draw(st.lists(st.tuples(KINDS, UNITS | st.just(2000)), min_size=1, max_size=4))
    ordered = sorted(drawn, key=lambda container: container[0] is APP)
    return pod(*(container(f"c{number}", units, kind) for number, (kind, units) in enumerate(ordered)))


FREE = st.lists(st.integers(0, 10).map(lambda tenths: tenths * 100), max_size=4).map(lambda units: gpus(*units))


def arrangements(demand: Demand, free: Shares) -> Sequence[Mapping[ContainerName, Shares]]:
    """Return all ways to give each container GPUs, whether or not they have room."""
    choices: list[list[Shares]] = []
    for container in demand.containers:
        if number := container.gpus(WHOLE):
            choices.append([dict.fromkeys(some, WHOLE) for some in combinations(sorted(free), number)])
        else:
            choices.append([{gpu: container.units} for gpu in free])
    names = [container.name for container in demand.containers]
    return [dict(zip(names, chosen, strict=True)) for chosen in product(*choices)]


def has_room(demand: Demand, free: Shares, arrangement: Mapping[ContainerName, Shares]) -> bool:
    return all(
        sum(arrangement[container.name].get(gpu, 0) for container in phase) <= units
        for phase in demand.phases()
        for gpu, units in free.items()
    )


@given(demands(), FREE, st.sampled_from(list(Policy)))
def test_a_pod_is_placed_where_any_arrangement_has_room_and_only_there(
    demand: Demand, free: Shares, policy: Policy
) -> None:
    found = place(demand, free, policy)
    assert (found is not None) == any(has_room(demand, free, arrangement) for arrangement in arrangements(demand, free))
    if found is not None:
        assert has_room(demand, free, found.containers)
        assert all(units <= free[gpu] for gpu, units in found.used.items())
        assert sum(found.used.values()) >= demand.total


@given(demands(), FREE, st.sampled_from(list(Policy)))
def test_the_order_of_gpus_does_not_matter(demand: Demand, free: Shares, policy: Policy) -> None:
    backwards = dict(reversed(list(free.items())))
    assert place(demand, free, policy) == place(demand, backwards, policy)


MANY = pod(*(container(f"c{number}", 335 + number) for number in range(17)))
"""17 containers of which two fit on a GPU: on 8 GPUs there are billions of arrangements, and none of them fits."""


@pytest.mark.parametrize(
    "demand",
    [
        MANY,
        pod(*(container(f"c{number}", 335 + number) for number in range(58))),
        pod(*(container(f"c{number}", 100 + number, SIDECAR) for number in range(400))),
        pod(*(container(f"c{number}", 335 + number % 3) for number in range(15)), container("whole", 1000)),
    ],
    ids=["17", "58", "sidecars", "16"],
)
@pytest.mark.parametrize("policy", list(Policy))
def test_the_work_of_a_search_is_bounded(demand: Demand, policy: Policy) -> None:
    given = 10 * MOST_STEPS
    steps = Steps(given)
    free = gpus(*(999 for _ in range(7)), *(1 for _ in range(60)), 1000)
    assert place(demand, free, policy, steps=steps) is None
    most = MOST_STEPS + len(demand.containers)  # a step of a sidecar compares several phases
    assert given - steps.left <= 2 * most, "a policy that decides nothing is followed by packing"


def test_a_pod_with_too_many_arrangements_is_undecided() -> None:
    steps = Steps(MOST_STEPS)
    assert place(MANY, gpus(*(1000 for _ in range(8))), steps=steps) is None
    assert steps.is_undecided
    assert place(MANY, gpus(*(300 for _ in range(8))), steps=steps) is None
    assert not steps.is_undecided, "it is certain: the units are more than are left"


@pytest.mark.parametrize(("number", "units", "pieces"), [(17, 335, 9), (58, 335, 29), (300, 10, 4)])
@pytest.mark.parametrize("policy", list(Policy))
def test_any_number_of_containers_fits_where_the_largest_are_placed_first(
    number: int, units: int, pieces: int, policy: Policy
) -> None:
    steps, free = Steps(MOST_STEPS), gpus(*(1000 for _ in range(pieces)))
    demand = pod(*(container(f"c{index}", units + index % 3) for index in range(number)))
    found = place(demand, free, policy, steps=steps)
    assert found is not None
    assert has_room(demand, free, found.containers)
    assert not steps.is_undecided


@pytest.mark.parametrize(
    ("containers", "text"),
    [
        ([(APP, 300)], "300 units"),
        ([(APP, 600), (APP, 400)], "600 + 400 units"),
        ([(INIT, 625), (INIT, 625), (INIT, 625)], "625 units"),
        ([(INIT, 700), (INIT, 200), (APP, 500)], "700, then 200, then 500 units"),
        ([(INIT, 100), (SIDECAR, 200), (INIT, 700), (APP, 300)], "100, then 200 + 700, then 200 + 300 units"),
        ([(SIDECAR, 200)], "200 units"),
        ([(APP, 10)] * 9, "90 (by 9 containers) units"),
    ],
)
def test_only_units_that_are_requested_at_the_same_time_are_added(
    containers: Sequence[tuple[ContainerKind, int]], text: str
) -> None:
    assert (
        requested_text(pod(*(container(f"c{index}", units, kind) for index, (kind, units) in enumerate(containers))))
        == text
    )
