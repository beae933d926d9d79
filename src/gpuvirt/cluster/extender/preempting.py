"""The verb preempt: the fewest pods whose eviction frees room for a pod on one GPU, or none, where none helps.

kube-scheduler chooses victims by the sum of a node's units, and evicts too few or the wrong ones where the units that
it frees lie on several GPUs. Victims without units are kept, since the pod needs their processors or memory. Other pods
than those that kube-scheduler chose may be better; whether their PodDisruptionBudgets allow it is not known here, so
that they count as violations, and are taken only where the others do not help.
"""

from collections.abc import Mapping, Sequence

from gpuvirt.cluster.extender.protocol import MetaPod, MetaVictims, PreemptionArguments, PreemptionResult, Victims
from gpuvirt.cluster.shares.objects import demand_of_pod
from gpuvirt.cluster.shares.sharing import Sharing
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.shares.books import NodeBooks
from gpuvirt.model.shares.demand import Demand, Units, UnplaceableError
from gpuvirt.model.shares.eviction import Candidate, victims
from gpuvirt.model.shares.placement import place
from gpuvirt.model.shares.quantities import InvalidQuantityError


def preempted(asked: PreemptionArguments, nodes: Mapping[NodeName, NodeBooks], sharing: Sharing) -> PreemptionResult:
    """Return the answer of preempt; a node on which evictions do not help is left out."""
    try:
        demand = demand_of_pod(asked.pod, sharing.resource, sharing.whole)
    except (InvalidQuantityError, UnplaceableError):
        return PreemptionResult({})
    found = {
        name: _on_node(demand, nodes.get(name), proposed, asked.pod.spec.priority, sharing.whole)
        for name, proposed in asked.victims.items()
    }
    return PreemptionResult({name: _meta(chosen) for name, chosen in found.items() if chosen is not None})


def _on_node(demand: Demand, books: NodeBooks | None, proposed: Victims, priority: int, whole: Units) -> Victims | None:
    """Return the victims on one node; None where no eviction makes the pod fit, or none is needed."""
    if not demand.containers:
        return proposed
    if books is None or not proposed.pods:
        return None
    helps = place(demand, books.without(proposed.pods).free, whole=whole) is not None
    chosen = victims(books, demand, _candidates(books, proposed, priority), whole)
    if chosen is None:
        return None
    others = [pod for pod in proposed.pods if not books.has(pod)]
    best = [*others, *(candidate.pod for candidate in sorted(chosen, key=lambda one: -one.priority))]
    if helps and len(proposed.pods) <= len(best):
        return proposed  # kube-scheduler has counted processors and memory, too
    if not best:
        return proposed
    kept = len(set(best) & set(proposed.pods))
    return Victims(best, min(proposed.violations, kept) + len(best) - kept)


def _candidates(books: NodeBooks, proposed: Victims, priority: int) -> Sequence[Candidate]:
    """Return the pods of a lower priority that take units; of those that were proposed, some may be protected."""
    chosen = set(proposed.pods)
    are_protected = proposed.violations >= len(chosen)
    return [
        Candidate(pod, books.priority(pod), is_protected=are_protected or pod not in chosen)
        for pod in books.all_pods
        if books.priority(pod) < priority
    ]


def _meta(chosen: Victims) -> MetaVictims:
    return MetaVictims([MetaPod(PodUid(pod)) for pod in chosen.pods], chosen.violations)
