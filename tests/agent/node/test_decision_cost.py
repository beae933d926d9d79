"""The allocations that a turn of decisions reads: each of them a few times, however many devices the node has."""

from collections.abc import Iterator
from typing import ClassVar

from bench.decisions import allocate_all, state_of
from msgspec.structs import replace
from typing_extensions import override

from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.change.nodevgpus import SmiMemory, VgpuDemand, plan_node_vgpus
from gpuvirt.model.change.vgpus.gpustate import Holding
from gpuvirt.model.node.decisions import decide
from gpuvirt_sim.clock import BEGINNING


class CountedEntries(tuple[Entry, ...]):
    """Allocations that count how often they are walked through."""

    __slots__ = ()
    walks: ClassVar[int] = 0

    @override
    def __iter__(self) -> Iterator[Entry]:
        type(self).walks += 1
        return super().__iter__()


class CountedHoldings(tuple[Holding, ...]):
    """Allocated vGPUs that count how often they are walked through."""

    __slots__ = ()
    walks: ClassVar[int] = 0

    @override
    def __iter__(self) -> Iterator[Holding]:
        type(self).walks += 1
        return super().__iter__()


def walks_of(gpus: int) -> tuple[int, int]:
    """Return how often a turn of decisions, and the planning in it, walk through the allocations."""
    state = state_of(gpus)
    state.decide(0.0, BEGINNING)
    allocate_all(state)
    ledger = replace(state.ledger, entries=CountedEntries(state.ledger.entries))
    CountedEntries.walks = 0
    picture = replace(state.picture, ledger=ledger)
    decided = decide(picture, state.memory, state.terms, 1.0, BEGINNING)
    assert len(picture.holdings) == 4 * gpus
    assert all(vgpu.users for gpu in decided.view.gpus for vgpu in gpu.vgpus)
    inventory, desired, modes = state.inventory, decided.memory.desired, decided.desired.modes
    assert inventory is not None
    demand = VgpuDemand(desired.config, modes, {}, CountedHoldings(picture.holdings), desired.named)
    CountedHoldings.walks = 0
    plan_node_vgpus(inventory, demand, SmiMemory())
    return CountedEntries.walks, CountedHoldings.walks


def test_more_gpus_do_not_make_decisions_walk_through_all_allocations_more_often() -> None:
    assert walks_of(2) == walks_of(9)
