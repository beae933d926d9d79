"""Announces withdrawals to the scheduler: the counts in the node's status fall before devices are withdrawn.

The scheduler counts devices by the node's status, which the kubelet writes every ten seconds. If the scheduler binds a
pod by an outdated count, the kubelet refuses the pod once its list of devices is shorter. So the node's status is
lowered first, and the list is shortened a moment later, when earlier bound pods are admitted. If the status can't be
written, a withdrawal waits for a few seconds only. When the kubelet counts further devices, the status is raised at
once.
"""

from collections.abc import Callable, Iterable, Mapping

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.offers.offers import Offers
from gpuvirt.model.offers.schedulable import Count, counts, free_names, is_known
from gpuvirt.node.loops.cell import Cell
from gpuvirt.node.loops.intervals import Intervals


class Notice:
    """The announced withdrawals of one node."""

    def __init__(self, clock: Clock, intervals: Intervals, conclude_soon: Callable[[], None]) -> None:
        self.counts: Cell[Mapping[ResourceName, Count]] = Cell({})
        """The counts of resources that the node's status should have."""
        self._clock = clock
        self._intervals = intervals
        self._conclude_soon = conclude_soon
        self._observed: Mapping[ResourceName, int] | None = None
        """The counts in the node's status, None if not observed yet."""
        self._since_s: dict[str, float] = {}
        """When the withdrawal of each offered function or vGPU was announced."""
        self._known_since_s: float | None = None
        """Since when the scheduler counts none of these devices."""
        self._growing_until_s = 0.0

    def observe(self, counted: Mapping[ResourceName, int]) -> None:
        """Take the counts of resources in the node's status."""
        if counted != self._observed:
            self._observed = counted
            self._conclude_soon()

    def passed(self, going: frozenset[str], offers: Offers) -> frozenset[str]:
        """Return those devices of `going` that may be withdrawn now. Devices that are not offered need no notice."""
        now_s, before = self._clock.monotonic_s(), self._since_s
        known = self._observed is not None and is_known(counts(offers, going, ()), self._observed)
        self._since_s = {device: before.get(device, now_s) for device in going & free_names(offers)}
        if not known or self._since_s.keys() - before.keys():
            self._known_since_s = None
        if known and self._known_since_s is None:
            self._known_since_s = now_s
        waiting_s = {
            device: left_s for device, at_s in self._since_s.items() if (left_s := self._left_s(at_s, now_s)) > 0
        }
        if waiting_s:
            self._clock.call_later(min(waiting_s.values()), self._conclude_soon)
        return frozenset(going - waiting_s.keys())

    def _left_s(self, since_s: float, now_s: float) -> float:
        most_s = since_s + self._intervals.notice_most_s - now_s
        if self._known_since_s is None:
            return most_s
        return min(most_s, max(since_s, self._known_since_s) + self._intervals.notice_s - now_s)

    def conclude(self, offers: Offers, going: frozenset[str], counted: Iterable[tuple[ResourceName, DeviceId]]) -> None:
        """Update the counts by the offers, the devices that will be withdrawn (`going`), and the kubelet's count."""
        before, now = self.counts.get(), counts(offers, going, counted)
        if any(count.most > before.get(name, Count(0, 0)).most for name, count in now.items()):
            self._growing_until_s = self._clock.monotonic_s() + self._intervals.growth_s
        if now != before:
            self.counts.set(now)

    @property
    def is_growing(self) -> bool:
        """Whether the kubelet may soon count further devices, which the node's status must show then."""
        soon = self._clock.monotonic_s() < self._growing_until_s
        return soon and any(count.least < count.most for count in self.counts.get().values())
