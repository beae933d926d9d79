"""What the agent lets those know who change GPUs: what is there and wanted, who has what, what is withdrawn."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime

from gpuvirt.clock import Clock, Signal
from gpuvirt.facts.ids import PciAddress, VgpuId
from gpuvirt.facts.vgpu import SmiReport
from gpuvirt.model import refusals, shortfalls
from gpuvirt.model.allocations import Allocations, Unknown
from gpuvirt.model.change.desired import DesiredGpu, DesiredUnit, DesiredVgpus
from gpuvirt.model.change.modes import Questions
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.scheduling import Footing, Told
from gpuvirt.model.heard import Progress
from gpuvirt.model.invalid import InvalidDesired
from gpuvirt.model.inventory import Inventory
from gpuvirt.model.isolation import UnitId
from gpuvirt.model.ledger import Holders, allocations_of
from gpuvirt.model.podallocations import PodAllocations, map_allocations
from gpuvirt.model.reasons import Reason
from gpuvirt.model.recorded import ReadRecorded, any_consumer
from gpuvirt.model.vgpuwanted import Book, ConfigName, Wanted
from gpuvirt.model.wanted import Modes
from gpuvirt.node.cell import Cell
from gpuvirt.node.change.attempts import HearTrouble
from gpuvirt.node.change.changes import Change, pods_by_gpu
from gpuvirt.node.change.drainrequest import VGPUS
from gpuvirt.node.change.gaterecord import APART_S, Reading, with_reading
from gpuvirt.node.change.inputs import Account, Inputs
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

    gpus: Mapping[PciAddress, DesiredGpu] = field(default_factory=dict)
    units: Mapping[UnitId, DesiredUnit] = field(default_factory=dict)
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
        self._readings: tuple[Reading, ...] = ()
        """What the kubelet's accounts said lately."""
        self.awaits_reading = False
        """Whether the kubelet's accounts must be read once more before what another's plugin offered may go."""
        self.looks = 0
        """How often the host was looked at."""

    @property
    def inventory(self) -> Inventory | None:
        """What was last seen."""
        return self._state.inventory

    @property
    def desired_units(self) -> Mapping[UnitId, DesiredUnit]:
        """What is desired of each isolation unit of which anything is."""
        return self._desired.units

    @property
    def follows_cluster(self) -> bool:
        """Whether the node's label or its GpuNode says what is wanted of its GPUs."""
        return self._state.follows_cluster

    @property
    def invalid_modes(self) -> tuple[InvalidDesired, ...]:
        """What of that is invalid."""
        return self._state.invalid.modes

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

    def vgpu_plan(self, gpu: PciAddress) -> VgpuPlan:
        """Return what was to be done to the vGPUs of a GPU when it was last observed."""
        return self._state.carving.plan_of(gpu)

    @property
    def questions(self) -> Mapping[PciAddress, tuple[DesiredVgpus, Questions]]:
        """What nvidia-smi must be asked of GPUs before it is known what is to be done to them."""
        return self._state.carving.questions

    def hear_smi(self, gpu: PciAddress, wish: DesiredVgpus, report: SmiReport | None) -> None:
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
    def _allocations(self) -> PodAllocations:
        """What pods have by the kubelet's account, by whatever plugin's ids."""
        heard, inventory = self._state.holders, self._state.inventory
        if heard is None or inventory is None:
            return PodAllocations()
        return map_allocations(inventory, allocations_of(heard.devices))

    def account(self) -> Account:
        """Return what pods have; while the kubelet was not heard, they may have more than the ledger knows."""
        inventory, allocations = self._state.inventory, self._allocations
        free = self._state.unwanted - self._state.leaving
        offered = frozenset[VgpuId](inventory.vgpus if inventory is not None else ()) - free
        pods = self.pods() if inventory is not None else Unknown()
        return Account(pods, allocations, self._state.holdings, offered)

    def inputs(self, *, offered: bool = True) -> Inputs:
        """Return what a change must know; without `offered`, as if no vGPU were offered to the kubelet."""
        account = self.account()
        if not offered:
            account = replace(account, offered=frozenset())
        readings = self._readings
        return Inputs(
            lambda _: account,
            self._state.type_names,
            driver_may_come=self.follows_cluster,
            readings=lambda: readings,
        )

    def changing(self, unit: UnitId, gpus: Iterable[PciAddress], circumstances: str | None = None) -> Change:
        """Return the change that brings GPUs of a unit to what is desired, for as long as that is desired.

        `circumstances`: what it depends on whether it is tried again when it fails.

        Which vGPUs are desired of a GPU follows from what the host shows, too, which a change may hide for a while.
        """
        planned = {gpu: (self._desired.gpus.get(gpu), self._desired.origin_of(gpu)) for gpu in gpus}

        def is_desired() -> bool:
            now = self._desired
            return all(
                now.gpus.get(gpu) == was or now.origin_of(gpu) == origin for gpu, (was, origin) in planned.items()
            )

        return Change(self._state.changes, unit, is_desired, self._newest_account, circumstances)

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

    def clear_way(self, gpus: Sequence[PciAddress], tell: Tell) -> AbstractAsyncContextManager[Reason | None]:
        """Have nobody else offer what is to be removed from GPUs while the context lasts; it gives why that can't be.

        `tell` takes what is being waited for. What the agent itself offers is withdrawn already.
        """
        if self._operands is None:
            return nullcontext()
        way = Way(
            lambda: any(self.vgpu_plan(gpu).steps for gpu in gpus),
            lambda since: next((why for gpu in gpus if (why := self._unsettled(gpu, since)) is not None), None),
        )
        return self._operands.away(gpus[0], way, tell)

    def _unsettled(self, gpu: PciAddress, since: datetime) -> Reason | None:
        """Return why the kubelet may still admit pods by what is to go from a GPU, None where it does not."""
        heard, inventory = self._state.holders, self._state.inventory
        self.awaits_reading = not self._read_twice_since(since)
        if heard is None or inventory is None or self.awaits_reading or not self.heard_since:
            return shortfalls.pods_unheard(gpu)
        counted = sorted(
            one for one in self._state.leaving if one in inventory.vgpus and inventory.vgpus[one].gpu == gpu
        )
        return shortfalls.still_counted(gpu, counted) if counted else None

    def hear_reading(self, heard: Holders | None) -> None:
        """Take what both accounts of the kubelet said; half an account tells nothing of what it lacks."""
        if heard is not None and heard.recorded and heard.partial is None:
            at_s = self._clock.monotonic_s() - (self._clock.now() - heard.at).total_seconds()
            new = Reading(at_s, frozenset(device for _, device in heard.devices))
            self._readings = with_reading(self._readings, new)

    def conclude(self) -> bool:
        """Take that conclusions were drawn; return whether something was withdrawn by them."""
        carving = self._state.carving
        units = _by_unit(self._state.inventory, carving.desired)
        self._desired = Desired(carving.desired, units, self._state.modes, (carving.book, carving.config))
        withdrawn = frozenset[str](self._state.withdrawn) | self._state.unwanted | self._state.drained.functions
        news = bool(withdrawn - self._withdrawn)
        self._withdrawn = withdrawn
        if news:
            self._withdrawn_at = self._clock.now()
        self.concluded.set()
        if self._operands is not None:
            self._operands.stir()
        return news

    def _read_twice_since(self, at: datetime) -> bool:
        """Return whether both accounts of the kubelet were read twice since another's plugin was gone."""
        since_s = self._clock.monotonic_s() - (self._clock.now() - at).total_seconds()
        later = [one.at_s for one in self._readings if one.at_s >= since_s]
        return bool(later) and later[-1] - later[0] >= APART_S

    def why_kept(self, desires: Mapping[str, Sequence[str]]) -> Reason | None:
        """Return why a command would be undone: of one of its GPUs the agent desires something else."""
        for gpu, wanted in self._desired.gpus.items():
            others = desires.get(gpu, ())
            drivers = {one for one in others if one != VGPUS}
            if wanted.driver is not None and drivers - {str(wanted.driver)}:
                return refusals.managed(gpu, str(self._state.modes.of(gpu)))
            if wanted.vgpus is not None and VGPUS in others:
                config = self._state.carving.configs.get(gpu)
                return refusals.carved(gpu, config or str(self._state.modes.of(gpu)))
        return None

    def is_drained(self, functions: frozenset[PciAddress]) -> bool:
        """Return whether the kubelet gives nothing of some functions any more but what pods have."""
        return self.heard_since and functions <= self._state.drained.functions and not functions & self._state.undrained

    def hear_changed(self, what: Iterable[str], outcome: str) -> None:
        """Take that a change has ended: of `passthrough` or `native` drivers, of `vgpus`."""
        for one in what:
            self._telemetry.moves[one, outcome] += 1
        self._look_soon("change")
        self._conclude_soon()  # what the change kept from being offered

    @property
    def heard_since(self) -> bool:
        """Whether the kubelet was heard since what is offered last became less."""
        heard = self._state.holders
        return heard is not None and heard.at >= self._withdrawn_at


def _by_unit(inventory: Inventory | None, desired: Mapping[PciAddress, DesiredGpu]) -> Mapping[UnitId, DesiredUnit]:
    units: defaultdict[UnitId, dict[PciAddress, DesiredGpu]] = defaultdict(dict)
    for gpu, wanted in desired.items() if inventory is not None else ():
        if inventory is not None and gpu in inventory.gpus:
            units[inventory.gpus[gpu].unit][gpu] = wanted
    return units
