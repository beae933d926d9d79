"""Learns how the vGPUs of each GPU share its time, so that it is shown: after carving, with a new driver, and seldom.

nvidia-smi is asked of one GPU at a time, in the lane of its unit: it takes about a second, and opens the GPU for that.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import Scheduler
from gpuvirt.hardware.smireport import read_scheduler
from gpuvirt.hardware.tools import PROGRAM, Tools
from gpuvirt.model.change.scheduling import Footing, Told
from gpuvirt.model.inventory import Inventory
from gpuvirt.node.lane import Lane, LaneBlockedError
from gpuvirt.node.pace import Pace

log = logging.getLogger(__name__)


class Hearer(Protocol):
    """The agent, as far as it is told of schedulers."""

    @property
    def inventory(self) -> Inventory | None:
        """What was last seen, None before the first look."""
        ...

    @property
    def time_shared(self) -> Mapping[PciAddress, Footing]:
        """The GPUs whose scheduler is to be known, with what it stands on."""
        ...

    @property
    def schedulers(self) -> Mapping[PciAddress, Told]:
        """What is known of them."""
        ...

    def hear_scheduler(self, gpu: PciAddress, told: Told, /) -> None:
        """Take what nvidia-smi has told."""
        ...


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

    def ask_next(self, agent: Hearer, group: asyncio.TaskGroup) -> None:
        """Have a task ask of the GPU whose turn it is, if there is one and none is being asked of."""
        if self._asking is not None and not self._asking.done():
            return
        gpu, inventory = self._next(agent), agent.inventory
        if gpu is None or inventory is None or gpu not in inventory.gpus:
            return
        lane, footing = self._lanes(inventory.gpus[gpu].unit), agent.time_shared[gpu]
        self._asking = group.create_task(self._ask(agent, gpu, lane, footing))

    def _next(self, agent: Hearer) -> PciAddress | None:
        """Return a GPU of which nothing is known as it stands, else one that was asked of too long ago."""
        known = agent.schedulers
        due_s = {gpu: known[gpu].at_s + self._pace.schedulers_s if gpu in known else 0.0 for gpu in agent.time_shared}
        gpu = min(due_s, key=due_s.__getitem__, default=None)
        return gpu if gpu is not None and self._clock.monotonic_s() >= due_s[gpu] else None

    async def _ask(self, agent: Hearer, gpu: PciAddress, lane: Lane, footing: Footing) -> None:
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
        agent.hear_scheduler(gpu, Told(found, footing, self._clock.monotonic_s()))
