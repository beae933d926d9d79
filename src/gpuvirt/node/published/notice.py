"""What the scheduler is to count on this node, and what is not withdrawn before it does.

The scheduler counts by the node's status, which the kubelet writes every ten seconds. A pod that it binds by a count
from before is not admitted once the kubelet's list is shorter. So the node's status is lowered first, and the list is
shortened a moment later, when pods that were bound before are admitted. Where the status can't be written, nothing is
held back for long. What the kubelet counts again is raised there at once.
"""

from collections.abc import Callable, Iterable, Mapping

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.offers.offers import Offers
from gpuvirt.model.offers.schedulable import Count, counts, free_names, is_known
from gpuvirt.node.loops.cell import Cell
from gpuvirt.node.loops.intervals import Intervals


class Notice:
    """One node's."""

    def __init__(self, clock: Clock, intervals: Intervals, conclude_soon: Callable[[], None]) -> None:
        self.counts: Cell[Mapping[ResourceName, Count]] = Cell({})
        """How many of each resource the node's status is to say."""
        self._clock = clock
        self._intervals = intervals
        self._conclude_soon = conclude_soon
        self._said: Mapping[ResourceName, int] | None = None
        """How many it says, None where that was not heard yet."""
        self._since_s: dict[str, float] = {}
        """When each function or vGPU was first to be withdrawn while it was offered."""
        self._known_since_s: float | None = None
        """Since when the scheduler counts none of them."""
        self._growing_until_s = 0.0

    def observe(self, said: Mapping[ResourceName, int]) -> None:
        """Take how many of each resource the node's status says."""
        if said != self._said:
            self._said = said
            self._conclude_soon()

    def passed(self, going: frozenset[str], offers: Offers) -> frozenset[str]:
        """Return what of all that is to go may be withdrawn now; what is not offered needs no notice."""
        now_s, before = self._clock.monotonic_s(), self._since_s
        known = self._said is not None and is_known(counts(offers, going, ()), self._said)
        self._since_s = {one: before.get(one, now_s) for one in going & free_names(offers)}
        if not known or self._since_s.keys() - before.keys():
            self._known_since_s = None
        if known and self._known_since_s is None:
            self._known_since_s = now_s
        waiting_s = {one: left_s for one, at_s in self._since_s.items() if (left_s := self._left_s(at_s, now_s)) > 0}
        if waiting_s:
            self._clock.call_later(min(waiting_s.values()), self._conclude_soon)
        return frozenset(going - waiting_s.keys())

    def _left_s(self, since_s: float, now_s: float) -> float:
        most_s = since_s + self._intervals.notice_most_s - now_s
        if self._known_since_s is None:
            return most_s
        return min(most_s, max(since_s, self._known_since_s) + self._intervals.notice_s - now_s)

    def conclude(self, offers: Offers, going: frozenset[str], counted: Iterable[tuple[ResourceName, DeviceId]]) -> None:
        """Take what is offered now, what of it is to be withdrawn, and what the kubelet counts."""
        before, now = self.counts.get(), counts(offers, going, counted)
        if any(count.most > before.get(name, Count(0, 0)).most for name, count in now.items()):
            self._growing_until_s = self._clock.monotonic_s() + self._intervals.growth_s
        if now != before:
            self.counts.set(now)

    @property
    def is_growing(self) -> bool:
        """Whether the kubelet may soon count more than it did, and the scheduler is to know."""
        soon = self._clock.monotonic_s() < self._growing_until_s
        return soon and any(count.least < count.most for count in self.counts.get().values())
