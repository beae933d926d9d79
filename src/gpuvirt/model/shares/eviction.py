"""Which pods must be evicted so that another fits: the fewest, of the lowest priority, and no protected ones in vain.

Units that are free in total may lie on several GPUs, so the pods that the kube-scheduler would evict for the total do
not always free one GPU.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpuvirt.facts.ids import PodUid
from gpuvirt.model.shares.books import NodeBooks
from gpuvirt.model.shares.demand import WHOLE, Demand, Units
from gpuvirt.model.shares.placement import GpuId, Shares, place


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pod that may be evicted: its priority is lower than that of the pod that does not fit."""

    pod: PodUid
    priority: int = 0
    is_protected: bool = False
    """Whether its eviction would violate a PodDisruptionBudget."""


def victims(
    books: NodeBooks, demand: Demand, candidates: Sequence[Candidate], whole: Units = WHOLE
) -> tuple[Candidate, ...] | None:
    """Return the pods of a node whose eviction makes a pod fit, none where it fits already.

    None where no eviction helps. Of a share that lies on one GPU, the GPU is the one that costs least; pods on other
    GPUs stay.
    """
    if place(demand, books.free, whole=whole) is not None:
        return ()
    exists = [one for one in candidates if books.has(one.pod)]
    scopes = _scopes(books, demand, exists, whole)
    found = [one for scope in scopes if (one := _reprieved(books, demand, scope, whole)) is not None]
    return min(found, key=lambda evicted: _cost(books, evicted), default=None)


def _scopes(
    books: NodeBooks, demand: Demand, candidates: Sequence[Candidate], whole: Units
) -> Iterable[Sequence[Candidate]]:
    """Yield sets of pods to choose from: those on each GPU for shares, and all of the node."""
    if demand.largest < whole:
        for gpu in books.capacity:
            yield [one for one in candidates if _is_on(books.pods, one.pod, gpu)]
    yield candidates


def _is_on(pods: Mapping[PodUid, Shares], pod: PodUid, gpu: GpuId) -> bool:
    return pod not in pods or gpu in pods[pod]  # a pod whose GPUs are not known counts on each


def _reprieved(
    books: NodeBooks, demand: Demand, candidates: Sequence[Candidate], whole: Units
) -> tuple[Candidate, ...] | None:
    """Return which of the candidates must go: protected ones, high priorities and small pods stay first."""
    gone = {one.pod: one for one in candidates}
    if place(demand, books.without(gone).free, whole=whole) is None:
        return None
    for one in sorted(candidates, key=lambda one: (not one.is_protected, -one.priority, _units(books, one), one.pod)):
        rest = gone.keys() - {one.pod}
        if place(demand, books.without(rest).free, whole=whole) is not None:
            del gone[one.pod]
    return tuple(sorted(gone.values(), key=lambda one: (one.priority, one.pod)))


def _units(books: NodeBooks, candidate: Candidate) -> int:
    return sum(books.pods.get(candidate.pod, {}).values())


def _cost(books: NodeBooks, found: Sequence[Candidate]) -> tuple[int, int, int, int, int]:
    """Return what evictions cost, in the order in which the kube-scheduler compares nodes, and then their units."""
    protected = sum(one.is_protected for one in found)
    highest = max((one.priority for one in found), default=0)
    priorities, units = sum(one.priority for one in found), sum(_units(books, one) for one in found)
    return protected, highest, len(found), priorities, units
