"""The pods that must be evicted so that another fits: the cheapest set by the order in which kube-scheduler compares.

Units that are free in total may lie on several GPUs, so the pods that the kube-scheduler would evict for the total do
not always free one GPU. The order is that of kube-scheduler (pkg/scheduler/framework/preemption,
pickOneNodeForPreemption): violations of PodDisruptionBudgets, the highest priority, the sum of priorities, which grows
with each pod, and the number of pods.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import combinations, islice
from typing import NewType

import msgspec

from gpuvirt.facts.ids import PodUid
from gpuvirt.model.shares.demand import WHOLE, Demand, Units
from gpuvirt.model.shares.nodeusage import NodeUsage
from gpuvirt.model.shares.placement import GpuId, Steps, finished, fits

BudgetName = NewType("BudgetName", str)
"""The namespace and the name of a PodDisruptionBudget: `default/web`."""

MOST_SCOPES = 128
"""Sets of GPUs that are tried; 8 GPUs have 70 sets of 4."""
MOST_TRIES = 256
"""Sets of pods that are tried on a node, after a good one has been found without a search."""
MOST_STEPS = 200_000
"""The steps of the search on a node, about 0.2 s. No pods are victims of a search that has used them up before it was
certain that each is needed."""
_JUDGEMENT = 4
"""The steps of a judgement of pieces, beside those of a search for an arrangement."""
_OFFSET = 2**31
"""The number that kube-scheduler adds to each priority, so that no sum falls as pods are added."""

Cost = tuple[int, int, int, int, int]
"""Violations, the highest priority, the sum of the priorities, the pods and their units; less is better."""


class EvictionCandidate(msgspec.Struct, frozen=True):
    """A pod that may be evicted: its priority is lower than that of the pod that does not fit."""

    pod: PodUid
    priority: int = 0
    budgets: Mapping[BudgetName, int] = msgspec.field(default_factory=dict)
    """The PodDisruptionBudgets that cover the pod, each with the evictions that it allows now."""
    is_ending: bool = False
    """Whether the pod is being deleted already, so that its eviction costs nothing."""


def violations(pods: Iterable[EvictionCandidate]) -> int:
    """Return how many of the pods their PodDisruptionBudgets do not allow to evict together."""
    return len(_violating(pods))


def cost(usage: NodeUsage, pods: Sequence[EvictionCandidate]) -> Cost:
    """Return what evictions cost."""
    deleted = [candidate for candidate in pods if not candidate.is_ending]
    return (
        violations(deleted),
        max((candidate.priority for candidate in deleted), default=-_OFFSET),
        sum(candidate.priority + _OFFSET for candidate in deleted),
        len(deleted),
        sum(_units(usage, candidate) for candidate in deleted),
    )


def victims(
    usage: NodeUsage, demand: Demand, candidates: Sequence[EvictionCandidate], whole: Units = WHOLE
) -> tuple[EvictionCandidate, ...] | None:
    """Return the result of `search_victims` for one node."""
    return finished(search_victims(usage, demand, candidates, whole, Steps(MOST_STEPS)))


def search_victims(
    usage: NodeUsage, demand: Demand, candidates: Sequence[EvictionCandidate], whole: Units, steps: Steps
) -> Generator[None, None, tuple[EvictionCandidate, ...] | None]:
    """Return the pods of a node whose eviction makes a pod fit, none where it fits already; yield between steps.

    None where no eviction helps, or where none is known to within the `steps`. Of a share that lies on one GPU, the GPU
    is the one that costs least; pods on other GPUs stay. The cheapest set is found unless the search for it would be
    long; each pod of the result is needed.
    """
    search = _Search(usage, demand, whole, steps)
    if search.fits_without(()):
        return ()
    yield
    exists = [candidate for candidate in candidates if usage.has(candidate.pod)]
    scopes = list[Sequence[EvictionCandidate]]()
    for scope in _scopes(usage, demand, exists, whole):
        if search.fits_without(scope):
            scopes.append(scope)
        yield
    if scopes and len(demand.containers) == 1 and demand.largest >= whole:
        yield from search.reprieve(min(scopes, key=lambda scope: cost(usage, scope)))  # all pods on whole GPUs must go
    else:
        for scope in scopes:
            yield from search.reprieve(scope)
        for scope in scopes:
            yield from search.improve(scope)
    if search.best is None:
        return None
    return tuple(sorted(search.best, key=lambda candidate: (candidate.priority, candidate.pod)))


class _Search:
    """The search for the cheapest victims on one node."""

    def __init__(self, usage: NodeUsage, demand: Demand, whole: Units, steps: Steps) -> None:
        self._steps = steps
        self._least = max(steps.left - MOST_STEPS, 0)
        """The steps that are left when this search ends."""
        self.best: Sequence[EvictionCandidate] | None = None
        self._cost: Cost | None = None
        self._usage = usage
        self._demand = demand
        self._whole = whole
        self._tries = MOST_TRIES
        self._free: dict[GpuId, int] = dict(usage.capacity)
        """The units that each GPU has left; less than 0 where pods whose GPUs are not known count on each."""
        for pod in usage.all_pods:
            self._count(self._free, pod, -1)

    def fits_without(self, pods: Iterable[EvictionCandidate]) -> bool:
        """Return whether the pod fits once others are evicted."""
        return self._fits(self._free_without(pods))

    def reprieve(self, scope: Sequence[EvictionCandidate]) -> Generator[None]:
        """Let pods stay one after the other as long as the rest is enough, as kube-scheduler does.

        Those whose eviction would be a violation stay first, then high priorities, then small pods; those that are
        being deleted go first.
        """
        violating = _violating(scope)
        covered = {candidate.pod for candidate in scope if candidate.budgets}
        for protected in (violating, covered) if violating else (violating,):
            gone, free = {candidate.pod: candidate for candidate in scope}, self._free_without(scope)
            for candidate in sorted(
                scope, key=lambda pod: (pod.is_ending, pod.pod not in protected, *self._weight(pod))
            ):
                self._count(free, candidate.pod, -1)
                if self._fits(free):
                    del gone[candidate.pod]
                else:
                    self._count(free, candidate.pod, 1)
                yield
            if self._is_out_of_steps:
                return  # a pod may be among the victims only since it was not found out that it may stay
            self._take(tuple(gone.values()))

    def improve(self, scope: Sequence[EvictionCandidate]) -> Generator[None]:
        """Try sets that cost less than the best one so far."""
        ordered = sorted(scope, key=lambda candidate: (-_units(self._usage, candidate), candidate.pod))
        yield from self._extend((), ordered, dict(self._free))

    def _extend(
        self, chosen: tuple[EvictionCandidate, ...], scope: Sequence[EvictionCandidate], free: dict[GpuId, int]
    ) -> Generator[None]:
        """Try the chosen pods with others. Costs grow with the set, so a branch above the best cost is skipped."""
        for number, candidate in enumerate(scope):
            if self._tries <= 0 or self._is_out_of_steps:
                return
            self._tries -= 1
            yield
            extended = (*chosen, candidate)
            self._steps.take(_JUDGEMENT * len(extended))
            if self._cost is not None and cost(self._usage, extended) >= self._cost:
                continue
            self._count(free, candidate.pod, 1)
            if self._fits(free):
                yield from self.reprieve(extended)
            else:
                yield from self._extend(extended, scope[number + 1 :], free)
            self._count(free, candidate.pod, -1)

    def _take(self, found: Sequence[EvictionCandidate]) -> None:
        found_cost = cost(self._usage, found)
        if self._cost is None or found_cost < self._cost:
            self.best, self._cost = found, found_cost

    def _weight(self, candidate: EvictionCandidate) -> tuple[int, int, PodUid]:
        return -candidate.priority, _units(self._usage, candidate), candidate.pod

    @property
    def _is_out_of_steps(self) -> bool:
        return self._steps.left <= self._least

    def _fits(self, free: Mapping[GpuId, int]) -> bool:
        """Return whether the pod is known to fit."""
        if self._is_out_of_steps:
            return False
        self._steps.take(_JUDGEMENT)
        pieces = tuple(sorted([Units(max(units, 0)) for units in free.values()]))
        return fits(self._demand, pieces, self._whole, self._steps)

    def _free_without(self, pods: Iterable[EvictionCandidate]) -> dict[GpuId, int]:
        free = dict(self._free)
        for candidate in pods:
            self._count(free, candidate.pod, 1)
        return free

    def _count(self, free: dict[GpuId, int], pod: PodUid, sign: int) -> None:
        for gpu, units in self._usage.used(pod).items():
            if gpu in free:
                free[gpu] += sign * units


def _scopes(
    usage: NodeUsage, demand: Demand, candidates: Sequence[EvictionCandidate], whole: Units
) -> Iterable[Sequence[EvictionCandidate]]:
    """Yield sets of pods to choose from: those on as many GPUs as the pod needs, and all of the node."""
    gpus = min(max(sum(container.gpus(whole) for container in demand.containers), 1), len(usage.capacity) + 1)
    sets = tuple(islice(combinations(usage.capacity, gpus), MOST_SCOPES + 1))
    for chosen in sets[:MOST_SCOPES]:
        if scope := [candidate for candidate in candidates if not usage.used(candidate.pod).keys().isdisjoint(chosen)]:
            yield scope
    if len(demand.containers) > 1 or len(sets) > MOST_SCOPES:
        yield candidates


def _violating(pods: Iterable[EvictionCandidate]) -> frozenset[PodUid]:
    """Return the pods that their PodDisruptionBudgets do not allow to evict, the most important one first."""
    covered = [candidate for candidate in pods if candidate.budgets]
    if not covered:
        return frozenset()
    allowed: dict[BudgetName, int] = {}
    violating: list[PodUid] = []
    for candidate in sorted(covered, key=lambda candidate: (-candidate.priority, candidate.pod)):
        for name, most in candidate.budgets.items():
            allowed[name] = allowed.get(name, most) - 1
        if any(allowed[name] < 0 for name in candidate.budgets):
            violating.append(candidate.pod)
    return frozenset(violating)


def _units(usage: NodeUsage, candidate: EvictionCandidate) -> int:
    return sum(usage.used(candidate.pod).values())
