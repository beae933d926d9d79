"""What the agent lets those know who change GPUs: what is there and wanted, who has what, what is withdrawn."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime

from gpuvirt.clock import Clock, Signal
from gpuvirt.facts.ids import PciAddress, VgpuId
from gpuvirt.facts.vgpu import SmiReport
from gpuvirt.model import refusals, shortfalls
from gpuvirt.model.allocations import Allocations, Unknown
from gpuvirt.model.carving import CarvePlan, CarveWish
from gpuvirt.model.gpumodes import Questions
from gpuvirt.model.heard import Progress
from gpuvirt.model.invalid import InvalidDesired
from gpuvirt.model.inventory import Inventory
from gpuvirt.model.isolation import UnitId
from gpuvirt.model.ledger import allocations_of
from gpuvirt.model.plan import Wish, Wishes
from gpuvirt.model.podallocations import Allocation, PodAllocations, map_allocations
from gpuvirt.model.reasons import Reason
from gpuvirt.model.recorded import ReadRecorded, any_consumer
from gpuvirt.model.scheduling import Footing, Told
from gpuvirt.model.vgpuwanted import Book, ConfigName, Wanted
from gpuvirt.model.wanted import Modes
from gpuvirt.node.attempts import HearTrouble
from gpuvirt.node.carver import Given
from gpuvirt.node.cell import Cell
from gpuvirt.node.gate import Change, pods_by_gpu
from gpuvirt.node.operands import Operands, Tell, Way
from gpuvirt.node.state import NodeState
from gpuvirt.node.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Bells:
    """What the agent does when it is rung for."""

    look_soon: Callable[[str], None]
    """Looks at the host, for a cause."""
    conclude_soon: Callable[[], None]
    hear_trouble: HearTrouble


@dataclass(frozen=True, slots=True)
class Desired:
    """What is desired of a node's GPUs, as it was last concluded; any thread reads it."""

    moves: Wishes = field(default_factory=dict)
    vgpus: Mapping[PciAddress, CarveWish] = field(default_factory=dict)
    modes: Modes = field(default_factory=Modes)
    config: tuple[Book | None, ConfigName | None] = (None, None)

    def origin_of(self, gpu: PciAddress) -> object:
        """Return what a GPU's desired state follows from, besides what the host shows."""
        return self.modes.of(gpu), self.config


class Oversight:
    """One node's, for its reconcilers."""

    def __init__(
        self,
        state: NodeState,
        telemetry: Telemetry,
        clock: Clock,
        bells: Bells,
        recorded: ReadRecorded,
        operands: Operands | None,
    ) -> None:
        """`operands`: another's programs that offer what is here; None where the agent itself does.

        `recorded` reads what the kubelet has recorded of its allocations.
        """
        self.concluded = Signal()
        """Set whenever conclusions were drawn."""
        self.vgpu_states: Cell[Progress | None] = Cell(None)
        """How far what is wanted of vGPUs has come, for the cluster to be told; None: it is told nothing."""
        self.workload_states: Cell[Progress | None] = Cell(None)
        """How far it has come that its GPUs are as the cluster wants them; None: nothing is said of that."""
        self.hear_trouble = bells.hear_trouble
        self._state = state
        self._telemetry = telemetry
        self._clock = clock
        self._look_soon = bells.look_soon
        self._conclude_soon = bells.conclude_soon
        self._withdrawn_at = clock.now()
        """When devices were last taken from what is offered."""
        self._withdrawn: frozenset[str] = frozenset()
        self._operands = operands
        self._recorded = recorded
        self._desired = Desired()
        self.looks = 0
        """How often the host was looked at."""

    @property
    def inventory(self) -> Inventory | None:
        """What was last seen."""
        return self._state.inventory

    @property
    def wishes(self) -> Wishes:
        """What is wanted of GPUs."""
        return self._state.wishes

    @property
    def follows_cluster(self) -> bool:
        """Whether the node's label or its GpuNode says what is wanted of its GPUs."""
        return self._state.follows_cluster

    @property
    def invalid_modes(self) -> tuple[InvalidDesired, ...]:
        """What of that is invalid."""
        return self._state.invalid.modes

    @property
    def reasons_against_moves(self) -> tuple[Reason, ...]:
        """Why GPUs are not where they are wanted, and why those that are wanted whole are not empty."""
        whole = (f"carve {gpu} " for gpu, (wish, _) in self._state.carving.by_gpu.items() if wish.whole)
        begins = ("move ", *whole)
        return tuple(note for who, note in self._state.notes.items() if who.startswith(begins))

    @property
    def still_counted(self) -> Mapping[PciAddress, tuple[str, ...]]:
        """The functions that are offered no more, and that the kubelet was last heard to count, with what it counts."""
        return self._state.still_counted

    @property
    def wanted_vgpus(self) -> Wanted:
        """Which vGPUs are wanted, or why that is not known."""
        return self._state.carving.wanted

    @property
    def invalid_vgpus(self) -> tuple[InvalidDesired, ...]:
        """What of the wanted vGPUs is invalid."""
        return self._state.invalid.vgpus

    @property
    def carve_plans(self) -> Mapping[PciAddress, tuple[CarveWish, CarvePlan]]:
        """What is wanted of each GPU that is to be carved, and what was to be done to it when it was last seen."""
        return self._state.carving.by_gpu

    @property
    def questions(self) -> Mapping[PciAddress, tuple[CarveWish, Questions]]:
        """What nvidia-smi must be asked of GPUs before it is known what is to be done to them."""
        return self._state.carving.questions

    def hear_smi(self, gpu: PciAddress, wish: CarveWish, report: SmiReport | None) -> None:
        """Take what nvidia-smi said when it was asked for a wish; None: that may be otherwise by now."""
        footing = self._state.carving.time_shared.get(gpu)
        if report is None:
            self._state.carving.smi.pop(gpu, None)
            self._state.carving.schedulers.pop(gpu, None)
        else:
            self._state.carving.smi[gpu] = wish, report
            if report.scheduler is not None and footing is not None:
                self._state.carving.hear_scheduler(gpu, Told(report.scheduler, footing, self._clock.monotonic_s()))
        self._conclude_soon()

    @property
    def time_shared(self) -> Mapping[PciAddress, Footing]:
        """The GPUs whose scheduler is to be known, with what it stands on."""
        return self._state.carving.time_shared

    @property
    def schedulers(self) -> Mapping[PciAddress, Told]:
        """What is known of them."""
        return self._state.carving.schedulers

    def hear_scheduler(self, gpu: PciAddress, told: Told) -> None:
        """Take what nvidia-smi has told of a GPU's scheduler."""
        if self._state.carving.hear_scheduler(gpu, told):
            self._conclude_soon()

    def pods(self) -> Allocations | Unknown:
        """Return which pods have which GPUs, unknown while the kubelet was not heard since offers became less."""
        if (unknown := self._unknown) is not None:
            return unknown
        allocations, inventory = self._allocations, self._state.inventory
        found = {} if inventory is None else dict(allocations.by_gpu(inventory))
        for gpu, holders in pods_by_gpu(self._state.entries).items():
            found[gpu] = tuple(dict.fromkeys((*found.get(gpu, ()), *holders)))
        return found

    @property
    def _unknown(self) -> Unknown | None:
        """Why pods may have more than is known: the kubelet was not asked since, or half of its account is missing."""
        heard = self._state.holders
        if heard is None or not self.heard_since:
            return Unknown()
        return Unknown(heard.partial) if heard.partial is not None else None

    @property
    def unmapped(self) -> tuple[Allocation, ...]:
        """The GPUs that pods have by ids which could not be mapped to a GPU of this host."""
        return self._allocations.unmapped

    @property
    def _allocations(self) -> PodAllocations:
        """What pods have by the kubelet's account, by whatever plugin's ids."""
        heard, inventory = self._state.holders, self._state.inventory
        if heard is None or inventory is None:
            return PodAllocations()
        return map_allocations(inventory, allocations_of(heard.devices))

    def given(self) -> Given:
        """Return what a carver must know; while the kubelet was not heard, pods may have more than the ledger knows."""
        inventory = self._state.inventory
        free = self._state.unwanted - self._state.leaving
        offered = frozenset[VgpuId](inventory.vgpus if inventory is not None else ()) - free
        return Given(
            self._state.holdings,
            self._state.type_names,
            offered,
            allocations=self._allocations,
            moves=self._state.wishes,
            unknown=Unknown() if inventory is None else self._unknown,
        )

    def moving(self, unit: UnitId, wishes: Wishes, interrupted: frozenset[PciAddress] = frozenset()) -> Change:
        """Return the change that brings GPUs of a unit to these drivers, for as long as they are wanted on them.

        A change that was killed is ended at the `interrupted` for as long as nothing is wanted of them.
        """
        planned = {gpu: None if gpu in interrupted else wish for gpu, wish in wishes.items()}
        return Change(
            self._state.gates,
            unit,
            lambda: all(self._desired.moves.get(gpu) is wish for gpu, wish in planned.items()),
            self._newest_account,
        )

    def carving(self, gpu: PciAddress, wish: CarveWish) -> Change:
        """Return the change that has a GPU carry what is wished, for as long as that is wanted.

        What is wanted of a GPU follows from what the host shows, too, which a change may hide for a while.
        """
        origin = self._desired.origin_of(gpu)

        def is_desired() -> bool:
            return self._desired.vgpus.get(gpu) == wish or self._desired.origin_of(gpu) == origin

        return Change(self._state.gates, gpu, is_desired, self._newest_account)

    def _newest_account(self, inventory: Inventory) -> PodAllocations:
        """Return what the kubelet has recorded that pods have by now, by whatever plugin; any thread calls it."""
        recorded = self._recorded()
        if isinstance(recorded, Unknown):
            return PodAllocations(unknown=recorded.reason or refusals.record_unread("its checkpoint"))
        return map_allocations(inventory, allocations_of(any_consumer(recorded)))

    @property
    def clears_way(self) -> bool:
        """Whether `clear_way` takes others' programs away for as long as its context lasts."""
        return self._operands is not None

    def clear_way(self, gpu: PciAddress, tell: Tell) -> AbstractAsyncContextManager[Reason | None]:
        """Have nobody else offer what is to be carved while the context lasts; it gives why that can't be had.

        `tell` takes what is being waited for. What the agent itself offers is withdrawn already.
        """
        if self._operands is None:
            return nullcontext()
        way = Way(lambda: self._is_to_be_carved(gpu), lambda since: self._unsettled(gpu, since))
        return self._operands.away(gpu, way, tell)

    def _is_to_be_carved(self, gpu: PciAddress) -> bool:
        planned = self._state.carving.by_gpu.get(gpu)
        return planned is not None and bool(planned[1].steps)

    def _unsettled(self, gpu: PciAddress, since: datetime) -> Reason | None:
        """Return why the kubelet may still admit pods by what is to go from a GPU, None where it does not."""
        heard, inventory = self._state.holders, self._state.inventory
        if heard is None or inventory is None or heard.at < since or not self.heard_since:
            return shortfalls.pods_unheard(gpu)
        counted = sorted(
            one for one in self._state.leaving if one in inventory.vgpus and inventory.vgpus[one].gpu == gpu
        )
        return shortfalls.still_counted(gpu, counted) if counted else None

    def conclude(self) -> bool:
        """Take that conclusions were drawn; return whether something was withdrawn by them."""
        carving = self._state.carving
        self._desired = Desired(self._state.wishes, carving.desired, self._state.modes, (carving.book, carving.config))
        withdrawn = frozenset[str](self._state.withdrawn) | self._state.unwanted
        news = bool(withdrawn - self._withdrawn)
        self._withdrawn = withdrawn
        if news:
            self._withdrawn_at = self._clock.now()
        self.concluded.set()
        if self._operands is not None:
            self._operands.stir()
        return news

    def hear_move(self, wish: Wish, outcome: str) -> None:
        """Take that a move has ended."""
        self._telemetry.moves[str(wish), outcome] += 1
        self._look_soon("move")
        self._conclude_soon()  # what the change kept from being offered

    def hear_carved(self, outcome: str) -> None:
        """Take that a GPU was carved, or could not be."""
        self._telemetry.moves["vgpus", outcome] += 1
        self._look_soon("carving")
        self._conclude_soon()  # what the change kept from being offered

    @property
    def heard_since(self) -> bool:
        """Whether the kubelet was heard since what is offered last became less."""
        heard = self._state.holders
        return heard is not None and heard.at >= self._withdrawn_at
