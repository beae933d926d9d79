"""Asks nvidia-smi, for an agent, for the names of the vGPU types in use that no VF lists.

nvidia-smi runs in the serial worker of the GPU's unit, for one GPU at a time: once for each version of the driver, and
again after an interval if it has failed.
"""

import logging
import math
from collections.abc import Callable, Mapping

from gpuvirt.agent.known.state import NodeState
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.clock import Clock, Signal
from gpuvirt.facts.ids import PciAddress, VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.access.tools import PROGRAM, Tools
from gpuvirt.loops.cell import Cell
from gpuvirt.loops.serialworker import SerialWorker, WorkerBlockedError
from gpuvirt.model.inventory.inventory import Inventory, unnamed_types
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.offers.view import NodeView

log = logging.getLogger(__name__)


class TypeNameQuestions:
    """The questions for the names of one node's vGPU types."""

    def __init__(
        self, tools: Tools, workers: Callable[[str], SerialWorker], clock: Clock, intervals: Intervals
    ) -> None:
        """`workers` returns the one serial worker of a unit."""
        self._tools = tools
        self._workers = workers
        self._clock = clock
        self._intervals = intervals
        self._due_s: dict[PciAddress, float] = {}
        """When nvidia-smi is asked again about a GPU whose types have no name yet."""
        self._failed: dict[PciAddress, Unread] = {}
        """The last failure of each GPU, so that each problem is logged once."""

    async def run(self, state: NodeState, decided: Cell[NodeView], decide_soon: Callable[[], None]) -> None:
        """Ask after each decision that leaves a type without a name, and again at intervals, until cancelled."""
        again = Signal()
        with decided.notifying(again):
            while True:
                if (inventory := state.inventory) is not None and (gpu := self._next(state, inventory)) is not None:
                    driver = inventory.facts.platform.nvidia_version
                    if state.observe_types(gpu, await self._ask(gpu, inventory.gpus[gpu].unit), driver):
                        decide_soon()
                await again.wait_for(self._clock, self._intervals.type_names_s)

    def _next(self, state: NodeState, inventory: Inventory) -> PciAddress | None:
        """Return a GPU to ask about; a question that its plan waits for brings the names, too."""
        planned, now_s = state.decisions.desired.vgpus.questions, self._clock.monotonic_s()
        unnamed = {
            gpu: found
            for gpu, found in unnamed_types(inventory).items()
            if gpu not in planned or not planned[gpu][1].types
        }
        due_s = {gpu: self._due_s.get(gpu, now_s + self._intervals.type_names_s) for gpu in unnamed}
        self._due_s = due_s
        return next((gpu for gpu, found in unnamed.items() if not found.answer or now_s >= due_s[gpu]), None)

    async def _ask(self, gpu: PciAddress, unit: UnitId) -> Mapping[str, VgpuType] | Unread:
        table: Mapping[str, VgpuType] | Unread
        try:
            table = await self._workers(unit).run(
                lambda: self._read(gpu), name="ask for vGPU types", timeout_s=self._intervals.vgpu_change_s
            )
        except WorkerBlockedError as error:
            table = Unread(PROGRAM, seen=str(error))
        if not isinstance(table, Unread):
            self._due_s[gpu] = math.inf
            log.info("%s: nvidia-smi named %d vGPU types", gpu, len(table), extra={"gpu": gpu})
            return table
        self._due_s[gpu] = self._clock.monotonic_s() + self._intervals.type_names_s
        if self._failed.get(gpu) != table:
            message = "%s: its vGPUs whose type no VF lists are not offered: nvidia-smi did not name the type: %s"
            log.warning(message, gpu, table.detail, extra={"gpu": gpu})
        self._failed[gpu] = table
        return table

    def _read(self, gpu: PciAddress) -> Mapping[str, VgpuType] | Unread:
        """Ask about one GPU. Most agents never do, and do not load the parsers of nvidia-smi's output for it."""
        from gpuvirt.hardware.programs.smireport import read_types  # noqa: PLC0415

        return read_types(self._tools, gpu)
