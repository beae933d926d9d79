"""The verb preempt: the fewest pods whose eviction frees room for a pod on one GPU, or none, where none helps.

kube-scheduler chooses victims by the sum of a node's units, and evicts too few or the wrong ones where the units that
it frees lie on several GPUs. So the victims with units are chosen again among all pods of a lower priority, by its own
order: the fewest violations of PodDisruptionBudgets, then the lowest priorities, then the fewest pods. A victim whose
units are not needed stays a victim: kube-scheduler chose it for its processors, its memory or another resource, which
the extender does not know (decisions 183 and 184).
"""

from collections.abc import Iterator, Mapping, Sequence

from gpuvirt.cluster.extender.protocol import MetaPod, MetaVictims, PreemptionArguments, Victims
from gpuvirt.cluster.shares.budgets import DisruptionBudgets
from gpuvirt.cluster.shares.index import Index
from gpuvirt.cluster.shares.objects import demand_of_pod
from gpuvirt.cluster.shares.sharing import Sharing
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.shares.books import NodeBooks
from gpuvirt.model.shares.demand import Demand, UnplaceableError
from gpuvirt.model.shares.eviction import EvictionCandidate, cost, victims, violations
from gpuvirt.model.shares.placement import place
from gpuvirt.model.shares.quantities import InvalidQuantityError


def preempted(
    asked: PreemptionArguments, index: Index, budgets: DisruptionBudgets, sharing: Sharing
) -> Iterator[tuple[str, MetaVictims | None]]:
    """Yield the victims on each node, searched as they are asked for; None where evictions do not help."""
    try:
        demand = demand_of_pod(asked.pod, sharing.resource, sharing.whole)
    except (InvalidQuantityError, UnplaceableError):
        return
    for name, proposed in asked.victims.items():
        chosen: Victims | None = None
        if not demand.containers:
            chosen = proposed
        elif (books := index.books_for(asked.pod, name)) is not None and proposed.pods:
            candidates = _candidates(index, name, budgets, asked.pod.spec.priority)
            chosen = _Choice(books, demand, sharing, candidates, proposed).victims()
        yield name, _meta(chosen) if chosen is not None else None


def _candidates(
    index: Index, name: NodeName, budgets: DisruptionBudgets, priority: int
) -> Mapping[PodUid, EvictionCandidate]:
    """Return the pods of a lower priority that take units on a node."""
    return {
        uid: EvictionCandidate(uid, pod.spec.priority, budgets.covering(pod), bool(pod.metadata.deletion_timestamp))
        for uid, pod in index.pods_on(name).items()
        if pod.spec.priority < priority
    }


class _Choice:
    """The choice of the victims on one node."""

    def __init__(
        self,
        books: NodeBooks,
        demand: Demand,
        sharing: Sharing,
        candidates: Mapping[PodUid, EvictionCandidate],
        proposed: Victims,
    ) -> None:
        self._books = books
        self._demand = demand
        self._whole = sharing.whole
        self._candidates = candidates
        self._proposed = proposed
        self._with_units = [candidates[pod] for pod in proposed.pods if pod in candidates and books.has(pod)]

    def victims(self) -> Victims | None:
        """Return the victims; None where no eviction makes the pod fit."""
        kept = self._needed_otherwise()
        uids = {candidate.pod for candidate in kept}
        rest = [candidate for candidate in self._candidates.values() if candidate.pod not in uids]
        chosen = victims(self._books.without(uids), self._demand, rest, self._whole)
        if chosen is None:
            return None
        best = sorted((*kept, *chosen), key=lambda candidate: (-candidate.priority, candidate.pod))
        if self._helps() and cost(self._books, self._with_units) <= cost(self._books, best):
            best = sorted(self._with_units, key=lambda candidate: -candidate.priority)
        return self._answer(best)

    def _helps(self) -> bool:
        """Return whether the proposal makes the pod fit."""
        free = self._books.without(self._proposed.pods).free
        return place(self._demand, free, whole=self._whole) is not None

    def _needed_otherwise(self) -> Sequence[EvictionCandidate]:
        """Return the proposed victims without which the sum of units is enough."""
        taken = {candidate.pod: sum(self._books.used(candidate.pod).values()) for candidate in self._with_units}
        spare = sum(self._books.free.values()) + sum(taken.values()) - self._demand.total
        return [candidate for candidate in self._with_units if taken[candidate.pod] <= spare]

    def _answer(self, chosen: Sequence[EvictionCandidate]) -> Victims:
        """Return victims with units, and with them those that have none, the highest priorities first."""
        units = {candidate.pod for candidate in self._with_units}
        others = [pod for pod in self._proposed.pods if pod not in units]
        violating_others = min(max(self._proposed.violations - violations(self._with_units), 0), len(others))
        return Victims([*others, *(candidate.pod for candidate in chosen)], violations(chosen) + violating_others)


def _meta(chosen: Victims) -> MetaVictims:
    return MetaVictims([MetaPod(PodUid(pod)) for pod in chosen.pods], chosen.violations)
