"""The decisions for one node: the offered and the withdrawn devices, and the desired state of each GPU.

`decide` is the order of the conclusions: each takes the values that it follows from. Nothing here waits, reads the host
or changes it, and the same picture and memory at the same time decide the same.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime

import msgspec
from msgspec.structs import replace

from gpuvirt.model.allocation.nodeledger import OfferedNames
from gpuvirt.model.change.desired import DesiredDrivers
from gpuvirt.model.change.driverplanning import drivers_of, withdrawn
from gpuvirt.model.change.nodevgpus import NodeVgpus, VgpuDemand, plan_node_vgpus
from gpuvirt.model.change.vgpus.gpustate import Holding
from gpuvirt.model.desired.gpumodes import Modes
from gpuvirt.model.desired.invalid import InvalidDesired, Source, unknown_addresses
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.node.claims import claimed_functions, with_claims
from gpuvirt.model.node.desirednode import DesiredNode, desire
from gpuvirt.model.node.desiredunits import DesiredUnits
from gpuvirt.model.node.memo import CacheKey, Memoized, memoized
from gpuvirt.model.node.offering import announced, counted, offering_of, taken
from gpuvirt.model.node.parts import allocations_part
from gpuvirt.model.node.picture import NodeMemory, NodePicture, NodeTerms
from gpuvirt.model.node.shares import NOT_OBSERVED, ShareState, decide_shares, with_shares
from gpuvirt.model.offers.deviceusers import NO_TIME, DeviceUsers
from gpuvirt.model.offers.namereview import NameReview, withholdings
from gpuvirt.model.offers.offers import Offers, first_names
from gpuvirt.model.offers.ondemand.offer import OnDemandOffer
from gpuvirt.model.offers.sharing import SharedOffer, ShareInputs, share_gpus
from gpuvirt.model.offers.validation import conditions, workload_of
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.offers.viewmaking import Drawn, ViewInputs, make_view
from gpuvirt.model.offers.withdrawal import Departing, withdraw
from gpuvirt.model.reasons import Reason


class InvalidStates(msgspec.Struct, frozen=True):
    """The invalid desired state of one node."""

    modes: tuple[InvalidDesired, ...] = ()
    """The invalid modes of GPUs, and what limits their shares."""
    vgpus: tuple[InvalidDesired, ...] = ()
    """The invalid desired vGPUs."""

    @property
    def all(self) -> tuple[InvalidDesired, ...]:
        """All invalid desired state."""
        return (*self.modes, *self.vgpus)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """The reasons of all invalid desired state."""
        return tuple(invalid.reason for invalid in self.all)


def invalid_states(
    workload: Iterable[InvalidDesired],
    configs: InvalidDesired | None,
    named: Mapping[str, Source],
    gpus: Collection[str] | None,
    vgpus: NodeVgpus,
) -> InvalidStates:
    """Return the invalid desired state of a node.

    `workload` has the invalid modes and shares of its labels or GpuNode, `configs` the reason why the vGPU configs
    can't be used. `gpus` are the addresses of the host's GPUs, None before its first observation.
    """
    addresses = unknown_addresses(named, gpus) if gpus is not None else ()
    found = (configs, vgpus.desired_types.problem)
    return InvalidStates(
        (*workload, *addresses),
        (*(invalid for invalid in found if invalid is not None), *vgpus.invalid),
    )


class NodeDecisions(msgspec.Struct, frozen=True):
    """The decisions for one node at one moment."""

    view: NodeView = msgspec.field(default_factory=lambda: NodeView(NO_TIME, host_observed=False))
    """The view of the node, from which all output is made."""
    desired: DesiredUnits = msgspec.field(default_factory=DesiredUnits)
    """The desired state of each GPU with the plans toward it, and the questions for nvidia-smi."""
    invalid: InvalidStates = msgspec.field(default_factory=InvalidStates)
    """The invalid parts of the desired state."""
    names: OfferedNames | None = None
    """The names to keep in the ledger; None before the first observation of the host."""
    memory: NodeMemory = msgspec.field(default_factory=NodeMemory)
    """The results of these decisions that the next ones need."""

    @property
    def again_at_s(self) -> float | None:
        """When decisions differ without a new observation; None: never."""
        memory = self.memory
        times = (memory.notice.again_at_s, memory.review.again_at_s, memory.on_demand.replacements.again_at_s)
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
        memory = dataclasses.replace(memory, desired=desired, shares=_shares(picture, memory))
        return _undecided(picture, memory, terms, at)
    modes = with_claims(desired.modes, picture.ledger.claims, inventory)
    drivers = drivers_of(modes, inventory.gpus if not terms.vgpus_only else ())
    allocations = allocations_part(memory.parts.allocations, picture.ledger.entries)
    demand = _demand(desired, modes, drivers, allocations.value.holdings, terms)
    planned = _planned(inventory, demand, memory)
    vgpus, parts = planned.value, replace(memory.parts, allocations=allocations, vgpus=planned)
    invalid = _invalid(desired, inventory.gpus, vgpus)
    claimed = claimed_functions(desired.modes, picture.ledger, inventory)
    leaving = withdrawn(inventory, drivers) | claimed
    carried = (vgpu for vgpu, found in inventory.vgpus.items() if found.gpu in claimed) if claimed else ()
    departing = Departing(leaving, vgpus.undesired.union(carried), picture.gates.drained.functions)
    notice = announced(picture, memory, desired, terms, departing, now_s)
    may_withdraw = notice.may_withdraw if terms.notice is not None else departing.names
    withdrawal = withdraw(memory.withdrawal, departing, may_withdraw, now_s)
    before = dataclasses.replace(memory, desired=desired, withdrawal=withdrawal, claimed=claimed, parts=parts)
    offering = offering_of(inventory, picture, before, terms, vgpus, now_s)
    offers, on_demand, review = offering.offers, offering.on_demand, offering.review
    sharing = share_gpus(inventory, _share_inputs(picture, desired, terms), memory.sharing.verdict, now_s)
    notice = counted(picture, notice, terms, taken(picture, inventory, desired, offering), departing, now_s)
    smi = memory.smi.of_contexts(vgpus.time_shared)
    shares = _shares(picture, memory, sharing)
    after = NodeMemory(
        desired, offers, withdrawal, notice, review, sharing, shares, on_demand, smi, claimed, offering.parts
    )
    names = _names(picture, offers, on_demand, review)
    units = DesiredUnits(vgpus, modes)
    decisions = NodeDecisions(desired=units, invalid=invalid, names=names, memory=after)
    inputs = _view_inputs(picture, decisions, inventory, drivers, offering.users, terms)
    drawn = _drawn(inputs, memory.parts.view)
    view, parts = replace(drawn.value.view, at=at), replace(offering.parts, view=drawn)
    return replace(decisions, view=view, memory=dataclasses.replace(after, parts=parts))


def _undecided(picture: NodePicture, memory: NodeMemory, terms: NodeTerms, at: datetime) -> NodeDecisions:
    """Return the decisions before the first observation of the host: the invalid desired state."""
    invalid = _invalid(memory.desired, None, NodeVgpus())
    problems = _problems_of(picture, invalid, memory.review)
    view = NodeView(at=at, problems=problems, invalid=invalid.all, agent=terms.agent, host_observed=False)
    return NodeDecisions(view, invalid=invalid, memory=memory)


def _shares(picture: NodePicture, memory: NodeMemory, offer: SharedOffer = NOT_OBSERVED) -> ShareState:
    return decide_shares(picture.shares, memory.shares, offer) if picture.shares is not None else memory.shares


def _desired(picture: NodePicture, memory: NodeMemory, terms: NodeTerms) -> DesiredNode:
    """Return the desired state by the request, if there is one."""
    if picture.request is None:
        return memory.desired
    return desire(memory.desired, picture.request, terms.settings, terms.request)


def _demand(
    desired: DesiredNode, modes: Modes, drivers: DesiredDrivers, holdings: tuple[Holding, ...], terms: NodeTerms
) -> VgpuDemand:
    sizes = terms.settings.on_demand.sizes
    return VgpuDemand(desired.config, modes, drivers, holdings, desired.named, sizes)


def _planned(inventory: Inventory, demand: VgpuDemand, memory: NodeMemory) -> Memoized[NodeVgpus]:
    """Return the plans of vGPUs; plans of unchanged GPUs are those of the last plans."""
    last, smi = memory.parts.vgpus, memory.smi
    before = last.value if last is not None else None
    key = CacheKey((inventory, demand.holdings), (demand, smi))
    return memoized(last, key, lambda: plan_node_vgpus(inventory, demand, smi, before))


def _drawn(inputs: ViewInputs, last: Memoized[Drawn] | None) -> Memoized[Drawn]:
    """Return the view of the node, without a time; views whose inputs have not changed are those of the last view."""
    before = last.value if last is not None else None
    key = CacheKey((inputs.inventory, inputs.offers, inputs.users, inputs.on_demand), (inputs,))
    return memoized(last, key, lambda: Drawn(inputs, make_view(inputs, NO_TIME, before)))


def _invalid(desired: DesiredNode, gpus: Collection[str] | None, vgpus: NodeVgpus) -> InvalidStates:
    return invalid_states(desired.invalid_workload, desired.configs.problem, desired.named, gpus, vgpus)


def _share_inputs(picture: NodePicture, desired: DesiredNode, terms: NodeTerms) -> ShareInputs:
    gates, modes = picture.gates, desired.modes
    return ShareInputs(
        modes,
        terms.settings.shares,
        desired.enforcement,
        picture.plugins,
        picture.former,
        gates.changing,
        gates.blocked,
        desired.invalid_enforcement.reason if desired.invalid_enforcement is not None else None,
    )


def _names(picture: NodePicture, offers: Offers, on_demand: OnDemandOffer, review: NameReview) -> OfferedNames:
    """Return the first names of the offered devices, and the resources but those that are not registered yet."""
    offered = (offers.by_resource.keys() | on_demand.names) - review.waiting.keys()
    return OfferedNames(first_names(offers, picture.ledger.first_names), picture.ledger.resources | offered)


def _view_inputs(
    picture: NodePicture,
    decided: NodeDecisions,
    inventory: Inventory,
    drivers: DesiredDrivers,
    users: DeviceUsers,
    terms: NodeTerms,
) -> ViewInputs:
    """Return what the view follows from; `drivers` are the desired ones, `users` those of all devices."""
    memory, modes, shares = decided.memory, decided.memory.desired.modes, picture.shares
    workload = workload_of(modes.default, inventory)
    naming = picture.naming(terms)
    return ViewInputs(
        inventory,
        memory.offers,
        users,
        naming if decided.names is None else replace(naming, first_names=decided.names.first_names),
        picture.registrations,
        _problems_of(picture, decided.invalid, memory.review),
        terms.agent,
        invalid=decided.invalid.all,
        desired_by_gpu={gpu: str(modes.of(gpu)) for gpu in drivers},
        vgpu_configs=decided.desired.vgpus.configs,
        schedulers={gpu: report.scheduler for gpu, report in memory.smi.schedulers.items()},
        workload=workload,
        conditions=conditions(inventory, workload, drivers),
        withholdings={**memory.review.waiting, **withholdings(memory.desired.spec)},
        sharing=with_shares(memory.sharing, shares, memory.shares),
        pods_with_shares=shares.records.pods_by_gpu if shares is not None else {},
        on_demand=memory.on_demand,
        given=users.given,
        vfio_nodes=terms.settings.vfio_nodes,
    )


def _problems_of(picture: NodePicture, invalid: InvalidStates, review: NameReview) -> tuple[Reason, ...]:
    """Return the problems of the node, the invalid desired state first."""
    found = (*invalid.reasons, picture.unrecorded_tenants, review.problem, *picture.problems.values())
    return tuple(dict.fromkeys(reason for reason in found if reason is not None))
