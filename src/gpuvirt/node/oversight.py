"""What the agent lets those know who change GPUs: what is there and wanted, who has what, what is withdrawn."""

from collections.abc import Callable, Mapping

from gpuvirt.clock import Clock, Signal
from gpuvirt.facts.ids import PciAddress, VgpuId
from gpuvirt.facts.vgpu import SmiReport
from gpuvirt.model.carving import CarvePlan, CarveWish
from gpuvirt.model.gpumodes import Questions
from gpuvirt.model.heard import VgpuState
from gpuvirt.model.inventory import Inventory
from gpuvirt.model.plan import Wish, Wishes
from gpuvirt.model.vgpuwanted import Wanted
from gpuvirt.node.attempts import HearTrouble
from gpuvirt.node.carver import Given
from gpuvirt.node.cell import Cell
from gpuvirt.node.state import NodeState
from gpuvirt.node.telemetry import Telemetry


class Oversight:
    """One node's, for its reconcilers."""

    def __init__(
        self,
        state: NodeState,
        telemetry: Telemetry,
        clock: Clock,
        *,
        look_soon: Callable[[str], None],
        conclude_soon: Callable[[], None],
        hear_trouble: HearTrouble,
    ) -> None:
        self.concluded = Signal()
        """Set whenever conclusions were drawn."""
        self.vgpu_states: Cell[VgpuState | None] = Cell(None)
        """How far what is wanted of vGPUs has come, for the cluster to be told; None: it is told nothing."""
        self.hear_trouble = hear_trouble
        self._state = state
        self._telemetry = telemetry
        self._clock = clock
        self._look_soon = look_soon
        self._conclude_soon = conclude_soon
        self._withdrawn_at = clock.now()
        """When devices were last taken from what is offered."""
        self._withdrawn: frozenset[str] = frozenset()

    @property
    def inventory(self) -> Inventory | None:
        """What was last seen."""
        return self._state.inventory

    @property
    def wishes(self) -> Wishes:
        """What is wanted of GPUs."""
        return self._state.wishes

    @property
    def still_counted(self) -> frozenset[PciAddress]:
        """The functions that are offered no more, and that the kubelet was last heard to count."""
        return self._state.still_counted

    @property
    def wanted_vgpus(self) -> Wanted:
        """Which vGPUs are wanted, or why that is not known."""
        return self._state.wanted_vgpus

    @property
    def carve_plans(self) -> Mapping[PciAddress, tuple[CarveWish, CarvePlan]]:
        """What is wanted of each GPU that is to be carved, and what was to be done to it when it was last seen."""
        return self._state.carve_plans

    @property
    def questions(self) -> Mapping[PciAddress, tuple[CarveWish, Questions]]:
        """What nvidia-smi must be asked of GPUs before it is known what is to be done to them."""
        return self._state.questions

    def hear_smi(self, gpu: PciAddress, wish: CarveWish, report: SmiReport | None) -> None:
        """Take what nvidia-smi said when it was asked for a wish; None: that may be otherwise by now."""
        if report is not None:
            self._state.smi[gpu] = wish, report
        else:
            self._state.smi.pop(gpu, None)
        self._conclude_soon()

    def pods(self) -> Mapping[PciAddress, tuple[str, ...]] | None:
        """Return which pods have which GPUs, None where that was not heard since what is offered last became less."""
        if not self.heard_since:
            return None
        found: dict[PciAddress, tuple[str, ...]] = {}
        for entry in self._state.entries:
            found[entry.target.gpu] = (*found.get(entry.target.gpu, ()), entry.holder)
        return found

    def given(self) -> Given | None:
        """Return what a carver must know, None where the kubelet was not heard since what is offered became less."""
        inventory = self._state.inventory
        if inventory is None or not self.heard_since:
            return None
        free = self._state.unwanted - self._state.leaving
        return Given(self._state.holdings, self._state.type_names, frozenset[VgpuId](inventory.vgpus) - free)

    def conclude(self) -> bool:
        """Take that conclusions were drawn; return whether something was withdrawn by them."""
        withdrawn = frozenset[str](self._state.withdrawn) | self._state.unwanted
        news = bool(withdrawn - self._withdrawn)
        self._withdrawn = withdrawn
        if news:
            self._withdrawn_at = self._clock.now()
        self.concluded.set()
        return news

    def hear_move(self, wish: Wish, outcome: str) -> None:
        """Take that a move has ended."""
        self._telemetry.moves[str(wish), outcome] += 1
        self._look_soon("move")

    def hear_carved(self, outcome: str) -> None:
        """Take that a GPU was carved, or could not be."""
        self._telemetry.moves["vgpus", outcome] += 1
        self._look_soon("carving")

    @property
    def heard_since(self) -> bool:
        """Whether the kubelet was heard since what is offered last became less."""
        heard = self._state.holders
        return heard is not None and heard.at >= self._withdrawn_at
