"""The fewest pods are evicted that free one GPU, and none where that helps nothing."""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.facts.ids import PodUid
from gpuvirt.model.shares import eviction
from gpuvirt.model.shares.demand import WHOLE, ContainerDemand, ContainerKind, ContainerName, Demand, Units
from gpuvirt.model.shares.eviction import BudgetName, EvictionCandidate, cost, search_victims, victims, violations
from gpuvirt.model.shares.nodeusage import NodeUsage
from gpuvirt.model.shares.placement import GpuId, Shares, Steps, finished, place

A, B = GpuId("GPU-a"), GpuId("GPU-b")


def demand(units: int) -> Demand:
    return Demand((ContainerDemand(ContainerName("main"), ContainerKind.APP, Units(units)),))


def node(capacity: Shares, **pods: Shares) -> NodeUsage:
    usage = NodeUsage()
    usage = usage.with_capacity(capacity)
    for name, used in pods.items():
        usage = usage.with_pod(PodUid(name), used, Units(sum(used.values())))
    return usage


def units(a: int = 0, b: int = 0) -> Shares:
    return {gpu: Units(number) for gpu, number in ((A, a), (B, b)) if number}


def evicted(usage: NodeUsage, desired: int, *candidates: EvictionCandidate) -> list[str] | None:
    found = victims(usage, demand(desired), candidates)
    return None if found is None else [candidate.pod for candidate in found]


def pod(name: str, priority: int = 0, **budgets: int) -> EvictionCandidate:
    """Return a pod; `budgets` are the PodDisruptionBudgets that cover it, with the evictions that each allows."""
    return EvictionCandidate(
        PodUid(name), priority, {BudgetName(budget): allowed for budget, allowed in budgets.items()}
    )


FULL = units(1000, 1000)


def test_nothing_is_evicted_where_the_pod_fits() -> None:
    assert evicted(node(FULL, x=units(a=500)), 500, pod("x")) == []


def test_one_gpu_is_freed_and_not_the_total() -> None:
    """600 units are free on two GPUs once x and y have gone, and on one GPU once z has."""
    usage = node(FULL, x=units(a=300), y=units(b=300), z=units(a=700), w=units(b=700))
    assert evicted(usage, 600, pod("x"), pod("y"), pod("z")) == ["z"]


def test_small_pods_stay_where_a_large_one_is_enough() -> None:
    usage = node(units(1000), small=units(a=200), other=units(a=200), large=units(a=600))
    assert evicted(usage, 500, pod("small"), pod("other"), pod("large")) == ["large"]


def test_low_priorities_go_first() -> None:
    usage = node(units(1000), low=units(a=500), high=units(a=500))
    assert evicted(usage, 500, pod("low", 1), pod("high", 2)) == ["low"]


def test_a_protected_pod_goes_only_where_no_other_helps() -> None:
    usage = node(units(1000), kept=units(a=500), other=units(a=500))
    assert evicted(usage, 500, pod("kept", web=0), pod("other", 5)) == ["other"]
    assert evicted(usage, 1000, pod("kept", web=0), pod("other", 5)) == ["kept", "other"]


def test_a_budget_allows_as_many_evictions_as_it_says() -> None:
    """Two of three small pods, or one large one of a higher priority."""
    usage = node(units(1000), x=units(a=200), y=units(a=200), z=units(a=100), large=units(a=500))
    small = [pod(name, web=2) for name in "xyz"]
    assert evicted(usage, 400, *small, pod("large", 5)) == ["x", "y"]
    assert evicted(usage, 500, *small, pod("large", 5)) == ["large"]


def test_one_pod_that_a_budget_allows_goes_in_place_of_two() -> None:
    """The budget counts what is evicted, and not all that could be."""
    usage = node(units(1000), x=units(a=100), y=units(a=500), z=units(a=400))
    assert evicted(usage, 500, pod("x", web=1), pod("y", web=1), pod("z")) == ["y"]


def test_each_budget_of_a_pod_counts() -> None:
    both, one = pod("both", web=1, all=1), pod("one", all=1)
    assert violations([both]) == 0
    assert violations([both, one]) == 1
    assert violations([pod("x", web=0, all=0)]) == 1, "a pod is one violation, by however many budgets"


def test_two_whole_gpus_are_those_that_fewer_pods_use() -> None:
    usage = node({**FULL, GpuId("GPU-c"): Units(1000)}, x=units(a=10), y=units(a=10), z=units(a=10), w=units(b=900))
    usage = usage.with_pod(PodUid("v"), {GpuId("GPU-c"): Units(900)}, Units(900))
    assert evicted(usage, 2000, *map(pod, "xyzwv")) == ["v", "w"]


def test_no_pod_goes_where_that_helps_nothing() -> None:
    usage = node(units(1000), high=units(a=800), low=units(a=200))
    assert evicted(usage, 500, pod("low")) is None


def test_pods_of_other_nodes_are_no_victims() -> None:
    assert evicted(node(units(1000), x=units(a=1000)), 500, pod("elsewhere"), pod("x")) == ["x"]


def test_a_pod_that_is_being_deleted_goes_before_any_other() -> None:
    usage = node(units(1000), x=units(a=400), y=units(a=300), z=units(a=300))
    ending = [EvictionCandidate(PodUid(name), 7, is_ending=True) for name in "yz"]
    assert evicted(usage, 400, pod("x"), *ending) == ["y", "z"]
    assert evicted(usage, 300, pod("x"), *ending) == ["z"]


class _Pod(NamedTuple):
    gpu: GpuId
    units: Units
    priority: int
    budgets: frozenset[str]
    is_ending: bool


ALLOWED = {"web": 0, "all": 1, "data": 2}
PODS = st.lists(
    st.builds(
        _Pod,
        st.sampled_from([A, B]),
        st.integers(1, 5).map(lambda number: Units(number * 100)),
        st.integers(-1, 2),
        st.frozensets(st.sampled_from(sorted(ALLOWED))),
        st.booleans(),
    ),
    max_size=6,
)


def full_node(pods: Sequence[_Pod]) -> tuple[NodeUsage, Sequence[EvictionCandidate]]:
    """Return a node with as many of the pods as there is room for."""
    usage = node(FULL)
    candidates: list[EvictionCandidate] = []
    for number, pod in enumerate(pods):
        if usage.free[pod.gpu] >= pod.units:
            allowed = {BudgetName(name): ALLOWED[name] for name in pod.budgets}
            candidate = EvictionCandidate(PodUid(f"p{number}"), pod.priority, allowed, pod.is_ending)
            usage = usage.with_pod(candidate.pod, {pod.gpu: pod.units}, pod.units)
            candidates.append(candidate)
    return usage, candidates


DESIRED = st.sampled_from([*range(100, 1001, 100), 2000])


@given(PODS, DESIRED, st.sampled_from([0, 2, eviction.MOST_TRIES]))
def test_victims_are_enough_and_none_is_in_vain(pods: Sequence[_Pod], desired: int, tries: int) -> None:
    """However long the search is."""
    usage, candidates = full_node(pods)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction, "MOST_TRIES", tries)
        found = victims(usage, demand(desired), candidates)
    assert found is not None, "an empty node has room for it"
    assert helps(usage, desired, found)
    for kept in found:
        assert not helps(usage, desired, [candidate for candidate in found if candidate is not kept]), (
            "an eviction that is not needed"
        )


@given(PODS, DESIRED)
def test_victims_are_the_cheapest_that_are_enough(pods: Sequence[_Pod], desired: int) -> None:
    usage, candidates = full_node(pods)
    found = victims(usage, demand(desired), candidates)
    assert found is not None
    sets = (some for count in range(len(candidates) + 1) for some in combinations(candidates, count))
    assert cost(usage, found) == min(cost(usage, some) for some in sets if helps(usage, desired, some))


@pytest.mark.parametrize("desired", [3000, 10**18, 2**63 - 808])
def test_more_gpus_than_the_node_has_are_freed_by_no_eviction(desired: int) -> None:
    assert evicted(node(FULL, x=units(a=500)), desired, pod("x")) is None


@given(PODS, DESIRED, st.integers(4, 60))
def test_the_work_of_a_search_is_bounded_and_no_pod_is_a_victim_for_want_of_steps(
    pods: Sequence[_Pod], desired: int, most: int
) -> None:
    usage, candidates = full_node(pods)
    steps = Steps(most)
    found = finished(search_victims(usage, demand(desired), candidates, WHOLE, steps))
    assert steps.left >= -8 * (len(candidates) + 1), "the last try is counted, too"
    assert found is None or helps(usage, desired, found)
    for kept in found or ():
        assert not helps(usage, desired, [candidate for candidate in found or () if candidate is not kept])


def helps(usage: NodeUsage, desired: int, gone: Sequence[EvictionCandidate]) -> bool:
    return place(demand(desired), usage.without([candidate.pod for candidate in gone]).free) is not None
