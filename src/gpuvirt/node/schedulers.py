"""Learns how the vGPUs of each GPU share its time, so that it is shown: after carving, with a new driver, and seldom.

nvidia-smi is asked of one GPU at a time, in the lane of its unit: it takes about a second, and opens the GPU for that.
"""

import asyncio
import logging
from collections.abc import Callable

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import Scheduler
from gpuvirt.hardware.smireport import read_scheduler
from gpuvirt.hardware.tools import PROGRAM, Tools
from gpuvirt.model.change.scheduling import Footing, Told
from gpuvirt.node.carveplans import CarvePlans
from gpuvirt.node.lane import Lane, LaneBlockedError
from gpuvirt.node.pace import Pace
from gpuvirt.node.state import NodeState

log = logging.getLogger(__name__)


class Schedulers:
    """Asks for the schedulers of one node's GPUs."""

    def __init__(self, tools: Tools, lanes: Callable[[str], Lane], clock: Clock, pace: Pace) -> None:
        """`lanes` returns the one lane of a unit."""
        self._tools = tools
        self._lanes = lanes
        self._clock = clock
        self._pace = pace
        self._asking: asyncio.Task[None] | None = None
        self._heard: dict[PciAddress, Scheduler | Unread] = {}
        """What was told last of each GPU, so that the log says it once."""

    def ask_next(self, state: NodeState, conclude_soon: Callable[[], None], group: asyncio.TaskGroup) -> None:
        """Have a task ask of the GPU whose turn it is, if there is one and none is being asked of.

        `conclude_soon` is called where nvidia-smi told something new.
        """
        if self._asking is not None and not self._asking.done():
            return
        gpu, inventory = self._next(state.carving), state.inventory
        if gpu is None or inventory is None or gpu not in inventory.gpus:
            return
        lane, footing = self._lanes(inventory.gpus[gpu].unit), state.carving.time_shared[gpu]

        def hear(told: Told) -> None:
            if state.carving.hear_scheduler(gpu, told):
                conclude_soon()

        self._asking = group.create_task(self._ask(hear, gpu, lane, footing))

    def _next(self, carving: CarvePlans) -> PciAddress | None:
        """Return a GPU of which nothing is known as it stands, else one that was asked of too long ago."""
        known = carving.schedulers
        due_s = {gpu: known[gpu].at_s + self._pace.schedulers_s if gpu in known else 0.0 for gpu in carving.time_shared}
        gpu = min(due_s, key=due_s.__getitem__, default=None)
        return gpu if gpu is not None and self._clock.monotonic_s() >= due_s[gpu] else None

    async def _ask(self, hear: Callable[[Told], None], gpu: PciAddress, lane: Lane, footing: Footing) -> None:
        found: Scheduler | Unread
        try:
            found = await lane.run(
                lambda: read_scheduler(self._tools, gpu), name="ask for the scheduler", timeout_s=self._pace.carve_s
            )
        except LaneBlockedError as error:
            found = Unread(PROGRAM, seen=str(error))
        if isinstance(found, Unread) and self._heard.get(gpu) != found:
            log.info("the vGPU scheduler of %s is not known: %s", gpu, found.said, extra={"gpu": gpu})
        self._heard[gpu] = found
        hear(Told(found, footing, self._clock.monotonic_s()))
