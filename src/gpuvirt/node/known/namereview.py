"""Delays the registration of new resources until the controller has checked that KubeVirt does not offer them itself.

Two plugins of one name confuse the kubelet, even for a moment. So a name that this node has never offered waits until
the controller has reviewed it. The wait is bounded: without devices no VM starts on the node, while a second plugin
takes no device from a VM, since Allocate reads every device again.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.desired.observed import NodeSpec
from gpuvirt.model.offers.withholding import Withholding
from gpuvirt.model.reasons import Reason, nodeproblems

Note = Callable[[str, Reason | None], object]


class NameReview:
    """The resource names of one node."""

    def __init__(
        self, clock: Clock, most_s: float, conclude_soon: Callable[[], None], note: Note, *, expected: bool
    ) -> None:
        """`expected`: a controller has deployed this agent. A spec with reviewed names shows a controller as well."""
        self.spec: NodeSpec | None = None
        """The GpuNode's spec, as last observed, also before a restart."""
        self._clock = clock
        self._most_s = most_s
        self._conclude_soon = conclude_soon
        self._note = note
        self._expected = expected
        self._impossible = False
        self._since_s: dict[ResourceName, float] = {}
        """When each name began to wait for its review."""

    def observe_kind(self, *, there: bool) -> None:
        """Take whether the cluster has the kind GpuNode; without it no controller can review names."""
        if self._impossible is there:
            self._impossible = not there
            self._conclude_soon()

    def conclude(
        self, names: Iterable[ResourceName], offered_before: Collection[ResourceName]
    ) -> Mapping[ResourceName, Withholding]:
        """Return the names that must wait. Names that this node has offered before never wait."""
        reviewed = self.spec.reviewed if self.spec is not None else None
        withheld = self.spec.withheld if self.spec is not None else ()
        decided = {*(reviewed or ()), *(withholding.resource for withholding in withheld)}
        unknown = sorted(set(names) - decided)
        if self._impossible or not (self._expected or reviewed is not None):
            unknown = []
        now_s = self._clock.monotonic_s()
        new = {name for name in unknown if name not in offered_before}
        for name in sorted(new - self._since_s.keys()):
            self._since_s[name] = now_s
            self._clock.call_later(self._most_s, self._conclude_soon)
        self._since_s = {name: since_s for name, since_s in self._since_s.items() if name in unknown}
        waiting = {name for name, since_s in self._since_s.items() if now_s < since_s + self._most_s}
        silent = sorted(self._since_s.keys() - waiting)
        self._note("controller", nodeproblems.controller_silent(silent, self._most_s) if silent else None)
        return {
            name: Withholding(nodeproblems.awaits_controller(name, self._most_s), silent=True)
            for name in sorted(waiting)
        }
