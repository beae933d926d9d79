"""Asks nvidia-smi what must be known before GPUs can be planned, and which schedulers their vGPUs have.

nvidia-smi takes about a second and opens the GPU, so it runs in the serial worker of the GPU's unit. Schedulers are
read after a change of vGPUs, after a change of drivers, and at long intervals, for one GPU at a time.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from gpuvirt.agent.known.state import NodeState
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.clock import Clock
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import Scheduler, SmiReport
from gpuvirt.hardware.access.tools import PROGRAM, Tools
from gpuvirt.hardware.programs.smireport import read_report, read_scheduler
from gpuvirt.loops.serialworker import SerialWorker, WorkerBlockedError
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.vgpus.modes import Questions
from gpuvirt.model.change.vgpus.scheduling import SchedulerContext, SchedulerReport
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import Reason, refusals

log = logging.getLogger(__name__)

Blocked = Callable[[UnitId, PciAddress, Reason], None]


class SmiQuestions:
    """The questions about one node's GPUs that are asked before these are planned."""

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

        def observe(gpu: PciAddress, vgpus: DesiredVgpus, driver: str | None, report: SmiReport) -> None:
            if isinstance(report.types, Unread) or report.types:
                state.observe_types(gpu, report.types, driver)
            state.observe_smi(gpu, vgpus, report, self._clock.monotonic_s())
            decide_soon()

        inventory = state.inventory
        for gpu, (vgpus, questions) in state.decisions.desired.vgpus.questions.items():
            if gpu not in self.asking and inventory is not None and gpu in inventory.gpus:
                self.asking.add(gpu)
                unit = inventory.gpus[gpu].unit
                driver = inventory.facts.platform.nvidia_version
                group.create_task(self._ask(partial(observe, gpu, vgpus, driver), gpu, unit, questions, blocked))

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


class Schedulers:
    """Reads the vGPU schedulers of one node's GPUs."""

    def __init__(
        self, tools: Tools, workers: Callable[[str], SerialWorker], clock: Clock, intervals: Intervals
    ) -> None:
        """`workers` returns the one serial worker of a unit."""
        self._tools = tools
        self._workers = workers
        self._clock = clock
        self._intervals = intervals
        self._asking: asyncio.Task[None] | None = None
        self._observed: dict[PciAddress, Scheduler | Unread] = {}
        """The last result of each GPU, so that each problem is logged once."""

    def ask_next(self, state: NodeState, decide_soon: Callable[[], None], group: asyncio.TaskGroup) -> None:
        """Start a task that reads the scheduler of the next due GPU, unless such a task runs already.

        `decide_soon` is called if the scheduler has changed.
        """
        if self._asking is not None and not self._asking.done():
            return
        gpu, inventory = self._next(state), state.inventory
        if gpu is None or inventory is None or gpu not in inventory.gpus:
            return
        worker, scheduler_context = (
            self._workers(inventory.gpus[gpu].unit),
            state.decisions.desired.vgpus.time_shared[gpu],
        )

        def observe(report: SchedulerReport) -> None:
            if state.observe_scheduler(gpu, report):
                decide_soon()

        self._asking = group.create_task(self._ask(observe, gpu, worker, scheduler_context))

    def _next(self, state: NodeState) -> PciAddress | None:
        """Return a GPU whose scheduler is unknown, else one whose scheduler was read too long ago."""
        known = state.memory.smi.schedulers
        due_s = {
            gpu: known[gpu].at_s + self._intervals.schedulers_s if gpu in known else 0.0
            for gpu in state.decisions.desired.vgpus.time_shared
        }
        gpu = min(due_s, key=due_s.__getitem__, default=None)
        return gpu if gpu is not None and self._clock.monotonic_s() >= due_s[gpu] else None

    async def _ask(
        self,
        observe: Callable[[SchedulerReport], None],
        gpu: PciAddress,
        worker: SerialWorker,
        scheduler_context: SchedulerContext,
    ) -> None:
        found: Scheduler | Unread
        try:
            found = await worker.run(
                lambda: read_scheduler(self._tools, gpu),
                name="ask for the scheduler",
                timeout_s=self._intervals.vgpu_change_s,
            )
        except WorkerBlockedError as error:
            found = Unread(PROGRAM, seen=str(error))
        if isinstance(found, Unread) and self._observed.get(gpu) != found:
            log.info("%s: nvidia-smi did not report the vGPU scheduler: %s", gpu, found.detail, extra={"gpu": gpu})
        self._observed[gpu] = found
        observe(SchedulerReport(found, scheduler_context, self._clock.monotonic_s()))
