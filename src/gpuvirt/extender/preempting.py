"""The verb preempt: the fewest pods whose eviction frees room for a pod on one GPU, or none, where none helps.

kube-scheduler chooses victims by the sum of a node's units, and evicts too few or the wrong ones where the units that
it frees lie on several GPUs. So the victims with units are chosen again among all pods of a lower priority, by its own
order: the fewest violations of PodDisruptionBudgets, then the lowest priorities, then the fewest pods. A victim whose
units are not needed stays a victim: kube-scheduler chose it for its processors, its memory or another resource, which
the extender does not know. Where units are free in total but not on one GPU, no pod is evicted: kube-scheduler drops
a node that needs no victims before it asks, and an answer may have nodes of the request alone.
"""

import logging
from collections.abc import Callable, Generator, Mapping

from gpuvirt.extender.protocol import MetaPod, MetaVictims, PreemptionArguments, Victims
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.shares.demand import Demand, InvalidQuantityError, UnplaceableError
from gpuvirt.model.shares.eviction import EvictionCandidate, cost, search_victims, violations
from gpuvirt.model.shares.nodeusage import NodeUsage
from gpuvirt.model.shares.placement import Steps, place
from gpuvirt.shares.budgets import DisruptionBudgets
from gpuvirt.shares.index import Index
from gpuvirt.shares.objects import demand_of_pod
from gpuvirt.shares.sharing import Sharing

log = logging.getLogger(__name__)

MOST_STEPS = 2_000_000
"""The steps of a request, about 2 s."""
_NODE = 250
"""The steps of a node, beside those of the search for its victims."""


def preempted(
    asked: PreemptionArguments,
    index: Index,
    budgets: DisruptionBudgets,
    sharing: Sharing,
    steps: Steps,
    is_late: Callable[[], bool],
) -> Generator[None, None, dict[str, MetaVictims]]:
    """Return the victims on each node where evictions help; yield between steps.

    Where it takes long, the nodes that are left are not searched: kube-scheduler chooses among those of the answer.
    """
    found = dict[str, MetaVictims]()
    try:
        demand = demand_of_pod(asked.pod, sharing.resource, sharing.whole)
    except (InvalidQuantityError, UnplaceableError):
        return found
    for number, (name, proposed) in enumerate(asked.victims.items()):
        if (found and is_late()) or steps.left <= 0:
            log.info("victims were searched on %d of %d nodes", number, len(asked.victims))
            break
        steps.take(_NODE)
        chosen: Victims | None = None
        if not demand.containers:
            chosen = proposed
        elif (usage := index.usage_for(asked.pod, name)) is not None and proposed.pods:
            candidates = _candidates(index, name, budgets, asked.pod.spec.priority)
            chosen = yield from _Choice(usage, demand, sharing, candidates, proposed, steps).victims()
        if chosen is not None:
            found[name] = MetaVictims([MetaPod(PodUid(pod)) for pod in chosen.pods], chosen.violations)
        yield
    return found


def _candidates(
    index: Index, name: NodeName, budgets: DisruptionBudgets, priority: int
) -> Mapping[PodUid, EvictionCandidate]:
    """Return the pods of a lower priority that take units on a node, also those that wait to be bound there."""
    waiting = {uid: place.pod for uid, place in index.granted.items() if place.node == name}
    return {
        uid: EvictionCandidate(uid, pod.spec.priority, budgets.covering(pod), bool(pod.metadata.deletion_timestamp))
        for uid, pod in {**index.pods_on(name), **waiting}.items()
        if pod.spec.priority < priority
    }


class _Choice:
    """The choice of the victims on one node."""

    def __init__(
        self,
        usage: NodeUsage,
        demand: Demand,
        sharing: Sharing,
        candidates: Mapping[PodUid, EvictionCandidate],
        proposed: Victims,
        steps: Steps,
    ) -> None:
        self._steps = steps
        self._usage = usage
        self._demand = demand
        self._whole = sharing.whole
        self._candidates = candidates
        self._proposed = proposed
        self._with_units = [candidates[pod] for pod in proposed.pods if pod in candidates and usage.has(pod)]

    def victims(self) -> Generator[None, None, Victims | None]:
        """Return the victims; None where no eviction is known to make the pod fit."""
        taken = {candidate.pod: sum(self._usage.used(candidate.pod).values()) for candidate in self._with_units}
        spare = sum(self._usage.free.values()) + sum(taken.values()) - self._demand.total
        kept = [candidate for candidate in self._with_units if taken[candidate.pod] <= spare]
        uids = {candidate.pod for candidate in kept}
        rest = [candidate for candidate in self._candidates.values() if candidate.pod not in uids]
        usage = self._usage.without(uids)
        chosen = yield from search_victims(usage, self._demand, rest, self._whole, self._steps)
        if chosen is None:
            return None
        best = sorted((*kept, *chosen), key=lambda candidate: (-candidate.priority, candidate.pod))
        if self._helps() and cost(self._usage, self._with_units) <= cost(self._usage, best):
            best = sorted(self._with_units, key=lambda candidate: -candidate.priority)
        units = {candidate.pod for candidate in self._with_units}
        others = [pod for pod in self._proposed.pods if pod not in units]
        violating_others = min(max(self._proposed.violations - violations(self._with_units), 0), len(others))
        return Victims([*others, *(candidate.pod for candidate in best)], violations(best) + violating_others)

    def _helps(self) -> bool:
        """Return whether the proposal is known to make the pod fit."""
        free = self._usage.without(self._proposed.pods).free
        return place(self._demand, free, whole=self._whole, steps=self._steps) is not None
