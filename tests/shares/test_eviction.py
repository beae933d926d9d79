"""The fewest pods are evicted that free one GPU, and none where that helps nothing."""

from collections.abc import Sequence
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.facts.ids import PodUid
from gpuvirt.model.shares.books import NodeBooks
from gpuvirt.model.shares.demand import ContainerDemand, ContainerKind, ContainerName, Demand, Units
from gpuvirt.model.shares.eviction import Candidate, victims
from gpuvirt.model.shares.placement import GpuId, Shares, place

A, B = GpuId("GPU-a"), GpuId("GPU-b")


def demand(units: int) -> Demand:
    return Demand((ContainerDemand(ContainerName("main"), ContainerKind.APP, Units(units)),))


def node(capacity: Shares, **pods: Shares) -> NodeBooks:
    books = NodeBooks()
    books.set_capacity(capacity)
    for name, used in pods.items():
        books.put(PodUid(name), used, Units(sum(used.values())))
    return books


def units(a: int = 0, b: int = 0) -> Shares:
    return {gpu: Units(number) for gpu, number in ((A, a), (B, b)) if number}


def evicted(books: NodeBooks, desired: int, *candidates: Candidate) -> list[str] | None:
    found = victims(books, demand(desired), candidates)
    return None if found is None else [one.pod for one in found]


def pod(name: str, priority: int = 0, *, is_protected: bool = False) -> Candidate:
    return Candidate(PodUid(name), priority, is_protected)


FULL = units(1000, 1000)


def test_nothing_is_evicted_where_the_pod_fits() -> None:
    assert evicted(node(FULL, x=units(a=500)), 500, pod("x")) == []


def test_one_gpu_is_freed_and_not_the_total() -> None:
    """600 units are free on two GPUs once x and y have gone, and on one GPU once z has."""
    books = node(FULL, x=units(a=300), y=units(b=300), z=units(a=700), w=units(b=700))
    assert evicted(books, 600, pod("x"), pod("y"), pod("z")) == ["z"]


def test_small_pods_stay_where_a_large_one_is_enough() -> None:
    books = node(units(1000), small=units(a=200), other=units(a=200), large=units(a=600))
    assert evicted(books, 500, pod("small"), pod("other"), pod("large")) == ["large"]


def test_low_priorities_go_first() -> None:
    books = node(units(1000), low=units(a=500), high=units(a=500))
    assert evicted(books, 500, pod("low", 1), pod("high", 2)) == ["low"]


def test_a_protected_pod_goes_only_where_no_other_helps() -> None:
    books = node(units(1000), kept=units(a=500), other=units(a=500))
    assert evicted(books, 500, pod("kept", is_protected=True), pod("other", 5)) == ["other"]
    assert evicted(books, 1000, pod("kept", is_protected=True), pod("other", 5)) == ["kept", "other"]


def test_no_pod_goes_where_that_helps_nothing() -> None:
    books = node(units(1000), high=units(a=800), low=units(a=200))
    assert evicted(books, 500, pod("low")) is None


def test_pods_of_other_nodes_are_no_victims() -> None:
    assert evicted(node(units(1000), x=units(a=1000)), 500, pod("elsewhere"), pod("x")) == ["x"]


PODS = st.lists(
    st.tuples(
        st.sampled_from([A, B]), st.integers(1, 5).map(lambda number: number * 100), st.integers(0, 2), st.booleans()
    ),
    max_size=5,
)


@given(PODS, st.integers(1, 10).map(lambda number: number * 100))
def test_victims_are_enough_and_none_is_in_vain(pods: Sequence[tuple[GpuId, int, int, bool]], desired: int) -> None:
    books = node(FULL)
    candidates: list[Candidate] = []
    for number, (gpu, taken, priority, is_protected) in enumerate(pods):
        if books.free[gpu] >= taken:
            candidate = pod(f"p{number}", priority, is_protected=is_protected)
            books.put(candidate.pod, {gpu: Units(taken)}, Units(taken))
            candidates.append(candidate)
    found = victims(books, demand(desired), candidates)
    assert found is not None, "an empty node has room for it"
    gone = [one.pod for one in found]
    assert place(demand(desired), books.without(gone).free) is not None
    for kept in gone:
        assert place(demand(desired), books.without([one for one in gone if one != kept]).free) is None
    if not any(one.is_protected or one.priority for one in candidates):
        enough = (
            some
            for some in combinations(candidates, max(len(found) - 1, 0))
            if place(demand(desired), books.without([one.pod for one in some]).free) is not None
        )
        assert not found or next(enough, None) is None, "fewer would do"
