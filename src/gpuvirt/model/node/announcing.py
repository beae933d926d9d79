"""The announcement of withdrawals to the scheduler, and the withdrawn devices that the kubelet may still count."""

from msgspec.structs import replace

from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.node.desirednode import DesiredNode
from gpuvirt.model.node.offering import Offering
from gpuvirt.model.node.picture import NodeMemory, NodePicture, NodeTerms
from gpuvirt.model.offers.departures import Departures
from gpuvirt.model.offers.namereview import NameReview
from gpuvirt.model.offers.notice import Notice, announce, with_counts
from gpuvirt.model.offers.offers import Offers
from gpuvirt.model.offers.ondemand.ondemandviews import healthy_ids
from gpuvirt.model.offers.schedulable import Taken, name_of
from gpuvirt.model.offers.withdrawal import Departing, KubeletCount, Withdrawal
from gpuvirt.model.offers.withholding import withholdings
from gpuvirt.model.reasons import ReasonCode


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
) -> Notice:
    """Return the withdrawals that were announced, beside the devices that the kubelet has of the last offers."""
    if terms.notice is None:
        return memory.notice
    offers = _among(memory.offers, _names_taken(picture, desired, memory.review))
    return announce(memory.notice, departing.names, offers, picture.status_counts, terms.notice, now_s)


def counted(
    picture: NodePicture, notice: Notice, terms: NodeTerms, offered: Taken, departing: Departing, now_s: float
) -> Notice:
    """Return the notice with the counts that the scheduler should see."""
    if terms.notice is None:
        return notice
    account = picture.ledger.account
    by_kubelet = account.surely_counted if account is not None else ()
    going = departing.names - _stay(picture, offered.offers) if departing.names else departing.names
    return with_counts(notice, offered, going, by_kubelet, terms.notice, now_s)


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
