"""Asks nvidia-smi the questions that must be answered before GPUs can be planned."""

import asyncio
from collections.abc import Callable
from functools import partial

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.vgpu import SmiReport
from gpuvirt.hardware.access.tools import Tools
from gpuvirt.hardware.programs.smireport import read_report
from gpuvirt.loops.serialworker import SerialWorker, WorkerBlockedError
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.vgpus.modes import Questions
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import Reason, refusals
from gpuvirt.node.known.state import NodeState
from gpuvirt.node.loops.intervals import Intervals

Blocked = Callable[[UnitId, PciAddress, Reason], None]


class SmiQuestions:
    """The questions about one node's GPUs. nvidia-smi opens the GPU, so it runs in the serial worker of the unit."""

    def __init__(
        self, tools: Tools, workers: Callable[[str], SerialWorker], clock: Clock, intervals: Intervals
    ) -> None:
        self._tools = tools
        self._workers = workers
        self._clock = clock
        self._intervals = intervals
        self.asking: set[PciAddress] = set()
        """The GPUs for which nvidia-smi runs now."""

    def ask(
        self, state: NodeState, decide_soon: Callable[[], None], group: asyncio.TaskGroup, blocked: Blocked
    ) -> None:
        """Start a task for each new question; `blocked` is called if the kernel blocks nvidia-smi."""

        def observe(gpu: PciAddress, vgpus: DesiredVgpus, report: SmiReport) -> None:
            state.observe_smi(gpu, vgpus, report, self._clock.monotonic_s())
            decide_soon()

        inventory = state.inventory
        for gpu, (vgpus, questions) in state.decisions.desired.vgpus.questions.items():
            if gpu not in self.asking and inventory is not None and gpu in inventory.gpus:
                self.asking.add(gpu)
                unit = inventory.gpus[gpu].unit
                group.create_task(self._ask(partial(observe, gpu, vgpus), gpu, unit, questions, blocked))

    async def _ask(
        self,
        observe: Callable[[SmiReport], None],
        gpu: PciAddress,
        unit: UnitId,
        questions: Questions,
        blocked: Blocked,
    ) -> None:
        try:
            try:
                report = await self._workers(unit).run(
                    lambda: read_report(self._tools, gpu, types=questions.types, scheduler=questions.scheduler),
                    name="ask nvidia-smi",
                    timeout_s=self._intervals.vgpu_change_s,
                )
            except WorkerBlockedError as error:
                blocked(unit, gpu, refusals.blocked(gpu, str(error)))
            else:
                observe(report)
        finally:
            self.asking.discard(gpu)
