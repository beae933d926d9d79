"""Units that are kept for nominated pods: those for which kube-scheduler has evicted others, until they are bound.

kube-scheduler counts a nominated pod on its node for pods of no higher priority, by the sum of units. The sum lets a
pod pass that takes the very GPU that was freed, so the nominated pod counts on a GPU, too.
"""

from collections.abc import Iterable

import msgspec

from gpuvirt.facts.ids import PodUid
from gpuvirt.model.shares.demand import WHOLE, Demand, Units
from gpuvirt.model.shares.nodeusage import NodeUsage
from gpuvirt.model.shares.placement import MOST_STEPS, Policy
from gpuvirt.model.shares.steps import Steps


class Nomination(msgspec.Struct, frozen=True):
    """A pod that is nominated for a node and not bound."""

    pod: PodUid
    demand: Demand
    priority: int = 0
    policy: Policy = Policy.BINPACK
    name: str = ""
    """The pod as users name it: `namespace/name`."""

    @property
    def rank(self) -> tuple[int, PodUid]:
        """The order among nominated pods: a pod counts for those after it, so that two never wait for each other."""
        return -self.priority, self.pod


def with_nominated(
    usage: NodeUsage, nominations: Iterable[Nomination], ending: Iterable[PodUid] = (), whole: Units = WHOLE
) -> NodeUsage:
    """Return the usage of a node in which nominated pods have their units.

    Their GPUs are those that they would get once the pods that are `ending` have ended. A pod that fits on none then
    counts for nothing, since the eviction of other pods must come first, and kube-scheduler may choose another node.
    """
    later, found, steps = usage.without(ending), usage, Steps(MOST_STEPS)
    for nomination in sorted(nominations, key=lambda nomination: nomination.rank):
        placed = later.place(nomination.demand, nomination.policy, whole, steps)
        if placed is not None:
            counted = nomination.pod, placed.used, nomination.demand.total, nomination.priority
            later, found = later.with_pod(*counted), found.with_pod(*counted)
    return found
