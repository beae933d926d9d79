"""The offering of a node: its devices by their own ids, and ids for vGPUs on demand."""

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.change.nodevgpus import NodeVgpus
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.node.parts import (
    AllocationsBasis,
    CandidatesBasis,
    OffersBasis,
    OnDemandBasis,
    Parts,
    UsersBasis,
    by_kind,
    candidates_part,
    on_demand_part,
    part_of,
    settled,
)
from gpuvirt.model.node.picture import NodeMemory, NodePicture, NodeTerms
from gpuvirt.model.offers.deviceusers import DeviceUsers, device_users
from gpuvirt.model.offers.namereview import NameReview, review_names
from gpuvirt.model.offers.offermaking import OfferInputs, make_offers
from gpuvirt.model.offers.offers import Offers
from gpuvirt.model.offers.ondemand.offer import (
    OnDemandGpu,
    OnDemandInputs,
    OnDemandOffer,
    gpus_on_demand,
    not_offered,
    on_demand_entries,
)
from gpuvirt.model.offers.ondemand.podends import replacements
from gpuvirt.model.offers.withholding import withholdings


class Offering(msgspec.Struct, frozen=True):
    """The resources that a node offers: its devices by their own ids, and ids for vGPUs on demand."""

    offers: Offers
    """The devices, without the resources whose names wait for the review."""
    on_demand: OnDemandOffer
    review: NameReview
    """The names that wait."""
    users: DeviceUsers
    """The users of all devices."""
    parts: Parts
    """The parts of the decisions so far."""


def offering_of(
    inventory: Inventory, picture: NodePicture, memory: NodeMemory, terms: NodeTerms, vgpus: NodeVgpus, now_s: float
) -> Offering:
    """Return what is offered. `memory` has the present desired state and withdrawal, and the last of all others."""
    entries, parts = picture.ledger.entries, memory.parts
    kinds = part_of(parts.by_kind, AllocationsBasis(entries), by_kind)
    users = part_of(parts.users, UsersBasis(entries, inventory.facts.users), _users)
    on_demand_inputs = _on_demand_inputs(picture, terms, vgpus, kinds.value.on_demand)
    gpus, last = on_demand_inputs.states.keys(), memory.on_demand.replacements
    replaced = replacements(inventory, gpus, entries, picture.pod_ends, last, now_s)
    on_demand_inputs = replace(on_demand_inputs, replacements=replaced)
    on_demand = on_demand_part(parts.on_demand, OnDemandBasis(inventory, on_demand_inputs, memory.on_demand))
    parts = replace(parts, by_kind=kinds, users=users, on_demand=on_demand)
    offering = Offering(memory.offers, on_demand.value, memory.review, users.value, parts)
    if terms.vgpus_only:
        return offering
    inputs = replace(
        _offer_inputs(picture, memory, terms, now_s),
        entries=kinds.value.devices,
        on_demand=not_offered(inventory, on_demand.value, entries, users.value.given),
    )
    return _with_offers(offering, inventory, picture, memory, terms, inputs)


def _with_offers(
    offering: Offering,
    inventory: Inventory,
    picture: NodePicture,
    memory: NodeMemory,
    terms: NodeTerms,
    inputs: OfferInputs,
) -> Offering:
    """Return the offering with the offers of devices, and the names that wait for the review."""
    basis = CandidatesBasis(inventory, inputs.naming, inputs.settings)
    found = candidates_part(memory.parts.candidates, basis)
    offered = part_of(
        settled(memory.parts.offers),
        OffersBasis(inventory, inputs, memory.offers),
        lambda basis: make_offers(inventory, inputs, basis.before, found.value),
    )
    offers, review = offered.value, memory.review
    if terms.review is not None:
        review_terms = replace(terms.review, is_possible=picture.is_kind_known)
        names = offers.names | offering.on_demand.names
        review = review_names(review, names, inputs.resources, memory.desired.spec, review_terms, inputs.now_s)
    if review.waiting:
        waiting = {name: withholding.reason for name, withholding in review.waiting.items()}
        inputs = replace(inputs, withheld={**waiting, **inputs.withheld})
        offers = make_offers(inventory, inputs, memory.offers, found.value)
    parts = replace(offering.parts, candidates=found, offers=offered)
    return replace(offering, offers=offers, review=review, parts=parts)


def _users(basis: UsersBasis) -> DeviceUsers:
    # unknown: a view of processes; nothing is changed by it
    return device_users(basis.entries, basis.processes or {})


def _offer_inputs(picture: NodePicture, memory: NodeMemory, terms: NodeTerms, now_s: float) -> OfferInputs:
    ledger, gates, withdrawal = picture.ledger, picture.gates, memory.withdrawal
    return OfferInputs(
        picture.naming(terms),
        terms.settings,
        ledger.entries,
        ledger.resources,
        ledger.is_observed,
        now_s,
        withdrawal.functions,
        withdrawal.vgpus,
        {name: withholding.reason for name, withholding in withholdings(memory.desired.spec).items()},
        gates.changing,
        gates.blocked,
        picture.former,
        of_several=ledger.of_several,
    )


def _on_demand_inputs(
    picture: NodePicture, terms: NodeTerms, vgpus: NodeVgpus, entries: tuple[Entry, ...]
) -> OnDemandInputs:
    """Return the inputs of on-demand resources; `entries` are the allocations of on-demand vGPUs."""
    gates, ends = picture.gates, picture.pod_ends.all
    ending = frozenset(entry.device for entry in entries if entry.consumer and entry.consumer.pod_uid in ends)
    return OnDemandInputs(
        vgpus.on_demand if not terms.vgpus_only else {},
        terms.settings.on_demand,
        picture.naming(terms),
        entries,
        terms.run_id,
        gates.changing,
        gates.blocked,
        picture.former,
        ending,
    )


def on_demand_gpus(picture: NodePicture, terms: NodeTerms, vgpus: NodeVgpus) -> Mapping[PciAddress, OnDemandGpu]:
    """Return the vGPUs that each GPU in mode on-demand can still carry; `vgpus` were decided last."""
    if picture.inventory is None:
        return {}
    entries = tuple(on_demand_entries(picture.ledger.entries))
    return gpus_on_demand(picture.inventory, _on_demand_inputs(picture, terms, vgpus, entries))
