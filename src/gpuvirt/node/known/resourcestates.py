"""The states of a node's resources: registered with the kubelet, withheld by the cluster, or waiting for a review.

Two plugins of one name confuse the kubelet, even for a moment. So a name that this node has never offered waits until
the controller has checked that KubeVirt does not offer it itself. The wait is bounded: without devices no VM starts on
the node, while a second plugin takes no device from a VM, since Allocate reads every device again.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.desired.observed import NodeSpec
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.offers.offers import OfferInputs, Offers, make_offers
from gpuvirt.model.offers.view import Registration
from gpuvirt.model.offers.withholding import Withholding, withholdings
from gpuvirt.model.reasons import Reason, nodeproblems

Note = Callable[[str, Reason | None], object]


class NameReview:
    """The controller's review of the resource names of one node."""

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

    def observe_kind(self, *, exists: bool) -> None:
        """Take whether the cluster has the kind GpuNode; without it no controller can review names."""
        if self._impossible is exists:
            self._impossible = not exists
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


class ResourceStates:
    """The states of one node's resources, by name."""

    def __init__(self) -> None:
        self.review: NameReview | None = None
        """The controller's review of new resource names; None without a controller."""
        self.registrations: dict[ResourceName, Registration] = {}
        self.withholdings: Mapping[ResourceName, Withholding] = {}
        """Resources that the node's GpuNode withholds."""
        self.waiting: Mapping[ResourceName, Withholding] = {}
        """Resources that are not registered yet, since their names wait for the review."""

    def observe_registration(self, resource: ResourceName, registration: Registration) -> bool:
        """Take the state of a resource's registration with the kubelet; return whether that is a change."""
        if self.registrations.get(resource) == registration:
            return False
        self.registrations[resource] = registration
        return True

    def set_spec(self, spec: NodeSpec | None) -> None:
        """Set the withheld and the reviewed resources by the node's GpuNode."""
        self.withholdings = withholdings(spec)
        if self.review is not None:
            self.review.spec = spec

    def make_offers(self, inventory: Inventory, inputs: OfferInputs, before: Offers) -> Offers:
        """Return the offers, without the resources whose names wait for the review."""
        offers = make_offers(inventory, inputs, before)
        self.waiting = self.review.conclude(offers.names, inputs.resources) if self.review is not None else {}
        if not self.waiting:
            return offers
        waiting = {name: withholding.reason for name, withholding in self.waiting.items()}
        return make_offers(inventory, replace(inputs, withheld={**waiting, **inputs.withheld}), before)

    def registered(self, offers: Offers) -> Offers:
        """Return the offers that the kubelet takes from this agent; another device plugin may offer the others."""
        known = {name for name, registration in self.registrations.items() if registration.registered}
        known -= self.withholdings.keys() | self.waiting.keys()
        ours = {name: offer for name, offer in offers.by_resource.items() if name in known}
        return replace(offers, by_resource=ours)
