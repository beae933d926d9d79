"""The states of a node's resources: registered with the kubelet, withheld by the cluster, or waiting for a review."""

from collections.abc import Mapping
from dataclasses import replace

from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.desired.observed import NodeSpec
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.offers.namereview import NameReview, ReviewTerms, review_names
from gpuvirt.model.offers.offers import OfferInputs, Offers, make_offers
from gpuvirt.model.offers.view import Registration
from gpuvirt.model.offers.withholding import Withholding, withholdings


class ResourceStates:
    """The states of one node's resources, by name."""

    def __init__(self, terms: ReviewTerms | None = None) -> None:
        """Without `terms`, no controller reviews new names."""
        self.review = NameReview()
        """The names that wait for the controller's review."""
        self.registrations: dict[ResourceName, Registration] = {}
        self.withholdings: Mapping[ResourceName, Withholding] = {}
        """Resources that the node's GpuNode withholds."""
        self._terms = terms
        self._spec: NodeSpec | None = None

    @property
    def waiting(self) -> Mapping[ResourceName, Withholding]:
        """Resources that are not registered yet, since their names wait for the review."""
        return self.review.waiting

    def observe_kind(self, *, exists: bool) -> bool:
        """Take whether the cluster has the kind GpuNode; return whether that is a change."""
        if self._terms is None or self._terms.is_possible is exists:
            return False
        self._terms = replace(self._terms, is_possible=exists)
        return True

    def observe_registration(self, resource: ResourceName, registration: Registration) -> bool:
        """Take the state of a resource's registration with the kubelet; return whether that is a change."""
        if self.registrations.get(resource) == registration:
            return False
        self.registrations[resource] = registration
        return True

    def set_spec(self, spec: NodeSpec | None) -> None:
        """Set the withheld and the reviewed resources by the node's GpuNode."""
        self._spec, self.withholdings = spec, withholdings(spec)

    def make_offers(self, inventory: Inventory, inputs: OfferInputs, before: Offers) -> Offers:
        """Return the offers, without the resources whose names wait for the review."""
        offers = make_offers(inventory, inputs, before)
        if self._terms is not None:
            names = offers.names
            self.review = review_names(self.review, names, inputs.resources, self._spec, self._terms, inputs.now_s)
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
