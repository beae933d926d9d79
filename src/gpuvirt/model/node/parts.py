"""The parts of the last decisions for a node, each with its basis: the inputs of the decision.

A part whose basis is still the same is taken over. Frozen values that are the same object are the same value; other
values are compared. So decisions with parts are those without, which a test of all sequences of pictures checks.
"""

from collections.abc import Callable, Mapping
from typing import Generic, Protocol, Self, TypeVar

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import IommuGroup
from gpuvirt.facts.snapshot import OpenDeviceUser
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.allocation.ondemandids import is_on_demand_id
from gpuvirt.model.change.nodevgpus import NodeVgpus, VgpuDemand, plan_node_vgpus
from gpuvirt.model.change.smimemory import SmiMemory
from gpuvirt.model.change.vgpus.gpustate import Holding, holding_of
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.devices.candidates import KnownVgpus
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.naming import Naming
from gpuvirt.model.offers.deviceusers import DeviceUsers
from gpuvirt.model.offers.givenshares import NO_TIME
from gpuvirt.model.offers.offermaking import Candidates, OfferInputs, candidates_of
from gpuvirt.model.offers.offers import Offers
from gpuvirt.model.offers.ondemand.offer import OnDemandInputs, OnDemandOffer, offer_on_demand, on_demand_entries
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.offers.viewinputs import ViewInputs
from gpuvirt.model.offers.viewmaking import Drawn, make_view
from gpuvirt.model.reasons import Reason


class Basis(Protocol):
    """The inputs of a part of the decisions."""

    def decides_as(self, other: Self, /) -> bool:
        """Return whether the same part follows from both."""
        ...


B = TypeVar("B", bound=Basis)
V = TypeVar("V")


class DecisionPart(msgspec.Struct, Generic[B, V], frozen=True):
    """A part of the decisions."""

    basis: B
    value: V


def part_of(last: DecisionPart[B, V] | None, basis: B, decide: Callable[[B], V]) -> DecisionPart[B, V]:
    """Return the last part if the same follows from its basis, else the part that is decided now."""
    return last if last is not None and basis.decides_as(last.basis) else DecisionPart(basis, decide(basis))


class AllocationsBasis(msgspec.Struct, frozen=True):
    """The allocations, which are one object until one of them changes."""

    entries: tuple[Entry, ...]

    def decides_as(self, other: Self, /) -> bool:
        """Return whether the same part follows from both."""
        return self.entries is other.entries


class ByKind(msgspec.Struct, frozen=True):
    """The allocations by what their ids name."""

    devices: tuple[Entry, ...]
    """Those of devices by their own ids; all allocations, the same object, where no vGPU is on demand."""
    on_demand: tuple[Entry, ...]
    """Those of on-demand vGPUs."""


def by_kind(basis: AllocationsBasis) -> ByKind:
    """Return the allocations by what their ids name."""
    on_demand = tuple(on_demand_entries(basis.entries))
    devices = (entry for entry in basis.entries if not is_on_demand_id(entry.device))
    return ByKind(tuple(devices) if on_demand else basis.entries, on_demand)


HoldingsPart = DecisionPart[AllocationsBasis, tuple[Holding, ...]]


def holdings_part(last: HoldingsPart | None, entries: tuple[Entry, ...]) -> HoldingsPart:
    """Return the allocated vGPUs; those of entries that have not changed are the objects from before."""
    return part_of(last, AllocationsBasis(entries), lambda basis: _holdings(basis.entries, last))


def _holdings(entries: tuple[Entry, ...], last: HoldingsPart | None) -> tuple[Holding, ...]:
    before = zip(last.basis.entries, last.value, strict=True) if last is not None else ()
    known = {id(entry): holding for entry, holding in before}
    return tuple(known.get(id(entry)) or holding_of(entry, same_boot=True) for entry in entries)


class UsersBasis(msgspec.Struct, frozen=True):
    """The allocations and the processes that have groups open."""

    entries: tuple[Entry, ...]
    processes: Mapping[IommuGroup, tuple[OpenDeviceUser, ...]] | None

    def decides_as(self, other: Self, /) -> bool:
        """Return whether the same part follows from both."""
        return self.entries is other.entries and self.processes is other.processes


class VgpusBasis(msgspec.Struct, frozen=True):
    """The inputs of the plans of vGPUs."""

    inventory: Inventory
    demand: VgpuDemand
    smi: SmiMemory

    def decides_as(self, other: Self, /) -> bool:
        """Return whether the same part follows from both."""
        same = self.inventory is other.inventory and self.demand.holdings is other.demand.holdings
        return same and self.demand == other.demand and self.smi == other.smi


VgpusPart = DecisionPart[VgpusBasis, NodeVgpus]


def vgpus_part(last: VgpusPart | None, basis: VgpusBasis) -> VgpusPart:
    """Return the plans of vGPUs; plans of unchanged GPUs are reused."""
    before = last.value if last is not None else None
    return part_of(last, basis, lambda basis: plan_node_vgpus(basis.inventory, basis.demand, basis.smi, before))


class CandidatesBasis(msgspec.Struct, frozen=True):
    """The inputs of the candidates, which are the devices that can be offered."""

    inventory: Inventory
    naming: Naming
    settings: Settings

    def decides_as(self, other: Self, /) -> bool:
        """Return whether the same part follows from both."""
        same = self.inventory is other.inventory and self.settings == other.settings
        return same and self.naming == other.naming


CandidatesPart = DecisionPart[CandidatesBasis, Candidates]


def candidates_part(last: CandidatesPart | None, basis: CandidatesBasis) -> CandidatesPart:
    """Return the devices that can be offered; vGPUs that have not changed are the objects from before."""
    return part_of(
        last, basis, lambda basis: candidates_of(basis.inventory, basis.naming, basis.settings, _known(last, basis))
    )


def _known(last: CandidatesPart | None, basis: CandidatesBasis) -> KnownVgpus | None:
    if last is None or last.basis.naming != basis.naming:
        return None
    found = [(found.target.vgpu, found) for found in last.value if not isinstance(found, Reason)]
    vgpus = {vgpu: candidate for vgpu, candidate in found if vgpu is not None}
    return KnownVgpus(last.basis.inventory, vgpus)


class OffersBasis(msgspec.Struct, frozen=True):
    """The inputs of the offers, the inventory and the last offers among them."""

    inventory: Inventory
    inputs: OfferInputs
    before: Offers

    def decides_as(self, other: Self, /) -> bool:
        """Return whether the same part follows from both, whatever the time."""
        same = self.inventory is other.inventory and self.before is other.before
        same = same and self.inputs.entries is other.inputs.entries
        return same and self.inputs == replace(other.inputs, now_s=self.inputs.now_s)


OffersPart = DecisionPart[OffersBasis, Offers]


def settled(last: OffersPart | None) -> OffersPart | None:
    """Return the last offers if they were those before, and no symptom changes them by time alone, else None."""
    is_settled = last is not None and last.value is last.basis.before and last.value.verdict.again_at_s is None
    return last if is_settled else None


class OnDemandBasis(msgspec.Struct, frozen=True):
    """The inputs of the on-demand resources, the states of their GPUs and all of the ledger's entries among them."""

    inventory: Inventory
    inputs: OnDemandInputs
    before: OnDemandOffer

    def decides_as(self, other: Self, /) -> bool:
        """Return whether the same part follows from both."""
        same = self.inventory is other.inventory and self.before is other.before
        # entries that are equal may differ in the type of a vGPU
        same = same and self.inputs.entries is other.inputs.entries
        return same and self.inputs == other.inputs


OnDemandPart = DecisionPart[OnDemandBasis, OnDemandOffer]


def on_demand_part(last: OnDemandPart | None, basis: OnDemandBasis) -> OnDemandPart:
    """Return the on-demand resources; the last ones are taken over if they were those before, since ids count up."""
    is_settled = last is not None and last.value is last.basis.before
    return part_of(
        last if is_settled else None, basis, lambda basis: offer_on_demand(basis.inventory, basis.inputs, basis.before)
    )


class ViewBasis(msgspec.Struct, frozen=True):
    """The inputs of the node's view."""

    inputs: ViewInputs

    def decides_as(self, other: Self, /) -> bool:
        """Return whether the same part follows from both."""
        now, last = self.inputs, other.inputs
        same = now.inventory is last.inventory and now.offers is last.offers and now.users is last.users
        same = same and now.on_demand is last.on_demand
        return same and now == last


ViewPart = DecisionPart[ViewBasis, NodeView]


def view_part(last: ViewPart | None, basis: ViewBasis) -> ViewPart:
    """Return the view of the node, without a time; views whose inputs have not changed are reused."""
    drawn = Drawn(last.basis.inputs, last.value) if last is not None else None
    return part_of(last, basis, lambda basis: make_view(basis.inputs, NO_TIME, drawn))


class Parts(msgspec.Struct, frozen=True):
    """The parts of the last decisions; None for parts to decide from scratch."""

    by_kind: DecisionPart[AllocationsBasis, ByKind] | None = None
    holdings: HoldingsPart | None = None
    vgpus: VgpusPart | None = None
    candidates: CandidatesPart | None = None
    on_demand: OnDemandPart | None = None
    offers: OffersPart | None = None
    users: DecisionPart[UsersBasis, DeviceUsers] | None = None
    view: ViewPart | None = None
