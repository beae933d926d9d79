"""The offering of a node: its devices by their own ids, and ids for vGPUs on demand."""

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import PciAddress, ResourceName
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.change.nodevgpus import NodeVgpus
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.node.desirednode import DesiredNode
from gpuvirt.model.node.memo import CacheKey, Memoized, memoized
from gpuvirt.model.node.parts import Parts, allocations_part, candidates_part
from gpuvirt.model.node.picture import NodeMemory, NodePicture, NodeTerms
from gpuvirt.model.offers.deviceusers import DeviceUsers, device_users
from gpuvirt.model.offers.namereview import NameReview, review_names, withholdings
from gpuvirt.model.offers.notice import (
    Announcement,
    Taken,
    announce,
    counts,
    free_names,
    is_known,
    name_of,
    with_counts,
)
from gpuvirt.model.offers.offermaking import OfferInputs, make_offers
from gpuvirt.model.offers.offers import Offers
from gpuvirt.model.offers.ondemand.offer import (
    OnDemandGpu,
    OnDemandInputs,
    OnDemandOffer,
    gpus_on_demand,
    not_offered,
    offer_on_demand,
    on_demand_entries,
    replacements,
)
from gpuvirt.model.offers.ondemand.ondemandviews import healthy_ids
from gpuvirt.model.offers.withdrawal import Departing, Departures, KubeletCount, Withdrawal
from gpuvirt.model.reasons import ReasonCode


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
    inventory: Inventory,
    picture: NodePicture,
    memory: NodeMemory,
    terms: NodeTerms,
    vgpus: NodeVgpus,
    now_s: float,
) -> Offering:
    """Return what is offered. `memory` has the present desired state and withdrawal, and the last of all others."""
    entries, parts, processes = picture.ledger.entries, memory.parts, inventory.facts.users
    allocations = allocations_part(parts.allocations, entries).value
    # unknown: a view of processes; nothing is changed by it
    users = memoized(parts.users, CacheKey((entries, processes)), lambda: device_users(entries, processes or {}))
    inputs = _on_demand_inputs(picture, terms, vgpus, allocations.on_demand)
    last = memory.on_demand.replacements
    replaced = replacements(inventory, inputs.states.keys(), entries, picture.pod_ends, last, now_s)
    on_demand = _on_demand(inventory, replace(inputs, replacements=replaced), memory)
    parts = replace(parts, users=users, on_demand=on_demand)
    offering = Offering(memory.offers, on_demand.value, memory.review, users.value, parts)
    if terms.vgpus_only:
        return offering
    offer_inputs = replace(
        _offer_inputs(picture, memory, terms, now_s),
        entries=allocations.devices,
        on_demand=not_offered(inventory, on_demand.value, entries, users.value.given),
    )
    return _with_offers(offering, inventory, picture, memory, terms, offer_inputs)


def _on_demand(inventory: Inventory, inputs: OnDemandInputs, memory: NodeMemory) -> Memoized[OnDemandOffer]:
    """Return the on-demand resources; the last ones are taken over if they were those before, since ids count up."""
    last, before = memory.parts.on_demand, memory.on_demand
    # entries that are equal may differ in the type of a vGPU
    key = CacheKey((inventory, before, inputs.entries), (inputs,))
    is_settled = last is not None and last.value is before
    return memoized(last if is_settled else None, key, lambda: offer_on_demand(inventory, inputs, before))


def _with_offers(
    offering: Offering,
    inventory: Inventory,
    picture: NodePicture,
    memory: NodeMemory,
    terms: NodeTerms,
    inputs: OfferInputs,
) -> Offering:
    """Return the offering with the offers of devices, and the names that wait for the review."""
    found = candidates_part(memory.parts.candidates, inventory, inputs.naming, inputs.settings)
    candidates, last, before = found.value.candidates, memory.parts.offers, memory.offers
    # a symptom may change the offers by time alone; without one, the time does not count
    is_settled = last is not None and last.value is before and last.value.verdict.again_at_s is None
    offered = memoized(
        last if is_settled else None,
        CacheKey((inventory, before, inputs.entries), (replace(inputs, now_s=0.0),)),
        lambda: make_offers(inventory, inputs, before, candidates),
    )
    offers, review = offered.value, memory.review
    if terms.review is not None:
        review_terms = replace(terms.review, is_possible=picture.is_kind_known)
        names = offers.names | offering.on_demand.names
        review = review_names(review, names, inputs.resources, memory.desired.spec, review_terms, inputs.now_s)
    if review.waiting:
        waiting = {name: withholding.reason for name, withholding in review.waiting.items()}
        inputs = replace(inputs, withheld={**waiting, **inputs.withheld})
        offers = make_offers(inventory, inputs, before, candidates)
    parts = replace(offering.parts, candidates=found, offers=offered)
    return replace(offering, offers=offers, review=review, parts=parts)


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
        claimed=memory.claimed,
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


def taken(picture: NodePicture, inventory: Inventory, desired: DesiredNode, offering: Offering) -> Taken:
    """Return the offered devices that the kubelet gets from this agent."""
    known, on_demand = _names_taken(picture, desired, offering.review), offering.on_demand
    ids = {name: healthy_ids(inventory, on_demand, name) for name in on_demand.names & known}
    return Taken(_among(offering.offers, known), ids)


def _names_taken(picture: NodePicture, desired: DesiredNode, review: NameReview) -> frozenset[ResourceName]:
    """Return the resources that the kubelet takes from this agent; another device plugin may offer the others."""
    known = frozenset(name for name, registration in picture.registrations.items() if registration.registered)
    return known - (withholdings(desired.spec).keys() | review.waiting.keys())


def _among(offers: Offers, known: frozenset[ResourceName]) -> Offers:
    return replace(offers, by_resource={name: offer for name, offer in offers.by_resource.items() if name in known})


def announced(
    picture: NodePicture, memory: NodeMemory, desired: DesiredNode, terms: NodeTerms, departing: Departing, now_s: float
) -> Announcement:
    """Return the withdrawals that were announced, beside the devices that the kubelet has of the last offers.

    A device that has left the host since then must not be counted in the place of one that is withdrawn.
    """
    if terms.notice is None or (inventory := picture.inventory) is None:
        return memory.notice
    offers, status = _among(memory.offers, _names_taken(picture, desired, memory.review)), picture.status_counts
    free, going = free_names(offers), departing.names
    gone = free - inventory.vgpus.keys() - inventory.facts.functions.keys()
    known = status is not None and is_known(counts(Taken(offers), going | gone, ()), status)
    return announce(memory.notice, going, free, terms.notice, now_s, known=known)


def counted(
    picture: NodePicture, notice: Announcement, terms: NodeTerms, offered: Taken, departing: Departing, now_s: float
) -> Announcement:
    """Return the announcement with the counts that the scheduler should see."""
    if terms.notice is None:
        return notice
    account = picture.ledger.account
    by_kubelet = account.surely_counted if account is not None else ()
    withdrawing = departing.names - _stay(picture, offered.offers) if departing.names else departing.names
    return with_counts(notice, offered, withdrawing, by_kubelet, terms.notice, now_s)


def _stay(picture: NodePicture, offers: Offers) -> frozenset[str]:
    """Return the names of withdrawn devices that stay listed for their pods, which do not end yet.

    The kubelet counts them. Another count in the node's status would be one that both write again and again.
    """
    pods, ending = picture.ledger.of_several, picture.pod_ends.all
    stay = (
        (resource, device)
        for resource, device in offers.devices()
        if any(reason.code is ReasonCode.LEAVES_AFTER_POD for reason in device.health.against)
    )
    # unknown: which pod it is, so that the kubelet's count stays
    return frozenset(
        name_of(device) for resource, device in stay if pods is None or pods.get((resource, device.id)) not in ending
    )


def departures(picture: NodePicture, withdrawal: Withdrawal) -> Departures:
    """Return the withdrawn devices that the kubelet may still count, by its last answer."""
    ledger = picture.ledger
    count = KubeletCount(picture.inventory, ledger.account, ledger.rules, ledger.entries)
    return Departures(withdrawal, count, picture.gates.drained, ledger.known, ledger.resources)
