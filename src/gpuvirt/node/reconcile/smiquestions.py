"""Asks nvidia-smi what must be known of GPUs before it is known what is to be done to them."""

import asyncio
from collections.abc import Callable

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.smireport import read_report
from gpuvirt.hardware.tools import Tools
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.vgpus.modes import Questions
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import Reason, refusals
from gpuvirt.node.loops.intervals import Intervals
from gpuvirt.node.loops.serialworker import SerialWorker, WorkerBlockedError
from gpuvirt.node.reconcile.dependencies import Dependencies

Blocked = Callable[[Dependencies, UnitId, PciAddress, Reason], None]


class SmiQuestions:
    """Asks of the GPUs of one node, each in the lane of its unit: nvidia-smi opens the GPU for a moment."""

    def __init__(
        self, tools: Tools, workers: Callable[[str], SerialWorker], clock: Clock, intervals: Intervals
    ) -> None:
        self._tools = tools
        self._workers = workers
        self._clock = clock
        self._intervals = intervals
        self.asking: set[PciAddress] = set()
        """The GPUs of which nvidia-smi is being asked."""

    def ask(self, agent: Dependencies, group: asyncio.TaskGroup, blocked: Blocked) -> None:
        """Have a task ask each question that is not being asked yet; `blocked` takes that one sleeps in the kernel."""
        for gpu, (vgpus, questions) in agent.questions.items():
            if gpu not in self.asking:
                self.asking.add(gpu)
                group.create_task(self._ask(agent, gpu, vgpus, questions, blocked))

    async def _ask(
        self, agent: Dependencies, gpu: PciAddress, vgpus: DesiredVgpus, questions: Questions, blocked: Blocked
    ) -> None:
        try:
            inventory = agent.state.inventory
            if inventory is None or gpu not in inventory.gpus:
                return
            unit = inventory.gpus[gpu].unit
            try:
                report = await self._workers(unit).run(
                    lambda: read_report(self._tools, gpu, types=questions.types, scheduler=questions.scheduler),
                    name="ask nvidia-smi",
                    timeout_s=self._intervals.vgpu_change_s,
                )
            except WorkerBlockedError as error:
                blocked(agent, unit, gpu, refusals.blocked(gpu, str(error)))
            else:
                agent.state.vgpu_plans.observe_smi(gpu, vgpus, report, self._clock.monotonic_s())
                agent.callbacks.conclude_soon()
        finally:
            self.asking.discard(gpu)
