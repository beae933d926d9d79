"""The parts of the last decisions for a node, which the next ones take over where they follow from the same.

So decisions with parts are those without, which a test of all sequences of pictures checks.
"""

import msgspec

from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.allocation.ondemandids import is_on_demand_id
from gpuvirt.model.change.nodevgpus import NodeVgpus
from gpuvirt.model.change.vgpus.gpustate import Holding, holding_of
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.devices.candidates import KnownVgpus
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.naming import Naming
from gpuvirt.model.node.memo import CacheKey, Memoized, memoized
from gpuvirt.model.offers.deviceusers import DeviceUsers
from gpuvirt.model.offers.offermaking import Candidates, candidates_of
from gpuvirt.model.offers.offers import Offers
from gpuvirt.model.offers.ondemand.offer import OnDemandOffer, on_demand_entries
from gpuvirt.model.offers.viewmaking import Drawn
from gpuvirt.model.reasons import Reason


class NodeAllocations(msgspec.Struct, frozen=True):
    """The allocations of a node."""

    entries: tuple[Entry, ...]
    """All of them: one object until one of them changes."""
    devices: tuple[Entry, ...]
    """Those of devices by their own ids; all entries, the same object, where no vGPU is on demand."""
    on_demand: tuple[Entry, ...]
    """Those of on-demand vGPUs."""
    holdings: tuple[Holding, ...]
    """The allocated vGPUs, one for each entry, as the planner takes them."""


def allocations_part(last: Memoized[NodeAllocations] | None, entries: tuple[Entry, ...]) -> Memoized[NodeAllocations]:
    """Return the allocations; the vGPUs of entries that have not changed are the objects from before."""

    def allocations() -> NodeAllocations:
        before = zip(last.value.entries, last.value.holdings, strict=True) if last is not None else ()
        known = {id(entry): holding for entry, holding in before}
        holdings = tuple(known.get(id(entry)) or holding_of(entry, same_boot=True) for entry in entries)
        if not (on_demand := tuple(on_demand_entries(entries))):
            return NodeAllocations(entries, entries, (), holdings)
        devices = tuple(entry for entry in entries if not is_on_demand_id(entry.device))
        return NodeAllocations(entries, devices, on_demand, holdings)

    return memoized(last, CacheKey((entries,)), allocations)


class NamedCandidates(msgspec.Struct, frozen=True):
    """The devices that can be offered, and what names them."""

    inventory: Inventory
    naming: Naming
    candidates: Candidates

    @property
    def vgpus(self) -> KnownVgpus:
        """The vGPUs among them."""
        found = [(found.target.vgpu, found) for found in self.candidates if not isinstance(found, Reason)]
        return KnownVgpus(self.inventory, {vgpu: candidate for vgpu, candidate in found if vgpu is not None})


def candidates_part(
    last: Memoized[NamedCandidates] | None, inventory: Inventory, naming: Naming, settings: Settings
) -> Memoized[NamedCandidates]:
    """Return the devices that can be offered; vGPUs that have not changed are the objects from before."""

    def candidates() -> NamedCandidates:
        known = last.value.vgpus if last is not None and last.value.naming == naming else None
        return NamedCandidates(inventory, naming, candidates_of(inventory, naming, settings, known))

    return memoized(last, CacheKey((inventory,), (settings, naming)), candidates)


class Parts(msgspec.Struct, frozen=True):
    """The parts of the last decisions; None for parts to decide from scratch."""

    allocations: Memoized[NodeAllocations] | None = None
    vgpus: Memoized[NodeVgpus] | None = None
    candidates: Memoized[NamedCandidates] | None = None
    on_demand: Memoized[OnDemandOffer] | None = None
    offers: Memoized[Offers] | None = None
    users: Memoized[DeviceUsers] | None = None
    view: Memoized[Drawn] | None = None
