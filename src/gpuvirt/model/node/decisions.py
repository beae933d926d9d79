"""What is decided for one node: what is offered, what is withdrawn, and what each GPU should become.

`decide` is the order of the conclusions: each takes what it follows from. Nothing here waits, reads the host or changes
it, and the same picture and memory at the same time decide the same.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from gpuvirt.facts.ids import PciAddress, ResourceName
from gpuvirt.model.allocation.nodeledger import OfferedNames
from gpuvirt.model.allocation.ondemandids import is_on_demand_id
from gpuvirt.model.change.desired import DesiredDrivers
from gpuvirt.model.change.drivers import drivers_of, withdrawn
from gpuvirt.model.change.invalidstates import InvalidStates, invalid_states
from gpuvirt.model.change.nodevgpus import NodeVgpus, VgpuDemand, plan_node_vgpus
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.node.desirednode import DesiredNode, desire
from gpuvirt.model.node.desiredunits import DesiredUnits
from gpuvirt.model.node.picture import NodeMemory, NodePicture, NodeTerms
from gpuvirt.model.offers.departures import Departures
from gpuvirt.model.offers.deviceusers import device_users
from gpuvirt.model.offers.givenshares import NO_TIME, with_given
from gpuvirt.model.offers.namereview import NameReview, review_names
from gpuvirt.model.offers.notice import Notice, announce, with_counts
from gpuvirt.model.offers.offers import OfferInputs, Offers, first_names, make_offers
from gpuvirt.model.offers.ondemand.offer import (
    OnDemandGpu,
    OnDemandInputs,
    OnDemandOffer,
    gpus_on_demand,
    not_offered,
    offer_on_demand,
    resources_by_vgpu,
)
from gpuvirt.model.offers.sharing import ShareInputs, share_gpus
from gpuvirt.model.offers.validation import conditions, workload_of
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.offers.viewmaking import ViewInputs, make_view
from gpuvirt.model.offers.withdrawal import Departing, KubeletCount, Withdrawal, withdraw
from gpuvirt.model.offers.withholding import withholdings
from gpuvirt.model.reasons import Reason


@dataclass(frozen=True, slots=True)
class NodeDecisions:
    """The decisions for one node at one moment."""

    view: NodeView = field(default_factory=lambda: NodeView(NO_TIME, looked=False))
    """What is shown of the node."""
    desired: DesiredUnits = field(default_factory=DesiredUnits)
    """The desired state of each GPU with the plans toward it, and the questions for nvidia-smi."""
    invalid: InvalidStates = field(default_factory=InvalidStates)
    """The invalid parts of the desired state."""
    names: OfferedNames | None = None
    """The names to keep in the ledger; None before the first observation of the host."""
    memory: NodeMemory = field(default_factory=NodeMemory)
    """What the next decisions need of these."""

    @property
    def again_at_s(self) -> float | None:
        """When decisions differ without a new observation; None: never."""
        times = (self.memory.notice.again_at_s, self.memory.review.again_at_s)
        return min((at_s for at_s in times if at_s is not None), default=None)

    @property
    def judged_again_at_s(self) -> float | None:
        """When the health of a device may differ at the next observation of the host; None: never."""
        times = (self.memory.offers.verdict.again_at_s, self.memory.sharing.verdict.again_at_s)
        return min((at_s for at_s in times if at_s is not None), default=None)


def decide(picture: NodePicture, memory: NodeMemory, terms: NodeTerms, now_s: float, at: datetime) -> NodeDecisions:
    """Decide for a node. `now_s` is the present by the monotonic clock, `at` by the wall clock, for people."""
    desired = _desired(picture, memory, terms)
    if (inventory := picture.inventory) is None:
        return _undecided(picture, replace(memory, desired=desired), terms, at)
    drivers = drivers_of(desired.modes, inventory.gpus if not terms.vgpus_only else ())
    vgpus = plan_node_vgpus(inventory, _demand(picture, desired, drivers, terms), memory.smi)
    invalid = _invalid(desired, inventory.gpus, vgpus)
    departing = Departing(withdrawn(inventory, drivers), vgpus.undesired, picture.gates.drained.functions)
    notice = _announced(picture, memory, desired, terms, departing, now_s)
    passed = notice.passed if terms.notice is not None else departing.names
    withdrawal = withdraw(memory.withdrawal, departing, passed, now_s)
    on_demand = offer_on_demand(inventory, _on_demand_inputs(picture, terms, vgpus), memory.on_demand)
    inputs = _offer_inputs(picture, desired, terms, withdrawal, now_s)
    inputs = replace(inputs, on_demand=not_offered(inventory, on_demand, picture.ledger.entries))
    offers, review = _offers(picture, memory, desired, terms, inputs, on_demand.names)
    sharing = share_gpus(inventory, _share_inputs(picture, desired, terms), memory.sharing.verdict, now_s)
    notice = _counted(picture, notice, terms, offered_by_us(offers, picture, desired, review), departing, now_s)
    smi = memory.smi.of_contexts(vgpus.time_shared)
    after = NodeMemory(desired, offers, withdrawal, notice, review, sharing, on_demand, smi)
    names = _names(picture, offers, on_demand, review)
    units = DesiredUnits(vgpus, desired.modes)
    decisions = NodeDecisions(desired=units, invalid=invalid, names=names, memory=after)
    return replace(decisions, view=_view(picture, decisions, inventory, drivers, terms, at))


def _undecided(picture: NodePicture, memory: NodeMemory, terms: NodeTerms, at: datetime) -> NodeDecisions:
    """Return what is known before the first observation of the host: which desired state is invalid."""
    invalid = _invalid(memory.desired, None, NodeVgpus())
    problems = _problems(picture, invalid, memory.review)
    view = NodeView(at=at, notes=problems, invalid=invalid.all, agent=terms.agent, looked=False)
    return NodeDecisions(view, invalid=invalid, memory=memory)


def _desired(picture: NodePicture, memory: NodeMemory, terms: NodeTerms) -> DesiredNode:
    """Return the desired state by the request, if there is one."""
    if picture.request is None:
        return memory.desired
    return desire(memory.desired, picture.request, terms.settings, terms.request)


def _demand(picture: NodePicture, desired: DesiredNode, drivers: DesiredDrivers, terms: NodeTerms) -> VgpuDemand:
    sizes = terms.settings.on_demand.sizes
    return VgpuDemand(desired.config, desired.modes, drivers, picture.holdings, desired.named, sizes)


def _invalid(desired: DesiredNode, gpus: Collection[str] | None, vgpus: NodeVgpus) -> InvalidStates:
    return invalid_states(desired.invalid_modes, desired.configs.problem, desired.named, gpus, vgpus)


def offered_by_us(offers: Offers, picture: NodePicture, desired: DesiredNode, review: NameReview) -> Offers:
    """Return the offers that the kubelet takes from this agent; another device plugin may offer the others."""
    known = {name for name, registration in picture.registrations.items() if registration.registered}
    known -= withholdings(desired.spec).keys() | review.waiting.keys()
    return replace(offers, by_resource={name: offer for name, offer in offers.by_resource.items() if name in known})


def _announced(
    picture: NodePicture, memory: NodeMemory, desired: DesiredNode, terms: NodeTerms, departing: Departing, now_s: float
) -> Notice:
    """Return the withdrawals that were announced, beside the devices that the kubelet has of the last offers."""
    if terms.notice is None:
        return memory.notice
    offers = offered_by_us(memory.offers, picture, desired, memory.review)
    return announce(memory.notice, departing.names, offers, picture.status_counts, terms.notice, now_s)


def _counted(
    picture: NodePicture, notice: Notice, terms: NodeTerms, offers: Offers, departing: Departing, now_s: float
) -> Notice:
    """Return the notice with the counts that the scheduler should see."""
    if terms.notice is None:
        return notice
    account = picture.ledger.account
    counted = account.surely_counted if account is not None else ()
    return with_counts(notice, offers, departing.names, counted, terms.notice, now_s)


def _offers(
    picture: NodePicture,
    memory: NodeMemory,
    desired: DesiredNode,
    terms: NodeTerms,
    inputs: OfferInputs,
    on_demand: frozenset[ResourceName],
) -> tuple[Offers, NameReview]:
    """Return the offers, without the resources whose names wait for the review, and these names."""
    if (inventory := picture.inventory) is None or terms.vgpus_only:
        return memory.offers, memory.review
    offers, review = make_offers(inventory, inputs, memory.offers), memory.review
    if terms.review is not None:
        review_terms = replace(terms.review, is_possible=picture.is_kind_known)
        names = offers.names | on_demand
        review = review_names(review, names, inputs.resources, desired.spec, review_terms, inputs.now_s)
    if not review.waiting:
        return offers, review
    waiting = {name: withholding.reason for name, withholding in review.waiting.items()}
    return make_offers(inventory, replace(inputs, withheld={**waiting, **inputs.withheld}), memory.offers), review


def _offer_inputs(
    picture: NodePicture, desired: DesiredNode, terms: NodeTerms, withdrawal: Withdrawal, now_s: float
) -> OfferInputs:
    ledger, gates = picture.ledger, picture.gates
    return OfferInputs(
        picture.naming(terms),
        terms.settings,
        tuple(entry for entry in ledger.entries if not is_on_demand_id(entry.device)),
        ledger.resources,
        ledger.is_observed,
        now_s,
        withdrawal.functions,
        withdrawal.vgpus,
        {name: withholding.reason for name, withholding in withholdings(desired.spec).items()},
        gates.changing,
        gates.blocked,
        picture.former,
    )


def _on_demand_inputs(picture: NodePicture, terms: NodeTerms, vgpus: NodeVgpus) -> OnDemandInputs:
    entries, gates = picture.ledger.entries, picture.gates
    ending = frozenset(entry.device for entry in entries if entry.consumer and entry.consumer.pod_uid in picture.ending)
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


def _share_inputs(picture: NodePicture, desired: DesiredNode, terms: NodeTerms) -> ShareInputs:
    gates, modes = picture.gates, desired.modes
    return ShareInputs(modes, terms.settings.shares, picture.plugins, picture.former, gates.changing, gates.blocked)


def _names(picture: NodePicture, offers: Offers, on_demand: OnDemandOffer, review: NameReview) -> OfferedNames:
    """Return the first names of the offered devices, and the resources but those that are not registered yet."""
    offered = (offers.by_resource.keys() | on_demand.names) - review.waiting.keys()
    return OfferedNames(first_names(offers, picture.ledger.first_names), picture.ledger.resources | offered)


def _view(
    picture: NodePicture,
    decided: NodeDecisions,
    inventory: Inventory,
    drivers: DesiredDrivers,
    terms: NodeTerms,
    at: datetime,
) -> NodeView:
    memory, modes, given = decided.memory, decided.memory.desired.modes, picture.shares
    workload = workload_of(modes.default, inventory)
    naming = picture.naming(terms)
    inputs = ViewInputs(
        inventory,
        memory.offers,
        device_users(picture.ledger.entries, inventory.facts.users or {}),
        naming if decided.names is None else replace(naming, first_names=decided.names.first_names),
        picture.registrations,
        _problems(picture, decided.invalid, memory.review),
        terms.agent,
        invalid=decided.invalid.all,
        desired_by_gpu={gpu: str(modes.of(gpu)) for gpu in drivers},
        vgpu_configs=decided.desired.vgpus.configs,
        schedulers={gpu: report.scheduler for gpu, report in memory.smi.schedulers.items()},
        workload=workload,
        conditions=conditions(inventory, workload, drivers),
        withholdings={**memory.review.waiting, **withholdings(memory.desired.spec)},
        sharing=with_given(memory.sharing, given),
        pods_with_shares=given.pods_by_gpu() if given is not None else {},
        on_demand=memory.on_demand,
        given=resources_by_vgpu(picture.ledger.entries),
    )
    return make_view(inputs, at)


def _problems(picture: NodePicture, invalid: InvalidStates, review: NameReview) -> tuple[Reason, ...]:
    """Return the problems of the node, the invalid desired state first."""
    found = (*invalid.reasons, picture.unrecorded_tenants, review.problem, *picture.problems.values())
    return tuple(dict.fromkeys(reason for reason in found if reason is not None))


def on_demand_gpus(picture: NodePicture, terms: NodeTerms, vgpus: NodeVgpus) -> Mapping[PciAddress, OnDemandGpu]:
    """Return what each GPU in mode on-demand can still carry; `vgpus` were decided last."""
    if picture.inventory is None:
        return {}
    return gpus_on_demand(picture.inventory, _on_demand_inputs(picture, terms, vgpus))


def departures(picture: NodePicture, withdrawal: Withdrawal) -> Departures:
    """Return what the kubelet may still count of the withdrawn devices, by its last answer."""
    ledger = picture.ledger
    count = KubeletCount(picture.inventory, ledger.account, ledger.rules)
    return Departures(withdrawal, count, picture.gates.drained, ledger.entries, ledger.known, ledger.resources)
